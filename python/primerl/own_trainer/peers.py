"""The ranks of a training script, as `torchrun` starts them: each takes its part of a batch, the first one (rank 0)
speaks for all of them.

They agree through the store by which torch's ranks find each other, not by collectives: a script may set up process
groups as it likes, before or after, or leave that to DDP, FSDP or Accelerate.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from primerl.launch.supervise.failures import RunFailedError
from primerl.train.distributed.ranks import SILENT_S, Heartbeats, RankError, Ranks

JOIN_S = 300.0
"""How long the first one that comes waits for the others."""
POLL_S = 0.02
_instances = itertools.count()
"""Names of one connection are not those of another one of the same processes."""
Value = TypeVar("Value")


class Peers:
    """This process among the ranks of the script. Not thread-safe.

    `agree` and `all_of` are named, and a name of `all_of` is used once; they wait for as long as the others are alive.
    """

    def __init__(self, rank: int, size: int, store: Any = None) -> None:
        """`store`: needed for more than one."""
        self.rank, self.size = rank, size
        self._store = store
        self._agreed: Counter[str] = Counter()
        """How often each name was used, the same in all ranks."""
        heartbeats = None if store is None else Heartbeats(store.clone(), rank, size)
        self._ranks = Ranks(rank, size, torch.device("cpu"), store=store, heartbeats=heartbeats)
        if heartbeats is not None:
            heartbeats.start()

    @classmethod
    def join(cls) -> Peers:
        """By RANK, WORLD_SIZE and what torch needs to find the others; alone without them.

        Raises RunFailedError: the others do not come.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1)
        from torch.distributed.rendezvous import rendezvous

        try:
            store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        except (RuntimeError, ValueError) as error:
            raise RunFailedError(f"rank {rank} of {size} does not find rank 0: {str(error).splitlines()[0]}") from error
        prefixed: Any = torch.distributed.PrefixStore(f"primerl/{next(_instances)}", store)  # type: ignore[attr-defined]
        return cls(rank, size, prefixed)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, name: str, make: Callable[[], Value]) -> Value:
        """What `make` returns in rank 0, which JSON can hold; the others wait for it.

        Raises, in rank 0, what `make` raises, and RunFailedError with its message in the others.
        """
        if self.size == 1:
            return make()
        # A script that catches a refusal may try again, under the same name.
        self._agreed[name] += 1
        key = f"agreed/{name}/{self._agreed[name]}"
        if not self.leads:
            outcome = json.loads(self._wait_for(key, 0, name))
            if "failure" in outcome:
                raise RunFailedError(f"rank 0: {outcome['failure']}")
            return outcome["value"]  # type: ignore[no-any-return]
        self._ranks.at(name)
        try:
            value = make()
        except BaseException as error:
            self._store.set(key, json.dumps({"failure": f"{type(error).__name__}: {error}"}))
            raise
        self._store.set(key, json.dumps({"value": value}))
        return value

    def all_of(self, name: str, own: str) -> list[str]:
        """What each rank says, by rank; waits for all of them."""
        if self.size == 1:
            return [own]
        self._store.set(f"said/{name}/{self.rank}", own)
        return [self._wait_for(f"said/{name}/{rank}", rank, name).decode() for rank in range(self.size)]

    def at(self, what: str) -> None:
        """What this rank does next, for the others to say where it was when it is gone."""
        self._ranks.at(what)

    def named(self, error: BaseException) -> RunFailedError | None:
        """An error of torch about a rank that is gone, with the rank; None of any other error."""
        if self.size == 1 or not isinstance(error, RuntimeError):
            return None
        try:
            with self._ranks.naming_the_missing():
                raise error
        except RankError as named:
            return RunFailedError(str(named))
        except RuntimeError:
            return None

    def leave(self, *, orderly: bool) -> None:
        """No heartbeat follows. `orderly`: rank 0, with which the store may end, waits for the others to leave too."""
        if self.size == 1:
            return
        heartbeats = self._ranks.heartbeats
        assert heartbeats is not None
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            others = [f"left/{rank}" for rank in range(1, self.size)]
            deadline = time.monotonic() + SILENT_S
            while orderly and self.leads and not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        heartbeats.stop()

    def _wait_for(self, key: str, rank: int, name: str) -> bytes:
        heartbeats = self._ranks.heartbeats
        assert heartbeats is not None
        self._ranks.at(f"waiting for rank {rank}: {name}")
        try:
            while not self._store.check([key]):
                if heartbeats.silent_s(rank) >= SILENT_S:
                    raise RunFailedError(f"no heartbeat for {SILENT_S:.0f} s: {self._ranks.last_words(rank)}")
                time.sleep(POLL_S)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise RunFailedError(f"rank 0 is gone, in: {name} ({str(error).splitlines()[0]})") from error
