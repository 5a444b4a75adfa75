"""vLLM as a backend: its server is a child of `primerl inference`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.inference.backend import Engine, EngineBackend, UnservableError
from primerl.inference.vllm import installation
from primerl.process import cuda
from primerl.train.model import support

if TYPE_CHECKING:
    from primerl.inference.settings import InferenceConfig


class VllmBackend(EngineBackend):
    title = "vLLM"
    rereads_adapters = True
    fills_its_share = True

    def is_preferred(self, python: str | None) -> bool:
        """Where there is a CUDA GPU and vLLM is installed."""
        if not cuda.has_cuda():
            return False
        try:
            installation.find(python)
        except UnservableError:
            return False
        return True

    def default_dtype(self, python: str | None) -> str:
        return installation.default_dtype(installation.find(python))

    def check_options(self, options: Mapping[str, Any]) -> None:
        from primerl.inference.vllm import flags

        flags.check(options)

    def check_settings(self, config: InferenceConfig) -> None:
        super().check_settings(config)
        if config.pull_to is not None and config.lora is not None:
            raise UnservableError.at(
                "pull_to",
                "vLLM reads adapters from the run's own folder, so they cannot be pulled; share that folder, "
                'or let the run publish whole weights (trainer.model.lora.broadcast = "merged")',
            )

    def check_model(self, folder: Path, python: str | None) -> None:
        installation.check_model(folder, installation.find(python).device)

    def check_dtype(self, folder: Path, dtype: str, python: str | None) -> None:
        installation.check_dtype(folder, dtype, installation.find(python).device)

    def merges(self, targets: Sequence[str], folder: Path) -> str | None:
        return support.vllm_merges(support.read(folder))

    def check_adapters(self, rank: int, folder: Path, targets: Sequence[str] = ("all-linear",)) -> None:
        """As far as it can be seen before vLLM is started, which refuses layers that it cannot adapt."""
        installation.lora_rank(rank)
        config = support.read(folder)
        if support.experts(config):
            problem = support.vllm_merges(config)
            raise UnservableError.at(
                "trainer.model.lora.broadcast",
                f"the model in {folder} is a mixture: {problem}; omit it, or set it to merged",
            )

    def check_sampling(self, temperature: float) -> None:
        highest = installation.HIGHEST_TEMPERATURE
        if temperature > highest:
            raise UnservableError(
                f"orchestrator.sampling.temperature ({temperature:g}) is above {highest:g}, the highest that vLLM "
                'samples at; lower it, or set inference.backend = "torch"',
                "orchestrator.sampling.temperature",
            )

    def check_experts(self, folder: Path, python: str | None) -> None:
        if installation.find(python).device == "cpu":
            raise UnservableError.at(
                "trainer.enable_router_replay",
                "vLLM on a CPU cannot report which experts it chose (only its Model "
                "Runner V2 can, which needs Triton); omit it, or use a GPU",
            )

    def gpus(self, device: str, options: Mapping[str, Any]) -> int:
        sizes = (options.get(name, 1) for name in ("tensor-parallel-size", "pipeline-parallel-size"))
        return math.prod(size for size in sizes if isinstance(size, int) and size > 0)

    def start(self, config: InferenceConfig) -> Engine:
        from primerl.inference.vllm.process import VllmServer

        found = installation.find(config.python)
        if config.lora is not None:
            installation.lora_rank(config.lora.rank)
        folder = Path(config.model.path)
        installation.check_model(folder, found.device)
        installation.check_dtype(folder, config.dtype or installation.default_dtype(found), found.device)
        return VllmServer(config, found)
