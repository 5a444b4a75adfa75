"""The embedded engine over `transformers` as a backend. torch is imported when an engine starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primerl.inference.backend import UnservableError
from primerl.inference.torch.backend import EmbeddedBackend
from primerl.train.model import support

if TYPE_CHECKING:
    from primerl.inference.settings import InferenceConfig
    from primerl.inference.torch.step import StepBackend

log = logging.getLogger("primerl.inference")


class TransformersBackend(EmbeddedBackend):
    """Serves what the trainer trains; slower than the decoder of `inference.torch`, which knows three families."""

    title = "the embedded engine over transformers"
    preload = ("primerl.inference.transformers.step",)
    holds_trained_only = True
    drawback = "it computes as transformers does, many times slower than vLLM"

    def check_model(self, folder: Path, python: str | None) -> None:
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            problem = support.transformers_engine_refusal(config)
        except FileNotFoundError:
            raise UnservableError.at("model.path", f"{support.no_config(file.parent)}") from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UnservableError.at("model.path", f"{file} cannot be read: {error}") from None
        if problem is not None:
            raise UnservableError.at("model.path", f"{file}: {problem}")

    def merges(self, targets: Sequence[str], folder: Path) -> str | None:
        return f"{self.title} is sent whole weights, with adapters merged"

    def check_adapters(self, rank: int, folder: Path, targets: Sequence[str] = ("all-linear",)) -> None:
        raise UnservableError.at(
            "trainer.model.lora.broadcast", f"{self.merges(targets, folder)}; omit it, or set it to merged"
        )

    def check_experts(self, folder: Path, python: str | None) -> None:
        """It reports those of every mixture with one router a layer, which is seen when it is loaded."""

    def load(self, config: InferenceConfig) -> StepBackend:
        from primerl.inference.transformers.step import CachedBackend

        if config.lora is not None:
            self.check_adapters(config.lora.rank, Path(config.model.path))
        log.info("serving with %s: %s", self.title, self.drawback)
        return CachedBackend(
            Path(config.model.path),
            dtype=config.dtype or "float32",
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            logprobs_mode=config.logprobs_mode,
            device=config.device,
            reports_experts=config.enable_return_routed_experts,
        )
