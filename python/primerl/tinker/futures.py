"""Promises: a call is answered at once with an id, and its result is asked for by long polls.

Calls of one training client run in the order of their numbers, one at a time; clients take turns, first come, first
served, since each has at most one call waiting for its turn. A repeated number is the same call. Errors of users are
results too: an HTTP error would leave a hole in the order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from primerl.process.printing import printable
from primerl.tinker.losses import LossInputError
from primerl.train.checkpoint.step_folders import SavingError

log = logging.getLogger("primerl.tinker")

PROTOBUF, JSON = "application/x-protobuf", "application/json"
KEPT_S = 900.0
"""A client that has lost an answer asks again."""
MOST_PRINTED = 1000
"""Characters of a text that is logged."""
Work = Callable[[], Awaitable[Any]]


@dataclass
class Future:
    kind: str
    model_id: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes = b""
    media_type: str = JSON
    client: str | None = None
    """Whose call it is, for the log: a training client or a sampler."""
    ended: float | None = None
    """When, by the monotonic clock."""

    async def run(self, work: Work) -> None:
        """Never raises, but for cancellation."""
        try:
            self._answer(await work())
        except LossInputError as error:
            self.fail(str(error), "user")
        except asyncio.CancelledError:
            self._end("the server is stopping", "server")
            raise
        except SavingError as error:
            self.fail(f"{error}; make room on the server's disk, and call again", "server")
        except Exception as error:
            log.exception("%s failed", self.kind)
            self._end(f"{type(error).__name__}: {error}", "server")

    def fail(self, message: str, category: str) -> None:
        log.warning("%s of %s failed: %s", self.kind, self.client or self.model_id, printable(message, MOST_PRINTED))
        self._end(message, category)

    def _end(self, message: str, category: str) -> None:
        self._answer({"error": message, "category": category})

    def _answer(self, result: Any) -> None:
        if hasattr(result, "SerializeToString"):
            self.body, self.media_type = result.SerializeToString(), PROTOBUF
        else:
            self.body, self.media_type = json.dumps(result).encode(), JSON
        self.ended = time.monotonic()
        self.done.set()


class Futures:
    """All of the server's, by their ids; those that have ended are forgotten after `KEPT_S`."""

    def __init__(self) -> None:
        self._by_id: dict[str, Future] = {}
        self._by_call: dict[tuple[str, int], Future] = {}

    def new(self, kind: str, model_id: str | None = None, call: tuple[str, int] | None = None) -> Future:
        """`call`: what a repeated request has in common with the first."""
        future = Future(kind, model_id)
        self._by_id[future.id] = future
        if call is not None:
            self._by_call[call] = future
        return future

    def of_call(self, call: tuple[str, int]) -> Future | None:
        return self._by_call.get(call)

    def get(self, request_id: str) -> Future | None:
        return self._by_id.get(request_id)

    def kind_of(self, request_id: str) -> str | None:
        found = self._by_id.get(request_id)
        return None if found is None else found.kind

    def waiting(self) -> list[Future]:
        return [future for future in self._by_id.values() if future.ended is None]

    def forget_old(self, now: float) -> None:
        old = {one.id for one in self._by_id.values() if one.ended is not None and now - one.ended > KEPT_S}
        if old:
            self._by_id = {name: one for name, one in self._by_id.items() if name not in old}
            self._by_call = {call: one for call, one in self._by_call.items() if one.id not in old}


class Queue:
    """The calls of one training client, run in the order of their numbers, from 1 on."""

    def __init__(
        self, turn: asyncio.Lock, gap_s: float, lost: Callable[[str, str], None] = lambda kind, why: None
    ) -> None:
        """`turn`: held by the client whose call runs. `gap_s`: how long a call waits for one before it that never
        arrives. `lost`: called with the kind of the call that fails for that, and why."""
        self._turn = turn
        self._gap_s = gap_s
        self._lost = lost
        self._next = 1
        self._waiting: dict[int, tuple[Future, Work]] = {}
        self._changed = asyncio.Event()
        self.running: str | None = None
        """Kind of the call that is computed now."""
        self._task = asyncio.create_task(self._run())

    @property
    def length(self) -> int:
        return len(self._waiting)

    def put(self, seq_id: int, future: Future, work: Work) -> None:
        if seq_id < self._next:
            future.fail(f"seq_id {seq_id} comes after {self._next - 1}, which has run already", "user")
            return
        self._waiting[seq_id] = (future, work)
        self._changed.set()

    async def close(self, why: str) -> None:
        self._task.cancel()
        for future, _ in self._waiting.values():
            future.fail(why, "user")
        self._waiting.clear()

    async def _run(self) -> None:
        while True:
            if self._next not in self._waiting:
                await self._wait()
                continue
            future, work = self._waiting[self._next]
            async with self._turn:
                self.running = future.kind
                try:
                    await future.run(work)
                finally:
                    self.running = None
            del self._waiting[self._next]
            self._next += 1

    async def _wait(self) -> None:
        self._changed.clear()
        try:
            # Nothing is overdue where nothing waits.
            await asyncio.wait_for(self._changed.wait(), self._gap_s if self._waiting else None)
        except TimeoutError:
            missing, self._next = self._next, min(self._waiting)
            future, _ = self._waiting.pop(self._next)
            why = f"the call with seq_id {missing} has not arrived within {self._gap_s:g} s"
            self._lost(future.kind, why)
            future.fail(f"{why}, and this one, {self._next}, has to run after it", "user")
            self._next += 1
