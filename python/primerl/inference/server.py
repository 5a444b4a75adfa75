"""`primerl inference`: the embedded engine as a process that joins an orchestrator."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from primerl.run_key import run_key_header

log = logging.getLogger("primerl.inference")

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
READY_DEADLINE_S = 60.0
JOIN_DEADLINE_S = 60.0
REQUEST_TIMEOUT_S = 30.0
STOP_INTERVAL_S = 0.5
CHOICES = {
    "backend": ("torch",),
    "dtype": ("float32", "bfloat16"),
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
    backend: str = "torch"
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
    dtype: str = "float32"
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
                raise ValueError(f"{name}: must be one of {', '.join(choices)}, not {getattr(config, name)!r}")
        for name, least in MINIMA.items():
            value = getattr(config, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name}: must be a whole number from {least}, not {value!r}")
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


def serve(config: InferenceConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code of the process.

    0: stopped on request. 1: the engine failed, or the orchestrator could not be joined. 2: a setting or the model
    cannot be served; nothing was started.
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
    # torch takes seconds to import: not before the settings are known to be good.
    import torch

    from primerl import _core
    from primerl.inference.torch_backend import TorchBackend

    torch.set_num_threads(config.threads)
    try:
        backend = TorchBackend(
            Path(config.model.path),
            dtype=config.dtype,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            logprobs_mode=config.logprobs_mode,
            lora=None if config.lora is None else (config.lora.rank, config.lora.target_modules),
        )
        engine = _core.InferenceEngine(
            engine_settings(config, backend.decoder.max_len), backend, host=config.host, port=config.port
        )
    except (ValueError, OSError) as error:
        print(f"primerl inference: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        _wait_until_ready(engine, stop, config.served_name)
        print(f"serving {config.served_name} at {engine.url}", flush=True)
        if config.join is not None:
            _join(engine, stop, config.join)
        while not engine.wait(STOP_INTERVAL_S):
            stop.check()
        # Nobody asks this engine to end but a signal, which does not come by here.
        log.error("the engine ended by itself")
    except (_core.EngineError, _NotReadyError) as error:
        log.error("%s", error)
    finally:
        engine.stop()
    return FAILED


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


def _wait_until_ready(engine: Any, stop: _Stop, name: str) -> None:
    """An engine is ready when it has generated: a model that loads may still fail in its first step."""
    body = {"model": name, "token_ids": [0], "sampling_params": {"max_tokens": 1, "logprobs": 0}}
    _until(
        engine, stop, READY_DEADLINE_S, "generate a token", lambda: _post(f"{engine.url}/inference/v1/generate", body)
    )


def _join(engine: Any, stop: _Stop, orchestrator: str) -> None:
    url = f"{orchestrator.rstrip('/')}/engines/join"
    body = {"url": engine.url}
    answer = _until(engine, stop, JOIN_DEADLINE_S, f"join {url}", lambda: _post(url, body, run_key_header()))
    log.info("joined %s as engine %s", orchestrator, answer.get("engine"))


def _until(
    engine: Any, stop: _Stop, deadline_s: float, what: str, attempt: Callable[[], dict[str, Any]]
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
