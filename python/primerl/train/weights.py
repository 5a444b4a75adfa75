"""Weights for the engines: safetensors with a manifest that proves what was loaded. The format is in
docs/architecture.md, "Weights"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from primerl.train.distributed import ALONE, Ranks
from primerl.train.files import whole_folder, write_text
from primerl.train.merging import merged_state
from primerl.train.parallel import whole_state
from primerl.train.step_folders import saved_steps

FILE = "model.safetensors"
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


Files = dict[str, dict[str, Tensor]]
"""Tensors by their names, by the names of their files."""


def checkpoint_tensors(model: Any, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """The model's tensors, an adapter merged, under the names of a Hugging Face checkpoint, tied ones once. They may be
    the model's own, wherever these are. All ranks have to call it; those that do not lead get none."""
    from transformers.core_model_loading import revert_weight_conversion

    own = whole_state(model, ranks)
    if not ranks.leads:
        return {}
    own = merged_state(model, own)
    named = revert_weight_conversion(model, own)
    return {name: named[name].detach() for name in sorted(named)}


def manifest(version: int, tensors: dict[str, Tensor], file: str, file_bytes: int) -> dict[str, Any]:
    """Contents of `manifest.json` for tensors that are all in one file of `file_bytes` bytes."""
    return manifest_of_files(version, {file: tensors}, {file: file_bytes})


def manifest_of_files(version: int, files: Files, sizes: dict[str, int]) -> dict[str, Any]:
    """The same for tensors in several files; `sizes` in bytes. The digest is of all tensors, wherever they are."""
    entries = []
    lines = {}
    for file, tensors in files.items():
        for name, tensor in sorted(tensors.items()):
            dtype, shape, xxh3 = SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape), tensor_hash(tensor)
            entries.append({"name": name, "dtype": dtype, "shape": shape, "file": file, "xxh3": xxh3})
            lines[name] = f"{name} {dtype} {'x'.join(map(str, shape))} {xxh3}\n"
    return {
        "format": 1,
        "policy_version": version,
        "digest": xxhash.xxh3_128_hexdigest("".join(lines[name] for name in sorted(lines)).encode()),
        "files": [{"name": file, "bytes": sizes[file]} for file in files],
        "tensors": entries,
    }


def tensor_hash(tensor: Tensor) -> str:
    """XXH3-64 of the raw bytes, 16 hex digits."""
    # Viewed as bytes: numpy, whose buffer is hashed without a copy, knows no bfloat16.
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


class WeightsPublisher:
    """Writes `<output_dir>/broadcasts/step_<k>` and removes what no engine needs any more."""

    def __init__(self, output_dir: Path, keep_last: int, keep_all: bool, ranks: Ranks = ALONE) -> None:
        self.folder = output_dir / "broadcasts"
        self._keep_last = keep_last
        self._keep_all = keep_all
        self._ranks = ranks

    def publish(self, model: Any, version: int) -> Path:
        """Write policy `version`; returns the path of its manifest. All ranks have to call it; the leading one writes.

        `broadcast.Broadcasts` does the same while training goes on.
        """
        files = self.files(model)
        if not self._ranks.leads:
            return self._manifest(version)
        here = {file: {name: tensor.cpu().contiguous() for name, tensor in files[file].items()} for file in files}
        return self.write(version, here)

    def files(self, model: Any) -> Files:
        """What is published. Called by all ranks; what those that do not lead return is not looked at."""
        return {FILE: checkpoint_tensors(model, self._ranks)}

    def write(self, version: int, files: Files) -> Path:
        """Write these tensors, contiguous on the CPU, as policy `version`; returns the path of its manifest.

        A trainer that went on from a checkpoint comes by versions that are there already. Weights that are the same
        stay as they are, for an engine may be reading them; others replace them.
        """
        manifest = self._manifest(version)
        target = manifest.parent
        if not self._holds(target, version, files):
            with whole_folder(target, replace=True) as folder:
                self._write(folder, files)
                contents = _manifest(version, files, folder)
                (folder / manifest.name).write_text(json.dumps(contents) + "\n", encoding="utf-8")
            write_text(self.folder / "LATEST", target.name)
            if not self._keep_all:
                self._remove_before(version - self._keep_last + 1)
        return manifest

    def _manifest(self, version: int) -> Path:
        return self.folder / f"step_{version}" / "manifest.json"

    def _write(self, folder: Path, files: Files) -> None:
        save_file(files[FILE], folder / FILE, metadata={"format": "pt"})

    def _holds(self, folder: Path, version: int, files: Files) -> bool:
        """Whether these weights were published as this version before."""
        try:
            written = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            return bool(written == _manifest(version, files, folder))
        except (OSError, ValueError):
            return False

    def _remove_before(self, oldest: int) -> None:
        for version in saved_steps(self.folder):
            if version < oldest:
                shutil.rmtree(self.folder / f"step_{version}")


def _manifest(version: int, files: Files, folder: Path) -> dict[str, Any]:
    """Of files that are in `folder`."""
    return manifest_of_files(version, files, {file: (folder / file).stat().st_size for file in files})
