"""What senders and receivers of weights share (`transfer`, `receiver`): messages, the proof of the secret, groups and
buckets. Needs torch only."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SECRET_FILE = ".secret"
"""File in `broadcasts` with hex digits that senders and receivers know."""
SECRET_BYTES = 64
MOST_BYTES = 1 << 26
"""Largest size of a message."""


class TransferError(Exception):
    """Weights cannot be received from their sender, but can be read from files. The message names the sender."""


class NoSenderError(TransferError):
    """The manifest names no sender: the trainer publishes files only."""


class SecretError(TransferError):
    """One side does not know the other's secret."""


class VersionGoneError(TransferError):
    """The sender has a later version, or none yet: the transfer did not start, or the next version interrupted it."""


class PeerGoneError(TransferError):
    """The sender, or another worker of this engine, is gone or did not answer in time."""


class HashError(TransferError):
    """Received tensors do not match the manifest."""


class Wire:
    """A connection that carries JSON messages both ways."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Raises PeerGoneError."""
        data = json.dumps(message).encode()
        self._write(struct.pack(">I", len(data)) + data)

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """Raises PeerGoneError if no message arrives in time; None waits until the other side closes."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = struct.unpack(">I", self._read(4, deadline))
        if length > MOST_BYTES:
            raise PeerGoneError(f"a message of {length} bytes")
        message: dict[str, Any] = json.loads(self._read(length, deadline))
        return message

    def ask_proof(self, secret: bytes, timeout_s: float) -> None:
        """The sender's side of `prove`. Raises SecretError, PeerGoneError."""
        deadline, own = time.monotonic() + timeout_s, secrets.token_bytes(32)
        self._write(own)
        answer = self._read(64, deadline)
        nonces = own + answer[:32]
        if not hmac.compare_digest(answer[32:], _proof(secret, b"receiver" + nonces)):
            raise SecretError("the worker that asked does not know the secret")
        self._write(_proof(secret, b"sender" + nonces))

    def prove(self, secret: bytes, timeout_s: float) -> None:
        """Prove that this side knows the secret, and verify that the other does. Raises SecretError, PeerGoneError."""
        deadline, own = time.monotonic() + timeout_s, secrets.token_bytes(32)
        nonces = self._read(32, deadline) + own
        self._write(own + _proof(secret, b"receiver" + nonces))
        try:
            proof = self._read(32, deadline)
        except PeerGoneError:
            raise SecretError("the sender does not take this secret") from None
        if not hmac.compare_digest(proof, _proof(secret, b"sender" + nonces)):
            raise SecretError("the process that answers there does not know the secret")

    def close(self) -> None:
        # Wakes a thread that waits on it.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise PeerGoneError(f"the other side is gone: {error}") from error

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = b""
        try:
            while len(data) < size:
                self._connection.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
                part = self._connection.recv(size - len(data))
                if not part:
                    raise PeerGoneError("the other side has closed the connection")
                data += part
        except OSError as error:
            raise PeerGoneError(f"the other side does not answer: {error}") from error
        return data


def _proof(secret: bytes, what: bytes) -> bytes:
    return hmac.digest(secret, what, hashlib.sha256)


def read_secret(folder: Path) -> bytes:
    """The secret of the run whose `broadcasts` is `folder`. Raises SecretError."""
    try:
        secret = (folder / SECRET_FILE).read_bytes()
    except OSError as error:
        raise SecretError(f"no secret to show: {error}") from error
    if len(secret) < SECRET_BYTES:
        # A power loss may leave it empty, and an empty secret is known to everyone.
        raise SecretError(f"{folder / SECRET_FILE} has {len(secret)} bytes; delete it, and start the trainer again")
    return secret


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin` to `end` of row `row`, at `place` in a bucket."""

    row: int
    begin: int
    end: int
    place: int


def buckets(sizes: list[int], most: int) -> Iterator[list[Piece]]:
    """Rows of `sizes` bytes one after another, in buckets of `most` bytes."""
    bucket: list[Piece] = []
    place = 0
    for row, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + most - place)
            bucket.append(Piece(row, begin, end, place))
            place += end - begin
            begin = end
            if place == most:
                yield bucket
                bucket, place = [], 0
    if bucket:
        yield bucket


def new_group(told: dict[str, Any], rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> Any:
    """A process group independent of other groups of this process; `host` is this machine's address in it.

    Raises PeerGoneError where the others do not come to one of NCCL in time, RuntimeError where NCCL refuses them.
    """
    distributed: Any = torch.distributed
    timeout = timedelta(seconds=timeout_s)
    store = distributed.TCPStore(*told["store"], is_master=False, timeout=timeout, wait_for_workers=False)
    store = distributed.PrefixStore(told["prefix"], store)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        # At its own deadline NCCL's watchdog would end the process; `broadcast` has an earlier one.
        options._timeout = timedelta(days=365)
        group = distributed.ProcessGroupNCCL(store, rank, size, options)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # NCCL connects all of them within the first call, and waits there without a deadline.
        _within(timeout_s, "come to the process group", lambda: _connect(group, device))
        return group
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _connect(group: Any, device: torch.device) -> None:
    # The current GPU of a new thread is the first one.
    with torch.cuda.device(device):
        _begin_broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device)).wait()
        torch.cuda.current_stream().synchronize()


def _within(timeout_s: float, what: str, action: Callable[[], None]) -> None:
    """In a thread of its own, which is left behind where it does not end in time. Raises PeerGoneError then, else what
    `action` raises."""
    outcome: Future[None] = Future()

    def act() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=act, name="weights-group", daemon=True).start()
    if wait([outcome], timeout_s).not_done:
        raise PeerGoneError(f"the other side did not {what} within {timeout_s:g} s")
    outcome.result()


def _begin_broadcast(group: Any, row: Tensor) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([row], options)


def broadcast(group: Any, row: Tensor, timeout_s: float) -> None:
    """From the sender to the workers. Raises PeerGoneError."""
    deadline = time.monotonic() + timeout_s
    work = _begin_broadcast(group, row)
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise PeerGoneError(f"a bucket of weights was not transferred within {timeout_s:g} s")
        time.sleep(0.0005)
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerGoneError(f"the other side is gone: {str(error).splitlines()[0]}") from error


def leave_group(group: Any) -> None:
    # NCCL's would wait for the others.
    with contextlib.suppress(RuntimeError):
        group.abort()
