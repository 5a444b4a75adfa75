"""A barrier for threads of the ranks that write in the background of training.

Collectives belong to the main threads: a thread's would be interleaved in another order on each rank. So the threads
exchange messages through keys of the ranks' store.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from primerl.train.distributed.ranks import RankError, Ranks

LOOK_EVERY_S = 0.02
PATIENCE_S = 1800.0
"""For a slow disk. A rank without heartbeats is given up after the ranks' own `timeout`."""
FOR_THE_VERDICT_S = 30.0
"""Added for the other ranks, so that the leading rank, which knows who is missing, gives up first."""


class RankBarrier:
    """All ranks create one with the same name, and call `each` in the same order, each from one thread."""

    def __init__(self, ranks: Ranks, name: str, patience_s: float = PATIENCE_S) -> None:
        self._ranks = ranks
        self._patience_s = patience_s
        self._store: Any = None
        if ranks.store is not None:
            self._store = torch.distributed.PrefixStore(name, ranks.store)  # type: ignore[attr-defined]
        self._count = 0
        self._left = threading.Event()

    def leave(self) -> None:
        """Stop waiting for others: a process must not end while one of its threads is inside torch."""
        self._left.set()

    def each(self, action: Callable[[], Any], what: str) -> list[Any]:
        """Run `action`, which returns plain JSON, on every rank, and wait until all have. Returns the answers of all
        ranks on the leading one, and its own answer on the others. `what`: the action in messages ("write its share").

        Raises:
            RankError: another rank failed, is gone, or was too slow; the same error on all ranks.
            Exception: what this rank's own action raised.
        """
        if self._store is None:
            return [action()]
        self._count += 1
        answer, failure = None, None
        try:
            answer = action()
        except Exception as error:  # noqa: BLE001 (raised again when the others know)
            failure = error
        own = {"answer": answer} if failure is None else {"failed": f"{type(failure).__name__}: {failure}"}
        try:
            verdict, answers = self._lead(own, what) if self._ranks.leads else self._follow(own, what)
        except RuntimeError as error:
            # The store belongs to the process that started the ranks, or to the leading rank.
            verdict, answers = f"the other ranks are gone: {str(error).splitlines()[0]}", []
        if failure is not None:
            raise failure
        if verdict:
            raise RankError(verdict)
        return answers

    def lead(self, action: Callable[[], Any], what: str) -> Any:
        """Run `action`, which returns plain JSON, on the leading rank while the others wait; returns its answer on all.

        Raises what `each` raises."""
        return self.each(action if self._ranks.leads else lambda: None, what)[0]

    @contextmanager
    def folder(self, target: Path) -> Iterator[Path]:
        """A temporary folder next to `target`, initially empty, that all ranks fill and the leading one renames. It is
        removed if it still exists in the end."""
        temporary = target.parent / f".{target.name}.writing"

        def empty() -> None:
            # Left by a process that was killed.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        self.lead(empty, f"make {temporary}")
        try:
            yield temporary
        finally:
            if self._ranks.leads:
                shutil.rmtree(temporary, ignore_errors=True)

    def _key(self, rank: int | str, count: int | None = None) -> str:
        return f"{self._count if count is None else count}/{rank}"

    def _is_silent(self, rank: int) -> bool:
        """Whether the rank has sent no heartbeat for the ranks' timeout: it is stopped or gone."""
        heartbeats, timeout = self._ranks.heartbeats, self._ranks.timeout
        return heartbeats is not None and timeout is not None and heartbeats.silent_s(rank) > timeout.total_seconds()

    def _lead(self, own: dict[str, Any], what: str) -> tuple[str, list[Any]]:
        began = time.monotonic()
        answers, verdict = [], ""
        for rank in range(self._ranks.size):
            word = self._word(self._key(rank), rank, began + self._patience_s) if rank else json.dumps(own)
            if word is None:
                waited_s = time.monotonic() - began
                verdict = f"{self._ranks.last_words(rank)}; it did not {what} within {waited_s:.0f} s"
                break
            said = json.loads(word)
            if "failed" in said:
                verdict = f"rank {rank} could not {what}: {said['failed']}"
                break
            answers.append(said["answer"])
            self._store.delete_key(self._key(rank))
        self._store.set(self._key("verdict"), json.dumps({"failed": verdict, "answers": answers[:1]}))
        # All ranks that answered this time have read the previous verdict.
        self._store.delete_key(self._key("verdict", self._count - 1))
        return verdict, answers

    def _follow(self, own: dict[str, Any], what: str) -> tuple[str, list[Any]]:
        self._store.set(self._key(self._ranks.rank), json.dumps(own))
        if "failed" in own:
            return str(own["failed"]), []
        began, patience_s = time.monotonic(), self._patience_s + FOR_THE_VERDICT_S
        verdict = self._word(self._key("verdict"), 0, began + patience_s)
        if verdict is None:
            waited_s = time.monotonic() - began
            return f"{self._ranks.last_words(0)}; it did not say within {waited_s:.0f} s whether all could {what}", []
        said = json.loads(verdict)
        return said["failed"], said["answers"]

    def _word(self, key: str, rank: int, deadline: float) -> bytes | None:
        """The rank's message, or None if it does not arrive in time."""
        # The store's own wait would block signals, and other threads that use its connection.
        while not self._store.check([key]):
            if time.monotonic() > deadline or self._is_silent(rank):
                return None
            if self._left.wait(LOOK_EVERY_S):
                raise RankError("this rank has left")
        word: bytes = self._store.get(key)
        return word
