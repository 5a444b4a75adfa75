"""What an engine backend is: everything that a run and `primerl inference` ask of the software that serves the model.

    config    `check_options`, `check_model`, `check_dtype` and other checks       before anything starts, without torch
    resolve   `default_dtype` and the attributes below                             settings of the other processes
    server    `check_settings` ──> `start` ──> Engine: url, wait, watch, stop      in `primerl inference`

An engine speaks vLLM's HTTP surface (docs/architecture.md, "Engines"): generate, pause and resume, weight updates from
a manifest with the digest of what was loaded, LoRA adapters, metrics, health. `tests/test_engine_conformance.py` tests
an engine against it. `backends` lists the backends.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from primerl.process.problems import ProblemError

if TYPE_CHECKING:
    from primerl.inference.settings import InferenceConfig

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


class UnservableError(ProblemError, ValueError):
    """The backend is not installed here, or cannot serve this model or these settings. The message names the field and
    says what to do."""


class EngineEndedError(Exception):
    """The engine has ended by itself, or does not answer any more; the message says why."""

    def __init__(self, message: str, ends_by: signal.Signals | None = None) -> None:
        super().__init__(message)
        self.ends_by = ends_by
        """The signal by which `primerl inference` ends, so that the launcher starts it again; None: it exits with 1."""


class Engine(Protocol):
    """A started engine."""

    @property
    def url(self) -> str: ...

    def wait(self, timeout_s: float) -> bool:
        """Waits so long; whether it was stopped on request. Raises EngineEndedError where it has ended by itself."""

    def watch(self) -> None:
        """It has generated its first token: from now on it has to be healthy."""

    def stop(self) -> None:
        """Ends the engine and all that it has started."""


class EngineBackend:
    """Override what differs. Instances hold no state; importing their module has to be cheap."""

    title: str
    """Its name in sentences."""
    modules: tuple[str, ...] = ()
    """Packages that it needs in this interpreter."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server of torch imports for it; where there are none, its process is not forked."""
    logprobs_modes: tuple[str, ...] = LOGPROBS_MODES
    """Which log-probabilities it reports: before and after temperature and the other sampling settings."""
    seeds_each_request = False
    """Whether a request's seed follows from its id, so that every replica may have the same seed."""
    digests_live_weights = False
    """Whether the digest is of the very tensors it computes with, so that no probe has to prove the model too."""
    starts_slowly = True
    """Whether an engine that is started again takes as long as at the beginning: rollouts wait so long for it."""
    drawback: str = ""
    """A sentence that a user reads who did not choose it by name: what it is worse at than others."""
    fills_its_share = False
    """Whether its KV cache takes all that is left of its share of a GPU's memory, unless its size is given."""
    holds_trained_only = False
    """Whether it holds what a trainer publishes of a model and nothing else of its folder, such as a vision tower."""
    rereads_adapters = False
    """Whether a published adapter may be read again while requests use it, so that its folder has to stay."""

    def is_preferred(self, python: str | None) -> bool:
        """Whether `backend = "auto"` takes it on this machine. `python`: `inference.python`, here and below."""
        return False

    def default_dtype(self, python: str | None) -> str:
        """What it computes in where `inference.dtype` is omitted. Raises UnservableError."""
        return "float32"

    def check_options(self, options: Mapping[str, Any]) -> None:
        """`[inference.<name>]` of a backend of ours, `[inference.options]` of others. Raises ValueError."""

    def check_model(self, folder: Path, python: str | None) -> None:
        """Whether it can serve the model, by its config.json alone. Raises UnservableError."""

    def check_dtype(self, folder: Path, dtype: str, python: str | None) -> None:
        """Whether it can compute the model in that number format. Raises UnservableError."""

    def check_adapters(self, rank: int, folder: Path, targets: Sequence[str] = ("all-linear",)) -> None:
        """Whether it can serve adapters of this rank and these `target_modules` to the model, by its config.json alone;
        not asked where merged weights are sent. Raises UnservableError."""

    def merges(self, targets: Sequence[str], folder: Path) -> str | None:
        """Why it is sent merged weights where adapters of these `target_modules` are trained and
        `trainer.model.lora.broadcast` is unset, by the model's config.json alone, which may not be there yet; None: it
        is sent adapters."""
        return None

    def check_sampling(self, temperature: float) -> None:
        """Raises UnservableError for what it cannot sample at."""

    def check_experts(self, folder: Path, python: str | None) -> None:
        """Whether it can report which experts of a mixture it chose. Raises UnservableError."""

    def gpus(self, device: str, options: Mapping[str, Any]) -> int:
        """How many GPUs of a machine with several one engine takes for itself. `device`: `inference.device`; `options`:
        as in `check_options`."""
        return 1

    def check_settings(self, config: InferenceConfig) -> None:
        """Settings of one engine that it refuses. Raises UnservableError."""
        if config.logprobs_mode not in self.logprobs_modes:
            raise UnservableError.at(
                "logprobs_mode",
                f"{self.title} reports {', '.join(self.logprobs_modes)} only, not {config.logprobs_mode}",
            )
        if config.enable_return_routed_experts:
            self.check_experts(Path(config.model.path), config.python)

    def start(self, config: InferenceConfig) -> Engine:
        """Starts an engine at `config.host` and `config.port`; it may still be loading when this returns. Raises
        ValueError or OSError for a setting or a model that it cannot serve."""
        raise NotImplementedError
