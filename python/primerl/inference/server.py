"""`primerl inference`: an engine, the embedded one or vLLM's server, as a process that joins an orchestrator."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn, Protocol

from primerl.inference.vllm import flags, installation
from primerl.inference.vllm.process import VllmEndedError, VllmServer
from primerl.run_key import run_key_header

log = logging.getLogger("primerl.inference")

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
JOIN_DEADLINE_S = 60.0
REQUEST_TIMEOUT_S = 30.0
STOP_INTERVAL_S = 0.5
CHOICES = {
    "backend": ("auto", "torch", "vllm"),
    "dtype": (None, "float32", "bfloat16"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
}
MINIMA = {"max_model_len": 2, "max_num_seqs": 1, "kv_cache_tokens": 2, "threads": 1, "port": 0, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str
    """Model folder."""
    name: str | None = None
    """Name under which it is served; the folder's name where it is left out."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters that the engine is sent in place of whole weights."""

    rank: int
    target_modules: list[str]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    model: ModelConfig
    backend: str = "auto"
    """`vllm`, `torch` (the embedded engine), or `auto`: vLLM where there is a CUDA GPU and vLLM is installed."""
    python: str | None = None
    """Interpreter of the environment that vLLM is installed in; this one where it is left out."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """vLLM's own options."""
    start_s: float = 300.0
    """Seconds until the engine has generated a token."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    join: str | None = None
    """URL of an orchestrator to join once the engine is ready."""
    max_model_len: int | None = None
    """Longest prompt and completion together, in tokens; the model's own limit where it is left out."""
    max_num_seqs: int = 128
    """Requests that are decoded at the same time."""
    kv_cache_tokens: int | None = None
    """Tokens the KV cache holds; enough for max_num_seqs where it is left out."""
    seed: int = 0
    dtype: str | None = None
    """float32, of vLLM on a GPU bfloat16, where it is left out."""
    logprobs_mode: str = "raw_logprobs"
    threads: int = 1
    """CPU threads of the model."""
    lora: LoraConfig | None = None

    @classmethod
    def from_toml(cls, settings: Mapping[str, Any]) -> InferenceConfig:
        """Checks the contents of a resolved file; a ValueError names the field."""
        values = _known("", settings, cls)
        model = values.get("model")
        if not isinstance(model, Mapping) or not isinstance(model.get("path"), str):
            raise ValueError("model.path: give the folder of a model")
        values["model"] = ModelConfig(**_known("model.", model, ModelConfig))
        if values.get("lora") is not None:
            values["lora"] = _lora(values["lora"])
        config = cls(**values)
        for name, choices in CHOICES.items():
            if getattr(config, name) not in choices:
                known = ", ".join(choice for choice in choices if choice is not None)
                raise ValueError(f"{name}: must be one of {known}, not {getattr(config, name)!r}")
        for name, least in MINIMA.items():
            value = getattr(config, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name}: must be a whole number from {least}, not {value!r}")
        if not isinstance(config.start_s, int | float) or isinstance(config.start_s, bool) or not config.start_s > 0:
            raise ValueError(f"start_s: must be a number above 0, not {config.start_s!r}")
        if not isinstance(config.vllm, Mapping):
            raise ValueError("vllm: must be a table of vLLM's options")
        flags.check(config.vllm)
        return config

    @property
    def served_name(self) -> str:
        return self.model.name or Path(self.model.path).name


def _known(prefix: str, settings: Mapping[str, Any], section: type[Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(section)}
    if unknown := sorted(settings.keys() - names):
        raise ValueError(f"{prefix}{unknown[0]}: no such setting; there are {', '.join(sorted(names))}")
    return dict(settings)


def _lora(settings: object) -> LoraConfig:
    found = _known("lora.", settings, LoraConfig) if isinstance(settings, Mapping) else {}
    rank, targets = found.get("rank"), found.get("target_modules")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"lora.rank: must be a whole number from 1, not {rank!r}")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"lora.target_modules: must be a list of names, not {targets!r}")
    return LoraConfig(rank=rank, target_modules=targets)


class _StopRequestedError(Exception):
    """SIGTERM or SIGINT came."""


class _Stop:
    """Handler of SIGTERM and SIGINT.

    It raises, to end whatever blocks. But an exception that is raised while a finalizer happens to run is dropped by
    the interpreter, so the request is also remembered, and looked for between waits.
    """

    requested = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.requested = True
        raise _StopRequestedError(signal.Signals(number).name)

    def check(self) -> None:
        if self.requested:
            raise _StopRequestedError


class _NotReadyError(Exception):
    """The engine, or the orchestrator it was to join, did not answer in time."""


class _Engine(Protocol):
    """What is served: the embedded engine in this process, or vLLM's server as its child."""

    @property
    def url(self) -> str: ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it was stopped; an error where it has ended by itself."""

    def stop(self) -> None: ...


def serve(config: InferenceConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code of the process.

    0: stopped on request. 1: the engine failed, or the orchestrator could not be joined. 2: a setting or the model
    cannot be served; nothing was started. A vLLM that ended after it had served ends this process by a signal: who
    watches it may start it again.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = _Stop()
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _serve(config, stop)
    except _StopRequestedError:
        log.info("stopped")
        return FINISHED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _serve(config: InferenceConfig, stop: _Stop) -> int:
    try:
        backend = installation.chosen_backend(config.backend, config.python)
        start = _start_vllm if backend == "vllm" else _start_embedded
        engine = start(config)
    except (ValueError, OSError) as error:
        print(f"primerl inference: {error}", file=sys.stderr)
        return BAD_INPUT
    crash = 0
    try:
        _wait_until_ready(engine, stop, config)
        if isinstance(engine, VllmServer):
            engine.watch()
        print(f"serving {config.served_name} at {engine.url}", flush=True)
        crash = signal.SIGABRT
        if config.join is not None:
            _join(engine, stop, config.join)
        while not engine.wait(STOP_INTERVAL_S):
            stop.check()
        # Nobody asks this engine to end but a signal, which does not come by here.
        log.error("the engine ended by itself")
    except VllmEndedError as error:
        log.error("%s", error)
        if crash:
            engine.stop()
            _end_as(error.signal_number or crash)
    except (_engine_error(), _NotReadyError) as error:
        log.error("%s", error)
    finally:
        engine.stop()
    return FAILED


def _engine_error() -> type[Exception]:
    from primerl import _core

    return _core.EngineError


def _end_as(number: int) -> NoReturn:
    """Ends this process by that signal, as its server was."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    sys.stdout.flush()
    os.kill(os.getpid(), number)
    raise AssertionError("the signal was not delivered")


def _start_vllm(config: InferenceConfig) -> VllmServer:
    """Raises ValueError: vLLM is not installed, or cannot serve this model or these settings."""
    found = installation.find(config.python)
    if config.lora is not None:
        raise ValueError("lora: vLLM is sent merged weights; leave it out")
    installation.check_model(Path(config.model.path), found.device)
    return VllmServer(config, found)


def _start_embedded(config: InferenceConfig) -> _Engine:
    for name, value in (("python", config.python), ("vllm", config.vllm)):
        if value and config.backend != "auto":
            raise ValueError(f'{name}: is for backend "vllm"; the embedded engine has no use for it')
    # torch takes seconds to import: not before the settings are known to be good.
    import torch

    from primerl import _core
    from primerl.inference.torch_backend import TorchBackend

    torch.set_num_threads(config.threads)
    backend = TorchBackend(
        Path(config.model.path),
        dtype=config.dtype or "float32",
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        logprobs_mode=config.logprobs_mode,
        lora=None if config.lora is None else (config.lora.rank, config.lora.target_modules),
    )
    settings = engine_settings(config, backend.decoder.max_len)
    engine: _Engine = _core.InferenceEngine(settings, backend, host=config.host, port=config.port)
    return engine


def engine_settings(config: InferenceConfig, max_model_len: int) -> dict[str, Any]:
    """Settings of `primerl_engine::Config`."""
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


def _wait_until_ready(engine: _Engine, stop: _Stop, config: InferenceConfig) -> None:
    """An engine is ready when it has generated: a model that loads may still fail in its first step."""
    body = {"model": config.served_name, "token_ids": [0], "sampling_params": {"max_tokens": 1, "logprobs": 0}}

    def attempt() -> dict[str, Any]:
        with urllib.request.urlopen(f"{engine.url}/health", timeout=REQUEST_TIMEOUT_S):
            return _post(f"{engine.url}/inference/v1/generate", body)

    _until(engine, stop, config.start_s, "generate a token", attempt)


def _join(engine: _Engine, stop: _Stop, orchestrator: str) -> None:
    url = f"{orchestrator.rstrip('/')}/engines/join"
    body = {"url": engine.url}
    answer = _until(engine, stop, JOIN_DEADLINE_S, f"join {url}", lambda: _post(url, body, run_key_header()))
    log.info("joined %s as engine %s", orchestrator, answer.get("engine"))


def _until(
    engine: _Engine, stop: _Stop, deadline_s: float, what: str, attempt: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Tries until it works, the engine ends or the deadline passes; waits 0.1 s, then twice as long up to 2 s."""
    deadline, pause_s = time.monotonic() + deadline_s, 0.1
    while True:
        try:
            return attempt()
        except (OSError, ValueError) as error:
            # EngineError comes out of here if that is why nobody answers.
            engine.wait(pause_s)
            stop.check()
            if time.monotonic() > deadline:
                raise _NotReadyError(f"could not {what} within {deadline_s:.0f} s: {error}") from error
            pause_s = min(2 * pause_s, 2.0)


def _post(url: str, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise ValueError(f"{error}: {error.read().decode(errors='replace')[:500]}") from error
