"""Weights received from the trainer's ranks, in place of read from its files. For an engine's workers: needs torch and
xxhash only.

    receive(manifest, file, world=2, rank=0, engine="e1") -> {name: tensor}      the other worker with rank=1

Every worker of an engine calls it for the same files in the same order, and each gets all tensors of the file. A worker
that gets a `TransferError` loads the file, which is there always and holds the same bytes: what is returned has the
hashes that the manifest says. So workers need not agree on which of the two they did.

    worker  -> sender    connects to the `sender` of the file's entry in the manifest; both prove that they know the
                         secret in `<output_dir>/broadcasts/.secret` (mode 600); then JSON, each with its length before
    worker  -> sender    {engine, world, rank}; when all have come: {store, prefix}, with which all of them and the
                         sender (rank 0; workers are rank + 1) make a process group, kept for later versions
    workers -> sender    {version, file}
    sender  -> workers   {bytes, bucket}, or {error: "gone" | ...}
    sender  -> workers   the file's tensors, by name, as one row of bytes in buckets: {next}, then a broadcast

The group is NCCL's for a CUDA device, else gloo's. Neither is encrypted, nor is the store that it is made with: the
secret keeps out what does not belong to the run, on a network that no one else can read.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.train.weights.tensors import DTYPES, as_bytes, tensor_hash
from primerl.train.weights.wire import (
    SECRET_FILE,
    HashError,
    NoSenderError,
    PeerGoneError,
    SecretError,
    TransferError,
    VersionGoneError,
    Wire,
    broadcast,
    buckets,
    leave_group,
    new_group,
    read_secret,
)

__all__ = [
    "HashError",
    "NoSenderError",
    "PeerGoneError",
    "SecretError",
    "TransferError",
    "VersionGoneError",
    "close_links",
    "receive",
]


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
        manifest: path of `manifest.json`, as the engine received it.
        file: name of one of its files.
        world: workers of this engine that call it, each with another `rank`.
        engine: the same for all workers of an engine, and of no other engine; optional for one worker.
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
    # From a trainer that was restarted.
    close_links(but={entry["sender"] for entry in contents["files"] if "sender" in entry})
    tensors = _from_sender(entry["sender"], path.parent.parent, who, contents["policy_version"], file, wanted)
    for entry in wanted:
        found = tensor_hash(tensors[entry["name"]])
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
"""Idle connections, kept for later versions."""


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
            # The sender or group of a kept connection may have ended since.
            if kept is not None and isinstance(error, PeerGoneError | OSError | RuntimeError):
                continue
            raise _as_gone(error, address) from error
        _links[key] = link
        return tensors


def close_links(but: Collection[str] = ()) -> None:
    """Close this process's connections to senders, except those at these addresses."""
    for key in [key for key in _links if key[2] not in but]:
        _links.pop(key).close()


def _as_gone(error: BaseException, address: str) -> BaseException:
    if isinstance(error, PeerGoneError):
        return PeerGoneError(f"{address}: {error}")
    if isinstance(error, TransferError) or not isinstance(error, OSError | RuntimeError | ValueError):
        return error
    return PeerGoneError(f"{address}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
