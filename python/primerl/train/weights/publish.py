"""Publishes weights for the engines: safetensors, with a manifest whose hashes and probe prove what an engine loaded.
The format is in docs/architecture.md, "Weights"."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor

from primerl.train.checkpoint.files import check_room, settle, sync, write_text
from primerl.train.checkpoint.step_folders import remove_step, saved_steps
from primerl.train.distributed.fsdp import packed_logprobs
from primerl.train.distributed.rank_barrier import RankBarrier
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.model.packed_model import PackedSequences
from primerl.train.weights.digest import digest_of
from primerl.train.weights.frozen import Frozen, frozen_of
from primerl.train.weights.shards import MAX_SHARD_BYTES, Files, Shares, by_file, bytes_of, plan, shares
from primerl.train.weights.tensors import NAMES, tensor_hash
from primerl.train.weights.transfer import Sender

PROBE_TOKENS = 16
_PIECE_BYTES = 1 << 24
_HEADER_BYTES = 100_000_000
"""The most that safetensors reads."""


class Probe(TypedDict):
    """A few tokens and the log-probabilities that the trainer computes for them, in a manifest. An engine that has
    loaded the weights has to compute the same before anything it samples is used: hashes prove which weights it
    received, a probe proves which it computes with."""

    token_ids: list[int]
    """[N], random: as telling about the weights as any text."""
    logprobs: list[float]
    """[N], nats, of each token after those before it, at temperature 1; 0 for the first."""


@torch.no_grad()
def probe_of(model: Any, ranks: Ranks = ALONE) -> Probe:
    """What this model computes now. All ranks have to call it."""
    device = ranks.device
    words = min(model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size)
    token_ids = torch.randint(words, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    packed = PackedSequences.from_lengths([PROBE_TOKENS], device)
    logprobs, *_ = packed_logprobs(model, token_ids, packed, torch.arange(1, PROBE_TOKENS, device=device))
    return {"token_ids": token_ids.tolist(), "logprobs": [0.0, *logprobs.tolist()]}


def manifest(version: int, tensors: dict[str, Tensor], file: str, file_bytes: int) -> dict[str, Any]:
    """Contents of `manifest.json` for tensors, contiguous on the CPU, all in one file of `file_bytes` bytes."""
    return manifest_of(version, [{"name": file, "bytes": file_bytes}], tensor_entries({file: tensors}))


def manifest_of(version: int, files: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Contents of `manifest.json`; its digest is of all tensors, whatever files they are in."""
    return {
        "format": 1,
        "policy_version": version,
        "digest": digest_of((entry["name"], entry["dtype"], entry["shape"], entry["xxh3"]) for entry in tensors),
        "files": files,
        "tensors": tensors,
    }


def tensor_entries(files: Files) -> list[dict[str, Any]]:
    """A manifest's entries of tensors, which are contiguous on the CPU; hashing them takes most of the time."""
    return [
        {
            "name": name,
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "file": file,
            "xxh3": tensor_hash(tensor),
        }
        for file, tensors in files.items()
        for name, tensor in sorted(tensors.items())
    ]


class WeightsPublisher:
    """Writes `<output_dir>/broadcasts/step_<k>`, each rank its share, and removes versions that no engine needs."""

    def __init__(
        self,
        output_dir: Path,
        keep_last: int,
        keep_all: bool,
        ranks: Ranks = ALONE,
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        sender: Sender | None = None,
        probes: bool = False,
    ) -> None:
        """`dtype`: of the published tensors; defaults to what the model computes in. `sender`: sends what was published
        to engines that ask for it. `probes`: add a `Probe` to manifests."""
        self.folder = output_dir / "broadcasts"
        self._keep_last = keep_last
        self._keep_all = keep_all
        self._ranks = ranks
        self._dtype = dtype
        self._max_shard_bytes = max_shard_bytes
        self._sender = sender
        self._probes = probes
        self._probe: Probe | None = None
        self._frozen: Frozen | None = None
        self.barrier = RankBarrier(ranks, "broadcasts")

    def publish(self, model: Any, version: int) -> Path:
        """Write policy `version`; returns the path of its manifest. All ranks have to call it, each writes its share.

        `broadcast.Broadcasts` does the same while training continues.
        """
        return self.write(version, by_file(self.shares(model)))

    def shares(self, model: Any) -> Shares:
        """This rank's share of the published tensors. All ranks have to call it and consume all of it. What was
        published before is no longer sent."""
        if self._sender is not None:
            self._sender.withdraw()
        if self._probes:
            self._probe = probe_of(model, self._ranks)
        return self._shares(model)

    def _shares(self, model: Any) -> Shares:
        self._frozen = frozen_of(model)
        shards = plan(model, self._ranks, self._max_shard_bytes, self._dtype)
        return shares(model, self._ranks, shards, self._dtype)

    def write(self, version: int, files: Files) -> Path:
        """Write these tensors, contiguous on the CPU, as this rank's share of policy `version`; returns the path of its
        manifest when all ranks have written.

        A trainer that resumed from a checkpoint repeats versions that exist already. Files with the same contents stay,
        since an engine may be reading them; others, or damaged ones, are replaced.

        Raises:
            RankError: another rank could not write its share, or did not in time.
        """
        manifest = self.folder / f"step_{version}" / "manifest.json"
        sizes = self.barrier.each(lambda: bytes_of(files), "say how much it will write")
        self.barrier.lead(lambda: check_room(manifest.parent, sum(sizes)), "find room for the weights")
        with self.barrier.folder(manifest.parent) as folder:
            share = lambda: self._share(folder, manifest.parent, version, files)  # noqa: E731 (one line)
            parts = self.barrier.each(share, "write its share of the weights")
            self.barrier.lead(lambda: self._complete(version, folder, parts), "complete the weights")
        return manifest

    def close(self) -> None:
        """Stop waiting for other ranks, and stop sending."""
        self.barrier.leave()
        if self._sender is not None:
            self._sender.close()

    def _share(self, folder: Path, target: Path, version: int, files: Files) -> dict[str, Any]:
        tensors = tensor_entries(files)
        self._write(folder, files)
        entries: list[dict[str, Any]] = []
        for file in files:
            sync(folder / file)
            entries.append({"name": file, "bytes": (folder / file).stat().st_size})
        if self._sender is not None and files:
            address = self._sender.offer(version, files)
            entries = [{**entry, "sender": address} for entry in entries]
        there = target.is_dir() and all(_same_contents(folder / file, target / file) for file in files)
        return {"files": entries, "tensors": tensors, "there": there}

    def _write(self, folder: Path, files: Files) -> None:
        for file, tensors in files.items():
            save_file(tensors, folder / file, metadata={"format": "pt"})

    def _complete(self, version: int, folder: Path, parts: list[dict[str, Any]]) -> None:
        """By the leading rank."""
        files, tensors = ([entry for part in parts for entry in part[kind]] for kind in ("files", "tensors"))
        twice = [name for name, count in Counter(entry["name"] for entry in tensors).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} is in the shares of several groups of layers")
        contents = manifest_of(version, files, tensors)
        if self._probe is not None:
            contents["probe"] = self._probe
        if self._frozen is not None:
            contents["frozen"] = self._frozen.entries()
        target = self.folder / f"step_{version}"
        # A file of the right size may still be damaged, and an engine would refuse it at every start.
        held = self._held(target) if all(part["there"] for part in parts) else None
        if held is not None and _weights_of(held) == _weights_of(contents):
            if held != contents:
                write_text(target / "manifest.json", json.dumps(contents) + "\n")
        else:
            (folder / "manifest.json").write_text(json.dumps(contents) + "\n", encoding="utf-8")
            settle(folder, target)
        write_text(self.folder / "LATEST", target.name)
        if not self._keep_all:
            self._remove_before(version - self._keep_last + 1)

    def _held(self, folder: Path) -> dict[str, Any] | None:
        """The manifest of what was published there before, if it is complete."""
        try:
            held: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            whole = all((folder / entry["name"]).stat().st_size == entry["bytes"] for entry in held["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return held if whole else None

    def _remove_before(self, oldest: int) -> None:
        for version in saved_steps(self.folder):
            if version < oldest:
                remove_step(self.folder / f"step_{version}")


def _same_contents(one: Path, other: Path) -> bool:
    """Whether two safetensors files are equal; the entries of their metadata have no order."""
    try:
        with one.open("rb") as a, other.open("rb") as b:
            if _header(a) != _header(b):
                return False
            while True:
                piece = a.read(_PIECE_BYTES)
                if piece != b.read(_PIECE_BYTES):
                    return False
                if not piece:
                    return True
    except (OSError, ValueError):
        return False


def _header(file: BinaryIO) -> Any:
    """The header and its length in bytes. Raises ValueError if it is damaged."""
    length = int.from_bytes(file.read(8), "little")
    if length > _HEADER_BYTES:
        raise ValueError("no header of safetensors is so long")
    return length, json.loads(file.read(length))


def _weights_of(contents: dict[str, Any]) -> dict[str, Any]:
    """A manifest without senders, which change at a restart, and without the probe, which another number of ranks sums
    in another order."""
    files = [{key: entry[key] for key in entry if key != "sender"} for entry in contents["files"]]
    return {key: contents[key] for key in contents if key != "probe"} | {"files": files}
