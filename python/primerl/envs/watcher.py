"""Watches the worker's event loop from another thread, and reports where an environment holds it up.

An environment runs on the loop. What takes long there without `await` (a request of `requests`, `time.sleep`, a long
computation) blocks all rollouts of the worker; only the client's heartbeats do. The loop says about once a
second that it turns; when it has not for HELD_S, the line of code and the rollout are looked for, so that the
orchestrator has them by the time the worker counts as blocked; then all stacks go to the log. What the orchestrator
makes of that is in `primerl-core` (`worker/blocked.rs`).
Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Protocol

from primerl.envs import stacks

log = logging.getLogger("primerl.envs")

TURN_S = 1.0
HELD_S = 5.0
"""Shorter than the time after which it counts as blocked: finding and reporting the line takes a moment."""
BLOCKED_S = 10.0
"""As the orchestrator counts (`BLOCKED_AFTER` of primerl-core)."""
AGAIN_S = 300.0
"""How often a block that lasts is logged again."""
# Code that holds Python's lock keeps the watcher from running too: then the stacks come from a thread without Python.
LOCKED_S = 20.0

rollout: ContextVar[int | None] = ContextVar("primerl_rollout", default=None)
"""The rollout whose code runs in this context, and in the tasks that it begins."""


class Client(Protocol):
    def turned(self) -> None: ...

    def held(self, at: str | None, rollout: int | None) -> None: ...


class Watcher:
    def __init__(self, client: Client, package: str, dump: Callable[[], None] | None = None) -> None:
        """`package`: the environment's, whose lines are the ones to name. `dump`: writes all stacks to the log."""
        self._client = client
        self._package = package
        self._dump = dump or _dump_stacks
        self._turned = time.monotonic()
        self._blocked = False
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, on the thread of the event loop."""
        turning = asyncio.get_running_loop().create_task(self._turn())
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            turning.cancel()
            with contextlib.suppress(ValueError, OSError):
                faulthandler.cancel_dump_traceback_later()

    async def _turn(self) -> None:
        while True:
            self._client.turned()
            blocked_s = time.monotonic() - self._turned
            self._turned = time.monotonic()
            if self._blocked:
                self._blocked = False
                log.warning("the event loop runs again, %.0f s after the environment had blocked it", blocked_s)
            # A log that cannot be written is no reason to end.
            with contextlib.suppress(ValueError, OSError):
                faulthandler.dump_traceback_later(LOCKED_S, file=sys.__stderr__ or sys.stderr)
            await asyncio.sleep(TURN_S)

    def _watch(self) -> None:
        dumped = 0.0
        while not self._ended.wait(TURN_S):
            since = self._turned
            still = time.monotonic() - since
            if still < BLOCKED_S:
                dumped = 0.0
            if still < HELD_S:
                continue
            frames = stacks.of_thread(self._main)
            at, of = stacks.place(frames, self._package), _rollout_of(frames)
            # A turn in between has made this old.
            if since != self._turned:
                continue
            self._client.held(at, of)
            if still < BLOCKED_S:
                continue
            self._blocked = True
            if dumped == 0.0 or still - dumped >= AGAIN_S:
                dumped = still
                whose = "" if of is None else f", rollout {of}"
                log.error("the environment has blocked the event loop for %.0f s (%s%s); all stacks:", still, at, whose)
                self._dump()


def _dump_stacks() -> None:
    with contextlib.suppress(ValueError, OSError):
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)


def _rollout_of(frames: list[FrameType]) -> int | None:
    """By the callback that the event loop runs: it has the context of its task, whichever began that."""
    for frame in reversed(frames):
        if frame.f_code.co_name == "_run" and frame.f_globals.get("__name__") == "asyncio.events":
            context = getattr(frame.f_locals.get("self"), "_context", None)
            return None if context is None else context.get(rollout)
    return None
