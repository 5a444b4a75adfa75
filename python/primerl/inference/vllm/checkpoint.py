"""A published checkpoint, checked as a whole before any model sees it (docs/architecture.md, "Weights").

    folder ── manifest.json ──> files and sizes ──> names, dtypes, shapes ──> the model's ──> every hash ──> digest

What a manifest names as frozen (vision towers, MTP layers), the engine has from its own folder, and proves once that it
is what the trainer has. Nothing is copied: the tensors are views of the mapped files, and those that were hashed are
those that are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, dtype

from primerl.train.weights import mxfp4
from primerl.train.weights.digest import digest_of
from primerl.train.weights.frozen import COMPUTED, weight_files
from primerl.train.weights.tensors import LOADABLE, NAMES, tensor_hash


class CheckpointError(ValueError):
    """The message names the file or the tensors, and what is wrong with them."""


@dataclass(frozen=True)
class Checkpoint:
    version: int
    digest: str
    """XXH3-128, 32 hex digits, of names, dtypes, shapes and hashes: of these tensors, and as the manifest has it."""
    tensors: list[tuple[str, Tensor]]
    """By name, in the order of the files; on the CPU, views of the mapped files."""


def tensors_of(folder: Path, *, tied: bool) -> dict[str, Tensor]:
    """The tensors of a model folder that a manifest lists; views of the mapped files. Those in MXFP4 are named and
    shaped as the numbers that a trainer publishes, and have no values (device meta).

    `tied`: the output layer is the embedding, which a manifest has once, whether or not the folder has it twice.
    Raises CheckpointError where there are no weights.
    """
    found: dict[str, Tensor] = {}
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors, so new weights cannot be compared with the model")
    for file in files:
        with _opened(file) as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    for name in [name for name in found if name.endswith(mxfp4.BLOCKS)]:
        numbers = torch.empty(mxfp4.whole_shape(found.pop(name).shape), dtype=torch.bfloat16, device="meta")
        found[mxfp4.whole_name(name)] = numbers
    for name in [name for name in found if mxfp4.is_part(name)]:
        del found[name]
    computed = [name for name in found if name.endswith(COMPUTED)]
    for name in [*computed, *(["lm_head.weight"] if tied else [])]:
        found.pop(name, None)
    return found


def shapes_of(folder: Path, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of [`tensors_of`][primerl.inference.vllm.checkpoint.tensors_of]."""
    return {name: _shape(tensor) for name, tensor in tensors_of(folder, tied=tied).items()}


class Frozen:
    """What an engine has in its own folder and no version changes."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        """`own`: the tensors of the folder that the engine was started from."""
        self._own = own
        self._hashes: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        """Those that a manifest has named, once they are proved."""

    def prove(self, listed: list[dict[str, Any]], model: str) -> None:
        """Raises CheckpointError for an entry of a manifest that is not the same here."""
        names = {entry["name"] for entry in listed}
        for name in names & self._own.keys() - self._hashes.keys():
            self._hashes[name] = tensor_hash(self._own[name])

        def differs(entry: dict[str, Any]) -> bool:
            own = self._own.get(entry["name"])
            same = own is not None and list(own.shape) == entry["shape"] and NAMES.get(own.dtype) == entry["dtype"]
            return not same or self._hashes[entry["name"]] != entry["xxh3"]

        wrong = (entry["name"] for entry in listed if differs(entry))
        _refuse(wrong, f"they are frozen, and in the folder of {model} that is served they differ or are missing")
        self.tensors = {name: self._own[name] for name in sorted(names)}


NOTHING_FROZEN = Frozen({})

Receive = Callable[[Path, str], dict[str, Tensor] | None]
"""The tensors of a file of a manifest, from another source than the file; None if that has none."""


def read(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    receive: Receive = lambda manifest, file: None,
    *,
    dtypes: Mapping[str, dtype] = LOADABLE,
    model: str = "the model",
    frozen: Frozen = NOTHING_FROZEN,
) -> Checkpoint:
    """Reads and checks names, shapes, dtypes, sizes and every hash. Raises CheckpointError.

    `dtypes`: those that tensors may have. `model`: what has tensors as expected, in words. `frozen`: takes those of
    the expected tensors that the manifest says are not among its own.
    """
    manifest = _manifest(folder)
    frozen.prove(manifest.get("frozen", []), model)
    expected = {name: shape for name, shape in expected.items() if name not in frozen.tensors}
    found: dict[str, tuple[str, Tensor]] = {}
    for entry in manifest["files"]:
        file = folder / _plain(folder, entry["name"])
        received = receive(folder / "manifest.json", entry["name"]) if "sender" in entry else None
        if received is not None:
            found |= {name: (entry["name"], tensor) for name, tensor in received.items()}
            continue
        size = _size(file)
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{file} is not a whole safetensors file: it has {size} bytes, the manifest says {entry['bytes']}"
            )
        with _opened(file) as tensors:
            found |= {name: (entry["name"], tensors.get_tensor(name)) for name in tensors.keys()}  # noqa: SIM118
    tensors = _as_listed(manifest["tensors"], found, dtypes)
    shapes = _shapes_of_numbers(tensors)
    _refuse(
        (name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)),
        f"names and shapes must equal those of {model} that is served",
    )
    hashes = {name: tensor_hash(tensor) for name, tensor in tensors.items()}
    listed = {entry["name"]: entry for entry in manifest["tensors"]}
    _refuse(
        (name for name in hashes if hashes[name] != listed[name]["xxh3"]), "their bytes are not those of the manifest"
    )
    digest = digest_of((name, listed[name]["dtype"], _shape(tensors[name]), hashes[name]) for name in tensors)
    if digest != manifest["digest"]:
        raise CheckpointError(f"digest of the tensors is {digest}, the manifest says {manifest['digest']}")
    return Checkpoint(int(manifest["policy_version"]), digest, list(tensors.items()))


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["format"] != 1:
            raise CheckpointError(f"{file} is not a manifest of format 1: format is {manifest['format']}")
        whole = all(manifest[name] is not None for name in ("policy_version", "digest"))
        whole = whole and all(entry.keys() >= {"name", "bytes"} for entry in manifest["files"])
        keys = {"name", "dtype", "shape", "file", "xxh3"}
        whole = whole and all(entry.keys() >= keys - {"file"} for entry in manifest.get("frozen", []))
        if not whole or not all(entry.keys() >= keys for entry in manifest["tensors"]):
            raise KeyError("a field")
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a manifest of format 1: {error} is missing or malformed") from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    return dict(manifest)


def _plain(folder: Path, name: str) -> str:
    """Names are joined to the folder: one with a separator could read any file of this machine."""
    if not isinstance(name, str) or "/" in name or "\\" in name or name.startswith("."):
        raise CheckpointError(f"{folder / 'manifest.json'}: file name {name!r} is not a plain name")
    return name


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from None


def _as_listed(
    listed: list[dict[str, Any]], found: Mapping[str, tuple[str, Tensor]], dtypes: Mapping[str, dtype]
) -> dict[str, Tensor]:
    """The tensors of the files, which have to be exactly those of the manifest, of dtypes that a model can load."""
    entries = {entry["name"]: entry for entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError("manifest.json lists a tensor twice")

    def differs(name: str) -> bool:
        if name not in entries or name not in found:
            return True
        (file, tensor), entry = found[name], entries[name]
        known = dtypes.get(entry["dtype"])
        return file != entry["file"] or list(tensor.shape) != entry["shape"] or known not in (None, tensor.dtype)

    _refuse(filter(differs, entries.keys() | found.keys()), "the files hold other tensors than the manifest lists")
    # U8: parts of MXFP4, where `primerl eval` lists a folder's own files.
    loadable = (name for name in entries if entries[name]["dtype"] in dtypes or mxfp4.is_part(name))
    _refuse(entries.keys() - set(loadable), "the model cannot load their dtype")
    return {name: tensor for name, (_, tensor) in found.items()}


def _shapes_of_numbers(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of what a model is loaded with: parts in MXFP4 count as the tensor that they are of."""
    shapes = {name: _shape(tensor) for name, tensor in tensors.items() if not mxfp4.is_part(name)}
    parts = {name: _shape(tensor) for name, tensor in tensors.items() if mxfp4.is_part(name)}
    for name, shape in parts.items():
        whole = mxfp4.whole_name(name)
        both = {whole + mxfp4.BLOCKS, whole + mxfp4.SCALES} <= parts.keys()
        if both and name.endswith(mxfp4.BLOCKS) and len(shape) == 4 and parts[whole + mxfp4.SCALES] == shape[:-1]:
            shapes[whole] = mxfp4.whole_shape(shape)
    return shapes


def _refuse(names: Iterable[str], reason: str) -> None:
    wrong = sorted(names)
    if wrong:
        raise CheckpointError(f"checkpoint mismatch in {len(wrong)} tensors, e.g. {wrong[:3]}: {reason}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
