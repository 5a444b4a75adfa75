"""Which ranks are alive: each says so every few seconds by a thread, whatever else it does.

A collective that does not end tells nobody for `dist_timeout_s` which rank it waits for, and a rank that writes to a
slow disk may take longer than one that hangs. A rank that says nothing was stopped, is gone, or is in code that lets no
thread run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
SILENT_S = 20.0
"""After so long a rank is named in the log; what ends the training is a deadline of who waits for it."""


class Heartbeats:
    """This rank's, and what it hears of those that it watches: the leading rank all others, those the leading one."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """`store`: where the ranks say what they do, by a connection of this thread alone: a wait in a store keeps all
        others from it."""
        self._store = store
        self._rank = rank
        self._count = 0
        self._heard: dict[int, bytes] = {}
        """The last word of the ranks that have said something."""
        self._missed: dict[int, int] = {}
        """Beats of this rank since it was new. No clock is asked: all ranks may have been stopped, and go on."""
        self._watched: Iterable[int] = range(1, size) if rank == 0 else (0,)
        self._named: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A process may not end while a thread of it is within torch."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(INTERVAL_S)

    def silent_s(self, rank: int) -> float:
        """Seconds since that rank has said anything; 0 of one that is not watched, or has not begun."""
        return self._missed.get(rank, 0) * INTERVAL_S

    def beat(self) -> None:
        """Say that this rank is alive, and hear who else is; what the thread does at each interval."""
        self._count += 1
        self._store.set(f"alive/{self._rank}", str(self._count))
        for rank in self._watched:
            self._listen(rank)

    def _run(self) -> None:
        try:
            self.beat()
            while not self._over.wait(INTERVAL_S):
                self.beat()
        except RuntimeError:
            return  # The store is gone, and with it who started the ranks: all that use it fail.

    def _listen(self, rank: int) -> None:
        key = f"alive/{rank}"
        if not self._store.check([key]):
            return
        word = self._store.get(key)
        if self._heard.get(rank) != word:
            self._heard[rank], self._missed[rank] = word, 0
            if rank in self._named:
                self._named.remove(rank)
                log.warning("rank %d goes on", rank)
            return
        self._missed[rank] += 1
        if self.silent_s(rank) >= SILENT_S and rank not in self._named:
            self._named.add(rank)
            log.warning("no heartbeat for %.0f s: %s", self.silent_s(rank), last_words(self._store, rank))


def last_words(store: Any, rank: int) -> str:
    """Of a rank that does not come to where it should be."""
    if not store.check([f"at/{rank}"]):
        return f"rank {rank} is gone or hangs"
    since, _, what = store.get(f"at/{rank}").decode().partition(" ")
    return f"rank {rank} is gone or hangs, for {time.time() - float(since):.0f} s at: {what}"
