"""`primerl inference`: an engine of the chosen backend, as a process that joins an orchestrator."""

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
from typing import Any, NoReturn

from primerl.inference import announcement, backends
from primerl.inference.backend import Engine, EngineEndedError
from primerl.inference.settings import InferenceConfig
from primerl.net.addresses import told_to, url_of
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


def serve(config: InferenceConfig) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; returns the exit code of the process.

    0: stopped on request. 1: the engine failed, or the orchestrator could not be joined. 2: a setting or the model
    cannot be served; nothing was started. By a signal: a server that is its child ended after it had served, and the
    launcher may start it again.
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
    """Python's log, and that of the engine's server in Rust."""
    logging.basicConfig(level=LEVELS[level], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("RUST_LOG", level)  # the user's own setting wins


def _serve(config: InferenceConfig, stop: _Stop) -> int:
    try:
        backend = backends.named(backends.chosen(config.backend, config.python, Path(config.model.path)))
        backend.check_settings(config)
        _check_reached(config)
        engine = backend.start(config)
    except (ValueError, OSError) as error:
        print(f"primerl inference: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        _wait_until_ready(engine, stop, config)
        engine.watch()
        print(announcement.line(config.served_name, engine.url), flush=True)
        if config.join is not None:
            _join(engine, stop, config.join, config.join_as)
        while not engine.wait(STOP_INTERVAL_S):
            stop.check()
        # A stop that was requested comes as a signal, which does not end up here.
        log.error("the engine ended by itself")
    except EngineEndedError as error:
        log.error("%s", error)
        if error.ends_by is not None:
            _end_as(error.ends_by)
    except _NotReadyError as error:
        log.error("%s", error)
    finally:
        engine.stop()
    return FAILED


def _check_reached(config: InferenceConfig) -> None:
    """Before the model is loaded. Raises ValueError where the orchestrator could never reach this engine."""
    if config.join is None:
        return
    # A host that is unknown or unreachable so far: joining keeps trying.
    with contextlib.suppress(OSError):
        told_to(url_of(config.host, config.port), config.join)


def _end_as(number: int) -> NoReturn:
    """Ends this process by that signal, as its server was."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    sys.stdout.flush()
    os.kill(os.getpid(), number)
    raise AssertionError("the signal was not delivered")


def _wait_until_ready(engine: Engine, stop: _Stop, config: InferenceConfig) -> None:
    """An engine is ready when it has generated: a model that loads may still fail in its first step."""
    body = {"model": config.served_name, "token_ids": [0, 1], "sampling_params": {"max_tokens": 1, "logprobs": 0}}

    def attempt() -> dict[str, Any]:
        with open_url(f"{engine.url}/health", timeout=REQUEST_TIMEOUT_S):
            return _post(f"{engine.url}/inference/v1/generate", body)

    _until(engine, stop, config.start_s, "generate a token", attempt)


def _join(engine: Engine, stop: _Stop, orchestrator: str, name: str | None) -> None:
    url = f"{orchestrator.rstrip('/')}/engines/join"

    def attempt() -> dict[str, Any]:
        told = {"url": told_to(engine.url, orchestrator), **({} if name is None else {"name": name})}
        return {**_post(url, told, run_key_header(orchestrator)), "told": told["url"]}

    answer = _until(engine, stop, JOIN_DEADLINE_S, f"join {url}", attempt)
    log.info("joined %s as engine %s, to be reached at %s", orchestrator, answer.get("engine"), answer["told"])


def _until(
    engine: Engine, stop: _Stop, deadline_s: float, what: str, attempt: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Tries until it works, the engine ends or the deadline passes; waits 0.1 s, then twice as long up to 2 s."""
    deadline, pause_s = time.monotonic() + deadline_s, 0.1
    while True:
        try:
            return attempt()
        except (OSError, ValueError) as error:
            # Raises EngineEndedError if that is why there is no answer.
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
