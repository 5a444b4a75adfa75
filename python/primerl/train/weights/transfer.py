"""The second way of published weights to the engines: each rank sends its own files' tensors, from its copies in
memory, to the workers that ask (`receiver`). The files are written all the same.

    offer(version, files)      from now on they are sent to workers that ask
    withdraw()                 before the copies are written over: what is being sent may come to its end within
                               moments; after that it is cut off

A bucket is copied under the lock that `withdraw` takes, so no bucket holds parts of two versions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.train.weights.tensors import as_bytes
from primerl.train.weights.wire import (
    SECRET_FILE,
    PeerGoneError,
    Piece,
    TransferError,
    Wire,
    broadcast,
    buckets,
    leave_group,
    new_group,
    read_secret,
)

log = logging.getLogger(__name__)

BUCKET_BYTES = 256 * 2**20
TIMEOUT_S = 60.0
"""For a worker to answer, and for a bucket to be sent."""
PROOF_S = 10.0
"""For a new connection to prove that it knows the secret."""
CLOSING_S = 5.0
ACCEPT_AGAIN_S = 0.5
ENDING_S = 20.0
"""For what is being sent when the next version is copied."""


@dataclass
class _Offer:
    version: int
    files: dict[str, dict[str, Tensor]]
    sending: int = 0
    is_cut: bool = False


@dataclass
class _Group:
    """Workers of one engine. It ends when the first of them is gone."""

    wires: list[Wire]
    store: Any = None
    group: Any = None

    def tell(self, message: dict[str, Any]) -> None:
        for wire in self.wires:
            wire.send(message)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


class Sender:
    """Sends one rank's tensors, with a thread that accepts connections and one for each engine."""

    def __init__(
        self,
        folder: Path,
        host: str,
        device: torch.device,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`folder`: `<output_dir>/broadcasts`, where the secret is. `host`: address to listen at."""
        make_secret(folder)
        self._folder = folder
        self._host = host
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._coming: dict[tuple[str, int], dict[int, Wire]] = {}
        self._groups: dict[str, _Group] = {}
        self._serving: set[threading.Thread] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        port = self._server.getsockname()[1]
        self.address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        threading.Thread(target=self._accept, name="weights-sender", daemon=True).start()

    def offer(self, version: int, files: dict[str, dict[str, Tensor]]) -> str:
        """Tensors on the CPU, contiguous, which stay as they are until `withdraw`. Returns where to ask."""
        with self._changed:
            self._offer = _Offer(version, files)
        return self.address

    def withdraw(self) -> None:
        """Returns when no one reads the tensors any more, within `ENDING_S`."""
        with self._changed:
            offer, self._offer = self._offer, None
            if offer is None:
                return
            if not self._changed.wait_for(lambda: offer.sending == 0, ENDING_S):
                log.warning("policy %d is still being sent after %g s, and is cut off", offer.version, ENDING_S)
            offer.is_cut, offer.files = True, {}

    def close(self) -> None:
        with self._changed:
            self._offer = None
            wires = [wire for coming in self._coming.values() for wire in coming.values()]
            groups = list(self._groups.values())
        self._closed.set()
        # A thread that waits in `accept` does not notice a closed socket.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for wire in wires:
            wire.close()
        for group in groups:
            group.close()
        # A process must not end while one of its threads is inside torch.
        deadline = time.monotonic() + CLOSING_S
        for thread in list(self._serving):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                # One connection failed, or too many files are open.
                log.warning("no receiver of weights was accepted: %s", error)
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=self._meet, args=(Wire(connection),), name="weights-sender", daemon=True).start()

    def _meet(self, wire: Wire) -> None:
        """The last worker of an engine to connect starts the thread that serves them."""
        try:
            wire.ask_proof(read_secret(self._folder), PROOF_S)
            hello = wire.receive(PROOF_S)
            engine, world, rank = str(hello["engine"]), int(hello["world"]), int(hello["rank"])
            if not 0 <= rank < world:
                raise ValueError(f"rank {rank} of {world}")
            if hello["device"] != self._device.type:
                message = f"the sender's device is {self._device.type}, the worker's is {hello['device']}"
                wire.send({"error": "device", "message": message})
                raise TransferError(message)
        except (TransferError, OSError, ValueError, KeyError) as error:
            log.warning("a receiver of weights was turned away: %s", error)
            wire.close()
            return
        own = None
        with self._changed:
            coming = self._coming.setdefault((engine, world), {})
            replaced = coming.get(rank)
            coming[rank] = wire
            if len(coming) == world:
                del self._coming[(engine, world)]
                former, own = self._groups.get(engine), _Group([coming[rank] for rank in range(world)])
                self._groups[engine] = own
        if replaced is not None:
            replaced.close()
        if own is not None:
            self._serving.add(threading.current_thread())
            try:
                self._serve(engine, own, former)
            finally:
                self._serving.discard(threading.current_thread())

    def _serve(self, engine: str, own: _Group, former: _Group | None) -> None:
        if former is not None:
            former.close()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Not the stream of the training.
            torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        try:
            own.store, told = self._new_store()
            own.tell(told)
            own.group = new_group(told, 0, len(own.wires) + 1, self._device, self._host, self._timeout_s)
            staging = _Staging(self._bucket_bytes, self._device)
            while True:
                wanted = own.wires[0].receive(None)
                if any(wire.receive(self._timeout_s) != wanted for wire in own.wires[1:]):
                    raise TransferError("its workers ask for different files")
                self._send(own, staging, int(wanted["version"]), str(wanted["file"]))
        except (TransferError, OSError, RuntimeError, ValueError, KeyError) as error:
            if not isinstance(error, PeerGoneError):
                log.warning("weights are not sent to engine %s any more: %s", engine, error)
        finally:
            own.close()
            with self._changed:
                if self._groups.get(engine) is own:
                    del self._groups[engine]
            if own.group is not None:
                leave_group(own.group)

    def _new_store(self) -> tuple[Any, dict[str, Any]]:
        """Where a group meets, and what its workers need to know."""
        listening = socket.create_server((self._host, 0), family=self._server.family)
        port = listening.getsockname()[1]
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return store, {"store": [self._host, port], "prefix": uuid.uuid4().hex}

    def _send(self, to: _Group, staging: _Staging, version: int, file: str) -> None:
        rows = None
        with self._changed:
            offer = self._offer
            if offer is not None and offer.version == version and file in offer.files:
                rows = [as_bytes(tensor) for _, tensor in sorted(offer.files[file].items())]
                offer.sending += 1
        if offer is None or rows is None:
            has = "nothing" if offer is None else f"policy {offer.version}"
            to.tell({"error": "gone", "message": f"asked for {file} of policy {version}, it has {has}"})
            return
        try:
            sizes = [len(row) for row in rows]
            to.tell({"bytes": sizes, "bucket": min(self._bucket_bytes, max(1, sum(sizes)))})
            for pieces in buckets(sizes, self._bucket_bytes):
                with self._changed:
                    if not offer.is_cut:
                        staging.fill(rows, pieces)
                if offer.is_cut:
                    to.tell({"error": "gone", "message": f"policy {version} was cut off by the next"})
                    return
                to.tell({"next": True})
                broadcast(to.group, staging.filled(pieces), self._timeout_s)
        finally:
            del rows
            with self._changed:
                offer.sending -= 1
                self._changed.notify_all()


class _Staging:
    """Memory that a bucket is sent from."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.empty(size, dtype=torch.uint8, device=device) if on_gpu else self._host

    def fill(self, rows: list[Tensor], pieces: list[Piece]) -> None:
        for piece in pieces:
            length = piece.end - piece.begin
            self._host[piece.place : piece.place + length] = rows[piece.row][piece.begin : piece.end]

    def filled(self, pieces: list[Piece]) -> Tensor:
        size = pieces[-1].place + pieces[-1].end - pieces[-1].begin
        if self._device is not self._host:
            self._device[:size].copy_(self._host[:size])
        return self._device[:size]


def make_secret(folder: Path) -> None:
    """Write the run's secret once, readable by its user only; several ranks may try."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{SECRET_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, folder / SECRET_FILE)
    except FileExistsError:
        pass
    finally:
        new.unlink()
