"""Weights received from the trainer's ranks, in place of read from its files. For an engine's workers: needs torch and
xxhash only.

    receive(manifest, file, world=2, rank=0, engine="e1") -> {name: tensor}      the other worker with rank=1

Every worker of an engine calls it for the same files in the same order, and each gets all tensors of the file. Whoever
gets a `TransferError` loads the file, which is there always and holds the same bytes: what is returned has the hashes
that the manifest says. So workers need not agree on which of the two they did.

    worker  -> sender    connects to the `sender` of the file's entry in the manifest; both prove that they know the
                         secret in `<output_dir>/broadcasts/.secret` (mode 600); then JSON, each with its length before
    worker  -> sender    {engine, world, rank}; when all have come: {store, prefix}, with which all of them and the
                         sender (rank 0; workers are rank + 1) make a process group, kept for later versions
    workers -> sender    {version, file}
    sender  -> workers   {bytes, bucket}, or {error: "gone" | ...}
    sender  -> workers   the file's tensors, by name, as one row of bytes in buckets: {next}, then a broadcast

The group is NCCL's for a CUDA device, else gloo's. Neither is encrypted, nor is the store that it is made with: the
secret keeps out whoever does not belong to the run, on a network whose traffic nobody else reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

SECRET_FILE = ".secret"
"""In `broadcasts`: hex digits that senders and receivers know."""
MOST_BYTES = 1 << 26
"""Of a message."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TransferError(Exception):
    """Weights cannot be had from their sender; the file can. The message names the sender."""


class NoSenderError(TransferError):
    """The manifest names none: the trainer publishes files only."""


class SecretError(TransferError):
    """One side does not know the other's secret."""


class VersionGoneError(TransferError):
    """The sender has a later version, or none yet. It was not begun, or cut off by the next version."""


class PeerGoneError(TransferError):
    """The sender, or another worker of this engine, is gone or did not answer in time."""


class HashError(TransferError):
    """What came is not what the manifest says."""


def receive(
    manifest: str | Path,
    file: str,
    *,
    world: int = 1,
    rank: int = 0,
    engine: str | None = None,
    device: torch.device | str = "cpu",
    timeout_s: float = 60.0,
) -> dict[str, Tensor]:
    """All tensors of one file of a published version, on `device`.

    Args:
        manifest: path of `manifest.json`, as the engine was told.
        file: name of one of its files.
        world: workers of this engine that call it, each with another `rank`.
        engine: the same for all workers of an engine, and of no other engine; may be left out for one worker.
        device: the same kind as the trainer's: what kind of group there is depends on it.
        timeout_s: longest wait for the sender or another worker at a time.

    Raises:
        TransferError: see its subclasses; nothing was changed. Called again it begins with a new connection.
        OSError, ValueError: the manifest cannot be read, or has no such file.
    """
    path = Path(manifest)
    contents = json.loads(path.read_bytes())
    entry = next((entry for entry in contents["files"] if entry["name"] == file), None)
    if entry is None:
        raise ValueError(f"{path} has no file {file!r}")
    if "sender" not in entry:
        raise NoSenderError(f"{path} names no sender of {file}")
    if engine is None:
        if world != 1:
            raise ValueError("the workers of an engine need a name in common: give `engine`")
        engine = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    wanted = sorted((entry for entry in contents["tensors"] if entry["file"] == file), key=lambda entry: entry["name"])
    who = _Worker(engine, world, rank, torch.device(device), timeout_s)
    # Of a trainer that was started again.
    close_links(but={entry["sender"] for entry in contents["files"] if "sender" in entry})
    tensors = _from_sender(entry["sender"], path.parent.parent, who, contents["policy_version"], file, wanted)
    for entry in wanted:
        found = xxhash.xxh3_64_hexdigest(as_bytes(tensors[entry["name"]]).cpu().numpy().data)
        if found != entry["xxh3"]:
            raise HashError(f"{path.parent.name}, {file}: {entry['name']} has hash {found}")
    return tensors


@dataclass(frozen=True)
class _Worker:
    engine: str
    world: int
    rank: int
    device: torch.device
    timeout_s: float


class _Link:
    """A worker's connection to a sender, and their group."""

    def __init__(self, address: str, folder: Path, who: _Worker) -> None:
        host, _, port = address.rpartition(":")
        self.address, self.who = address, who
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), who.timeout_s)
        except OSError as error:
            raise PeerGoneError(f"no sender at {address}: {error}") from error
        self.wire = Wire(connection)
        try:
            self.wire.prove(read_secret(folder), who.timeout_s)
            self.wire.send({"engine": who.engine, "world": who.world, "rank": who.rank, "device": who.device.type})
            told = self._told()
            here = connection.getsockname()[0]
            self.group = new_group(told, who.rank + 1, who.world + 1, who.device, here, who.timeout_s)
        except BaseException as error:
            self.wire.close()
            if isinstance(error, SecretError):
                raise SecretError(f"{address}: {error}; see {folder / SECRET_FILE}") from None
            raise _as_gone(error, address) from error
        self.staging = torch.empty(0, dtype=torch.uint8, device=who.device)

    def fetch(self, version: int, file: str, wanted: list[dict[str, Any]]) -> dict[str, Tensor]:
        who = self.who
        self.wire.send({"version": version, "file": file})
        told = self._told()
        tensors = {
            entry["name"]: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=who.device)
            for entry in wanted
        }
        rows = [as_bytes(tensor) for tensor in tensors.values()]
        if told["bytes"] != [len(row) for row in rows]:
            raise HashError(f"{self.address}: its tensors of version {version} have other sizes than the manifest says")
        if len(self.staging) < told["bucket"]:
            self.staging = torch.empty(told["bucket"], dtype=torch.uint8, device=who.device)
        for pieces in buckets(told["bytes"], told["bucket"]):
            self._told()
            size = pieces[-1].place + pieces[-1].end - pieces[-1].begin
            broadcast(self.group, self.staging[:size], who.timeout_s)
            for piece in pieces:
                length = piece.end - piece.begin
                rows[piece.row][piece.begin : piece.end] = self.staging[piece.place : piece.place + length]
        return tensors

    def _told(self) -> dict[str, Any]:
        told = self.wire.receive(self.who.timeout_s)
        if told.get("error") == "gone":
            raise VersionGoneError(f"{self.address}: {told['message']}")
        if "error" in told:
            raise TransferError(f"{self.address}: {told['message']}")
        return told

    def close(self) -> None:
        self.wire.close()
        leave_group(self.group)


_links: dict[tuple[str, int, str], _Link] = {}
"""Kept for later versions. One that is in use is not in it."""


def _from_sender(
    address: str, folder: Path, who: _Worker, version: int, file: str, wanted: list[dict[str, Any]]
) -> dict[str, Tensor]:
    key = (who.engine, who.rank, address)
    while True:
        kept = _links.pop(key, None)
        link = kept or _Link(address, folder, who)
        try:
            tensors = link.fetch(version, file, wanted)
        except VersionGoneError:
            _links[key] = link
            raise
        except BaseException as error:
            link.close()
            # The kept one may be of a sender, or a group, that has ended since.
            if kept is not None and isinstance(error, PeerGoneError | OSError | RuntimeError):
                continue
            raise _as_gone(error, address) from error
        _links[key] = link
        return tensors


def close_links(but: Collection[str] = ()) -> None:
    """End this process's connections to senders, but for those at these addresses."""
    for key in [key for key in _links if key[2] not in but]:
        _links.pop(key).close()


def _as_gone(error: BaseException, address: str) -> BaseException:
    if isinstance(error, TransferError) or not isinstance(error, OSError | RuntimeError | ValueError):
        return error
    return PeerGoneError(f"{address}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


# What both sides use --------------------------------------------------------------------------------------------------


class Wire:
    """A connection on which JSON goes both ways."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Raises PeerGoneError."""
        data = json.dumps(message).encode()
        self._write(struct.pack(">I", len(data)) + data)

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """Raises PeerGoneError where there is none in time; no time is for a wait that the other side's end ends."""
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
            raise SecretError("whoever asked does not know the secret")
        self._write(_proof(secret, b"sender" + nonces))

    def prove(self, secret: bytes, timeout_s: float) -> None:
        """Show that this side knows the secret, and see that the other does. Raises SecretError, PeerGoneError."""
        deadline, own = time.monotonic() + timeout_s, secrets.token_bytes(32)
        nonces = self._read(32, deadline) + own
        self._write(own + _proof(secret, b"receiver" + nonces))
        try:
            proof = self._read(32, deadline)
        except PeerGoneError:
            raise SecretError("the sender does not take this secret") from None
        if not hmac.compare_digest(proof, _proof(secret, b"sender" + nonces)):
            raise SecretError("whoever answers there does not know the secret")

    def close(self) -> None:
        # So that a thread that waits on it wakes.
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
    """Of the run whose `broadcasts` is `folder`. Raises SecretError."""
    try:
        return (folder / SECRET_FILE).read_bytes()
    except OSError as error:
        raise SecretError(f"no secret to show: {error}") from error


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


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def new_group(told: dict[str, Any], rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> Any:
    """A process group beside whatever groups this process has; `host` is this machine's address in it."""
    distributed: Any = torch.distributed
    timeout = timedelta(seconds=timeout_s)
    store = distributed.TCPStore(*told["store"], is_master=False, timeout=timeout, wait_for_workers=False)
    store = distributed.PrefixStore(told["prefix"], store)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        # At its own deadline NCCL's watchdog would end the process; `broadcast` has an earlier one.
        options._timeout = timedelta(days=365)
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def broadcast(group: Any, row: Tensor, timeout_s: float) -> None:
    """From the sender to the workers. Raises PeerGoneError."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    deadline = time.monotonic() + timeout_s
    work = group.broadcast([row], options)
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise PeerGoneError(f"a bucket of weights did not get over within {timeout_s:g} s")
        time.sleep(0.0005)
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerGoneError(f"the other side is gone: {str(error).splitlines()[0]}") from error


def leave_group(group: Any) -> None:
    # NCCL's would wait for the others.
    with contextlib.suppress(RuntimeError):
        group.abort()
