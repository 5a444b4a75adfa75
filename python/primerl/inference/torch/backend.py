"""The embedded engine as a backend. torch is imported when an engine starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.inference.backend import Engine, EngineBackend, EngineEndedError, UnservableError
from primerl.inference.pulling import Puller
from primerl.train.model import support

if TYPE_CHECKING:
    from primerl._core import InferenceEngine
    from primerl.inference.settings import InferenceConfig
    from primerl.inference.torch.step import StepBackend

log = logging.getLogger("primerl.inference")


class EmbeddedBackend(EngineBackend):
    title = "the embedded engine"
    modules = ("torch", "transformers")
    preload = ("primerl.inference.torch.step",)
    seeds_each_request = True
    digests_live_weights = True
    starts_slowly = False

    def gpus(self, device: str, options: Mapping[str, Any]) -> int:
        """An engine whose GPU is given by its number has chosen for itself, among all that there are."""
        return 1 if device in ("auto", "cuda") else 0

    def check_model(self, folder: Path, python: str | None) -> None:
        from primerl.inference.torch.shape import Shape

        try:
            Shape.read(folder)
        except UnservableError:
            raise
        except (ValueError, TypeError) as error:
            raise UnservableError.at("model.path", f"{folder}: {error}") from None

    def merges(self, targets: Sequence[str], folder: Path) -> str | None:
        return support.embedded_engine_merges(support.read(folder), targets)

    def check_adapters(self, rank: int, folder: Path, targets: Sequence[str] = ("all-linear",)) -> None:
        if (problem := self.merges(targets, folder)) is not None:
            raise UnservableError.at(
                "trainer.model.lora.broadcast", f"{problem}, as the model in {folder}; omit it, or set it to merged"
            )

    def check_settings(self, config: InferenceConfig) -> None:
        super().check_settings(config)
        for name, value in (("python", config.python), ("vllm", config.vllm)):
            if value and config.backend != "auto":
                raise UnservableError.at(name, f'is for backend "vllm"; {self.title} has no use for it')

    def check_experts(self, folder: Path, python: str | None) -> None:
        raise UnservableError.at(
            "trainer.enable_router_replay", f"{self.title} serves no mixtures, so it has no experts to report"
        )

    def start(self, config: InferenceConfig) -> Engine:
        # torch takes seconds to import: not before the settings are known to be good.
        import torch

        from primerl import _core
        from primerl.inference.torch.step import device_of
        from primerl.train.distributed.ranks import keep_to

        torch.set_num_threads(config.threads)
        keep_to(config.gpu_share, device_of(config.device))
        backend = self.load(config)
        backend.puller = None if config.pulled is None else Puller(config.pulled)
        log.info("the model computes in %s on %s", str(backend.decoder.dtype).removeprefix("torch."), backend.device)
        settings = engine_settings(config, backend.decoder.max_len)
        return EmbeddedEngine(_core.InferenceEngine(settings, backend, host=config.host, port=config.port))

    def load(self, config: InferenceConfig) -> StepBackend:
        """The model, for the scheduler in Rust. Raises ValueError for one, or a setting, that cannot be served."""
        from primerl.inference.torch.step import TorchBackend

        return TorchBackend(
            Path(config.model.path),
            dtype=config.dtype or "float32",
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            logprobs_mode=config.logprobs_mode,
            lora=None if config.lora is None else (config.lora.rank, config.lora.target_modules),
            device=config.device,
        )


class EmbeddedEngine:
    """Runs on threads of this process."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.url = engine.url

    def wait(self, timeout_s: float) -> bool:
        from primerl import _core

        try:
            return self._engine.wait(timeout_s)
        except _core.EngineError as error:
            raise EngineEndedError(str(error)) from error

    def watch(self) -> None:
        """Its threads report their own end."""

    def stop(self) -> None:
        self._engine.stop()


def engine_settings(config: InferenceConfig, max_model_len: int) -> dict[str, Any]:
    """Settings of `primerl_engine_server::Config`."""
    return {
        "served_model_name": config.served_name,
        "model_root": config.model.path,
        "chat_model": config.model.path,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_tokens": config.kv_cache_tokens or config.max_num_seqs * max_model_len,
        "max_num_batched_tokens": max(2048, config.max_num_seqs),
        "seed": config.seed,
    }
