"""A checkpoint as version 0: a manifest over the files of its folder, which engines prove as they prove a trainer's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import write_text
from primerl.launch.preflight.model_folder import read_json
from primerl.train.adapters.files import tensor_bytes_by_file
from primerl.train.settings import ConfigError as FileError
from primerl.train.weights.digest import digest_of, hash_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def publish(model: Path, output_dir: Path, *, trained_only: bool = False) -> Path:
    """Writes `broadcasts/step_0` with links to the model's files, and its manifest; returns the manifest's path.
    `trained_only`: for engines that hold what is trained of a model; a folder that has more is written again without.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] for a file that cannot be read.
    """
    if trained_only and _has_more(model):
        return _publish_trained(model, output_dir)
    folder = output_dir / "broadcasts" / "step_0"
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        content = manifest_of(model)
    except (FileError, OSError) as error:
        shutil.rmtree(temporary)
        raise ConfigError.at("model", str(error)) from None
    for file in content["files"]:
        (temporary / file["name"]).symlink_to((model / file["name"]).resolve())
    write_text(temporary / "manifest.json", json.dumps(content))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder / "manifest.json"


def _has_more(model: Path) -> bool:
    """Whether the folder has tensors that are not trained, or others in place of those that are."""
    from primerl.train.model.packed_model import ModelError, model_shape
    from primerl.train.weights.frozen import frozen_of

    if read_json(model / "config.json").get("quantization_config"):
        return True
    try:
        return frozen_of(model_shape(model)) is not None
    except ModelError as error:
        raise ConfigError.at("model", str(error)) from None


def _publish_trained(model: Path, output_dir: Path) -> Path:
    from primerl.train.model.packed_model import ModelError, load_model
    from primerl.train.weights.publish import WeightsPublisher

    try:
        return WeightsPublisher(output_dir, keep_last=1, keep_all=True).publish(load_model(model), 0)
    except (ModelError, OSError) as error:
        raise ConfigError.at("model", str(error)) from None


def manifest_of(model: Path) -> dict[str, Any]:
    """Contents of `manifest.json` (docs/architecture.md, "Weights") for a model folder. Reads all of its weights."""
    tensors: list[dict[str, Any]] = [
        {"name": name, "dtype": dtype, "shape": shape, "file": file.name, "xxh3": hash_of(data)}
        for file, name, dtype, shape, data in tensor_bytes_by_file(model)
    ]
    names = {tensor["name"] for tensor in tensors}
    if read_json(model / "config.json").get("tie_word_embeddings") and EMBEDDING in names:
        # Tied tensors appear once.
        tensors = [tensor for tensor in tensors if tensor["name"] != HEAD]
    files = sorted({str(tensor["file"]) for tensor in tensors})
    return {
        "format": 1,
        "policy_version": 0,
        "digest": digest_of((entry["name"], entry["dtype"], entry["shape"], entry["xxh3"]) for entry in tensors),
        "files": [{"name": name, "bytes": (model / name).stat().st_size} for name in files],
        "tensors": tensors,
    }
