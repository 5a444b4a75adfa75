"""Broadcasts off the critical path: a step copies its weights, and a thread hashes, writes and announces them while
training continues.

    step k:   wait for the broadcast of policy v(k-1)     (`finish`; already done if writing takes less than a step)
              copy the weights of policy v(k)             (`begin`; the model may change after it)
    thread:   hash, write, sync, rename                   (`WeightsPublisher.write`)
              announce to the orchestrator                (the leading rank's thread)

One broadcast is in flight at a time, so versions are announced in order. The trainer raises the thread's errors in the
next `check`, `finish` or `begin`. A process that is killed leaves a complete broadcast or none, and resumes from a
checkpoint, whose policy it publishes again.

With several ranks each copies, hashes and writes its share; the leading one completes the folder when all have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from primerl.train.checkpoint.step_folders import remove_unfinished
from primerl.train.distributed.fsdp import local
from primerl.train.distributed.rank_barrier import PATIENCE_S
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.loop.client import ManifestRefused, NoMoreBatches, OrchestratorClient, OrchestratorError
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import Files, Shares

log = logging.getLogger(__name__)

STOPPING_S = 1.0
ENDING_S = 5.0
"""How long a process that ends early waits for the thread to finish writing."""


class BroadcastError(Exception):
    """Weights could not be written. The message names the folder."""


class Snapshot:
    """Copies of tensors on the CPU, in memory that is reused by the next copies (so the previous ones must no longer be
    needed): the model's size, pinned if a GPU copies into it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def take(self, shares: Shares, model: Any) -> tuple[Files, Callable[[], None]]:
        """The copies, and a function to call before reading them. The model may change immediately."""
        changing = {_storage(local(tensor)) for tensor in model.state_dict().values()}
        copies: Files = {}
        wait_for_copies: Callable[[], None] = lambda: None  # noqa: E731 (one of two)
        for file, name, tensor in shares:
            # A tensor that was gathered from other ranks, merged or converted may be a copy already.
            apart = _is_apart(tensor, changing)
            copies.setdefault(file, {})[name] = tensor.contiguous() if apart else self._copy((file, name), tensor)
            if tensor.is_cuda:
                # Later steps of this stream change the weights after they were copied; the thread waits for the copies.
                wait_for_copies = torch.cuda.current_stream().record_event().synchronize
        return copies, wait_for_copies

    def _copy(self, name: tuple[str, str], tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[name] = kept
        return kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_apart(tensor: Tensor, changing: set[int]) -> bool:
    return tensor.device.type == "cpu" and _storage(tensor) not in changing


class Broadcasts:
    """The broadcast in flight, if any. Each rank's thread writes its share; the leading one announces."""

    def __init__(
        self,
        publisher: WeightsPublisher,
        client: OrchestratorClient,
        doing: Callable[[str | None], None] = lambda what: None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`client`: used by the thread alone. `doing`: called with what the thread does; None when it is done."""
        self._publisher = publisher
        self._client = client
        self._doing = doing
        self._ranks = ranks
        self._snapshot = Snapshot()
        if ranks.leads:
            remove_unfinished(publisher.folder)
        self._version = 0
        self._at = ""
        self._flight: Future[float] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, model: Any, version: int) -> None:
        """Start a broadcast; returns when the model may change. All ranks have to call it. Raises as `finish`."""
        self.finish()
        files, wait_for_copies = self._snapshot.take(self._publisher.shares(model), model)
        flight: Future[float] = Future()

        def publish() -> None:
            began = time.perf_counter()
            failure: BaseException | None = None
            try:
                wait_for_copies()
                self._publish(version, files)
            except BaseException as error:  # noqa: BLE001 (raised in the training thread)
                failure = error
            self._doing(None)
            if failure is None:
                flight.set_result(time.perf_counter() - began)
            else:
                flight.set_exception(failure)

        self._version, self._flight = version, flight
        # A daemon: a process that is stopping does not wait for an orchestrator that is gone.
        self._thread = threading.Thread(target=publish, name="broadcast", daemon=True)
        self._thread.start()

    def _publish(self, version: int, files: Files) -> None:
        refusal = self._write_and_announce(version, files)
        if refusal is None:
            return
        # The files are gone or damaged, but the copies still exist.
        log.warning("%s; the weights of policy %d are written again", refusal, version)
        refusal = self._write_and_announce(version, files)
        if refusal is not None:
            where = self._publisher.folder
            raise BroadcastError(f"the weights of policy {version} were written to {where} twice, and {refusal}")

    def _write_and_announce(self, version: int, files: Files) -> str | None:
        """Why the orchestrator cannot read the files, or None; the same on all ranks."""
        self._say(f"writing the weights of policy {version}")
        try:
            manifest = self._publisher.write(version, files)
        except (OSError, SafetensorError) as error:
            where = self._publisher.folder
            raise BroadcastError(f"the weights of policy {version} cannot be written to {where}: {error}") from error
        self._say(f"announcing policy {version}")
        # The others wait, so that all are there when engines learn where to ask.
        refusal: str | None = self._publisher.barrier.lead(
            lambda: self._announce(version, manifest), "announce the weights"
        )
        return refusal

    def _announce(self, version: int, manifest: Path) -> str | None:
        try:
            self._client.weights(version, str(manifest.resolve()))
        except ManifestRefused as refusal:
            return str(refusal)
        except NoMoreBatches as over:
            log.info("policy %d was written to %s, but no engine loads it: %s", version, manifest.parent, over)
        except OrchestratorError:
            if not self._client.is_leaving:
                raise
            log.info("policy %d is in %s; the orchestrator could not be reached", version, manifest.parent)
        return None

    def _say(self, what: str) -> None:
        self._at = what
        self._doing(what)

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def check(self) -> None:
        """Raises the error of the broadcast in flight, if it has failed."""
        if self._flight is not None and self._flight.done():
            self._flight.result()

    def finish(self) -> float | None:
        """Wait for the broadcast in flight; returns how many seconds its thread took, or None if there is none.

        Raises:
            BroadcastError: it cannot be written, or takes too long.
            RankError: another rank failed in it.
            OrchestratorError: the orchestrator refused it, or does not answer.
        """
        if self._flight is None:
            return None
        try:
            took = self._flight.result(timeout=PATIENCE_S)
        except TimeoutError:
            if self._flight.done():
                raise
            raise BroadcastError(
                f"policy {self._version} is not published within {PATIENCE_S:g} s: still {self._at}, to "
                f"{self._publisher.folder}"
            ) from None
        self._flight = None
        return took

    def end(self) -> float | None:
        """As `finish`, when the run is over: an orchestrator that is gone is no longer a failure."""
        self._client.leave()
        return self.finish()

    def close(self) -> None:
        """Give the broadcast in flight a few seconds to finish."""
        self._client.leave()
        if self._thread is not None:
            self._thread.join(ENDING_S)
        self._publisher.close()
        if self._thread is not None and self._thread.is_alive():
            log.warning("left while %s", self._at)
            # It stops if it only waits for other ranks.
            self._thread.join(STOPPING_S)
            return
        self._client.close()
