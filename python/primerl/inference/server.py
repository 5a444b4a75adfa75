"""`primerl inference`: an engine, the embedded one or vLLM's server, as a process that joins an orchestrator."""

from __future__ import annotations

import contextlib
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
from http import HTTPStatus
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn, Protocol

from primerl.inference.settings import InferenceConfig
from primerl.inference.vllm import installation
from primerl.inference.vllm.process import VllmEndedError, VllmServer
from primerl.net.addresses import told_to
from primerl.net.requests import open_url
from primerl.process.log_levels import LEVELS, LogLevel
from primerl.process.signals import stop_signals
from primerl.run_key import run_key_header

log = logging.getLogger("primerl.inference")

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
JOIN_DEADLINE_S = 60.0
REQUEST_TIMEOUT_S = 30.0
STOP_INTERVAL_S = 0.5


class _StopRequestedError(Exception):
    """SIGTERM, SIGINT or SIGHUP came."""


class _Stop:
    """Handler of signals to stop.

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
    """Serves until SIGTERM, SIGINT or SIGHUP; returns the exit code of the process.

    0: stopped on request. 1: the engine failed, or the orchestrator could not be joined. 2: a setting or the model
    cannot be served; nothing was started. A vLLM that ended after it had served ends this process by a signal: who
    watches it may start it again.
    """
    _log_from(config.log.level)
    stop = _Stop()
    previous = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        return _serve(config, stop)
    except _StopRequestedError:
        log.info("stopped")
        return FINISHED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _log_from(level: LogLevel) -> None:
    """All three logs that are in this process's: Python's, the engine's server in Rust, vLLM's."""
    logging.basicConfig(level=LEVELS[level], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # What the user set for the libraries themselves counts.
    os.environ.setdefault("RUST_LOG", level)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", logging.getLevelName(LEVELS[level]))


def _serve(config: InferenceConfig, stop: _Stop) -> int:
    try:
        backend = installation.chosen_backend(config.backend, config.python)
        start = _start_vllm if backend == "vllm" else _start_embedded
        _check_reached(config)
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
            _join(engine, stop, config.join, config.join_as)
        while not engine.wait(STOP_INTERVAL_S):
            stop.check()
        # Nobody asks this engine to end but a signal, which does not come by here.
        log.error("the engine ended by itself")
    except VllmEndedError as error:
        log.error("%s", error)
        if crash and isinstance(engine, VllmServer):
            engine.kill()
            _end_as(error.signal_number or crash)
    except (_engine_error(), _NotReadyError) as error:
        log.error("%s", error)
    finally:
        engine.stop()
    return FAILED


def _check_reached(config: InferenceConfig) -> None:
    """Before the model is loaded. Raises ValueError where the orchestrator could never reach this engine."""
    if config.join is None:
        return
    host = f"[{config.host}]" if ":" in config.host else config.host
    # A name that is not known yet, or no way there: joining tries for longer.
    with contextlib.suppress(OSError):
        told_to(f"http://{host}:{config.port}", config.join)


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
        installation.lora_rank(config.lora.rank)
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
        device=config.device,
    )
    log.info("the model computes in %s on %s", str(backend.decoder.dtype).removeprefix("torch."), backend.device)
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
        with open_url(f"{engine.url}/health", timeout=REQUEST_TIMEOUT_S):
            return _post(f"{engine.url}/inference/v1/generate", body)

    _until(engine, stop, config.start_s, "generate a token", attempt)


def _join(engine: _Engine, stop: _Stop, orchestrator: str, name: str | None) -> None:
    url = f"{orchestrator.rstrip('/')}/engines/join"

    def attempt() -> dict[str, Any]:
        told = {"url": told_to(engine.url, orchestrator), **({} if name is None else {"name": name})}
        return {**_post(url, told, run_key_header(orchestrator)), "told": told["url"]}

    answer = _until(engine, stop, JOIN_DEADLINE_S, f"join {url}", attempt)
    log.info("joined %s as engine %s, to be reached at %s", orchestrator, answer.get("engine"), answer["told"])


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
        with open_url(request, timeout=REQUEST_TIMEOUT_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        problem = f"{error}: {error.read().decode(errors='replace')[:500]}"
        if error.code == HTTPStatus.UNAUTHORIZED:
            # Another try has the same key.
            raise _NotReadyError(f"{url} refuses this engine: {problem}") from error
        raise ValueError(problem) from error
