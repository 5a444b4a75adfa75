"""Data ranks: processes that each train their share of a batch, with the model divided among them (`fsdp`)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from primerl.train.settings import ConfigError

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Between heartbeats."""
SILENT_S = 20.0
"""A rank without a heartbeat for this long is named in the log; the deadline of the rank that waits for it ends
training."""
SAID_WITHIN_S = 3.0
"""How long a failed rank waits for the others' last heartbeat; a silent rank is reported as the cause."""


class Heartbeats:
    """Tells other ranks every few seconds, by a thread, that this one is alive, and listens to those that it watches:
    the leading rank to all others, the others to the leading one.

    A collective that hangs does not say which rank it waits for until `dist_timeout_s`, and a rank that writes to a
    slow disk may take longer than one that hangs. A rank without heartbeats was stopped, is gone, or is in code that
    lets no thread run.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """`store`: holds the ranks' heartbeats. The thread has a connection of its own, since a wait in a store blocks
        all other users of the connection."""
        self._store = store
        self._rank = rank
        self._count = 0
        self._heard: dict[int, bytes] = {}
        """Last heartbeat by rank."""
        self._missed: dict[int, int] = {}
        """Beats of this rank since that heartbeat arrived. No clock: all ranks may be stopped and continued."""
        self._watched: Iterable[int] = range(1, size) if rank == 0 else (0,)
        self._named: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits for the thread: a process must not end while one of its threads is inside torch."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(INTERVAL_S)

    def silent_s(self, rank: int) -> float:
        """Seconds since that rank's last heartbeat; 0 for a rank that is not watched or has not started."""
        return self._missed.get(rank, 0) * INTERVAL_S

    def beat(self) -> None:
        """Send a heartbeat and read those of the watched ranks, as the thread does at each interval."""
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
            return  # the store is gone, and with it whatever started the ranks

    def _listen(self, rank: int) -> None:
        key = f"alive/{rank}"
        if not self._store.check([key]):
            return
        word = self._store.get(key)
        if self._heard.get(rank) != word:
            self._heard[rank], self._missed[rank] = word, 0
            if rank in self._named:
                self._named.remove(rank)
                log.warning("rank %d is alive again", rank)
            return
        self._missed[rank] += 1
        if self.silent_s(rank) >= SILENT_S and rank not in self._named:
            self._named.add(rank)
            log.warning("no heartbeat for %.0f s: %s", self.silent_s(rank), last_words(self._store, rank))


def last_words(store: Any, rank: int) -> str:
    """Describes a rank that does not arrive where others wait for it: what it was doing, and for how long."""
    if not store.check([f"at/{rank}"]):
        return f"rank {rank} is gone or hangs"
    since, _, what = store.get(f"at/{rank}").decode().partition(" ")
    return f"rank {rank} is gone or hangs, for {time.time() - float(since):.0f} s at: {what}"


HYBRID = ("dp_replicate", "dp_shard")


class RankError(Exception):
    """Another rank is gone or hangs. The message names it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the data ranks, by `torchrun`'s RANK, WORLD_SIZE and LOCAL_RANK; alone without them."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """(dp_shard), or (dp_replicate, dp_shard): what the model is divided over; None for one rank."""
    store: Any = None
    """Holds what each rank is doing."""
    timeout: timedelta | None = None
    """How long a collective waits for a missing rank."""
    heartbeats: Heartbeats | None = None
    """None without a store."""

    @classmethod
    def join(cls, wanted: int, replicas: int, timeout_s: float) -> Ranks:
        """Join the other ranks. If one is missing for `timeout_s`, here or in a collective, this process ends.

        Raises ConfigError if there are not `wanted` ranks, or fewer GPUs than ranks on this machine.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if size != wanted:
            refusal = f"ranks is {wanted}, but WORLD_SIZE is {size}; start as many processes, or set ranks"
            raise ConfigError(refusal, "ranks")
        device = own_device()
        if size == 1:
            return cls(rank, size, device)
        timeout = timedelta(seconds=timeout_s)
        try:
            store, rank, size = next(rendezvous("env://", timeout=timeout))
        except RuntimeError as error:
            raise RankError(f"rank {rank} of {size} does not find rank 0: {str(error).splitlines()[0]}") from error
        # Checkpoints and names cross between CPUs on a GPU machine too.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        shape, names = ((size,), ("dp_shard",)) if replicas == 1 else ((replicas, size // replicas), HYBRID)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        words: Any = torch.distributed.PrefixStore("primerl", store)  # type: ignore[attr-defined]
        heartbeats = Heartbeats(words.clone(), rank, size)
        heartbeats.start()
        return cls(rank, size, device, mesh, words, timeout, heartbeats)

    @property
    def leads(self) -> bool:
        """Rank 0 publishes weights and writes metrics."""
        return self.rank == 0

    def leave(self) -> None:
        if self.heartbeats is not None:
            self.heartbeats.stop()
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def at(self, what: str) -> None:
        """Record what this rank does next, for the others to report if it hangs in it."""
        if self.store is not None:
            self.store.set(f"at/{self.rank}", f"{time.time():.1f} {what}")

    @contextmanager
    def naming_the_missing(self) -> Iterator[None]:
        """Turns torch's error about a rank that is gone or hangs into a RankError that names the rank."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _of_other_ranks(error):
                raise
            raise RankError(f"{self._missing()}; {str(error).splitlines()[0]}") from error

    def _missing(self) -> str:
        """Describes the ranks that did not report giving up: all that are alive do so at about the same time."""
        try:
            self.store.set(f"gave_up/{self.rank}", "")
            time.sleep(SAID_WITHIN_S)
            silent = [rank for rank in range(self.size) if not self.store.check([f"gave_up/{rank}"])]
            described = [self.last_words(rank) for rank in silent]
        except RuntimeError:
            return "the other ranks are gone, with the process that started them"
        return "; ".join(described) or "another rank has failed"

    def last_words(self, rank: int) -> str:
        """Describes a rank that does not arrive where others wait for it: what it was doing, and for how long."""
        return last_words(self.store, rank)

    def agree(self, value: Any) -> Any:
        """The leading rank's value, on all ranks."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            # On the CPU: NCCL would only queue the sum on the GPU, and return at once.
            self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks."""
        if self.size > 1:
            values = values.clone()
            torch.distributed.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Largest over the ranks, value by value."""
        if self.size > 1:
            values = values.clone()
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        return values

    def union(self, names: Iterable[str]) -> list[str]:
        """Names of all ranks, sorted."""
        own = sorted(set(names))
        if self.size == 1:
            return own
        found: list[list[str]] = [[] for _ in range(self.size)]
        torch.distributed.all_gather_object(found, own)
        return sorted({name for names in found for name in names})


ALONE = Ranks(0, 1, torch.device("cpu"))
"""A single process: sums over ranks change nothing."""


def own_device() -> torch.device:
    """This rank's GPU, which becomes torch's current device, or the CPU if there is no GPU.

    Raises ConfigError if this machine has fewer GPUs than ranks. Each rank finds that out by itself, so that none waits
    for another that has failed.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    here = local + 1
    # Elsewhere each rank may see a GPU of its own, by a wrapper or by Slurm.
    if "TORCHELASTIC_RUN_ID" in os.environ and "SLURM_GPUS_PER_TASK" not in os.environ:
        here = max(here, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if here > gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cause = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise ConfigError.at(
            "ranks",
            f"{here} ranks on this machine need a GPU each, and torch sees {gpus}{cause}; set ranks to at most "
            f"{gpus}, let torch see more of them, or train on the CPU with an empty CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def keep_to(share: float | None, device: torch.device) -> None:
    """Let torch allocate no more than this part of a GPU's memory, which other processes use too. What needs more then
    fails here, and not there."""
    if share is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def _of_other_ranks(error: RuntimeError) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    # Gloo raises plain RuntimeErrors that name its source file.
    return any(word in str(error) for word in ("gloo", "Gloo", "Connection closed by peer", "Connection reset by peer"))
