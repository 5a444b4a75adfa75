"""The base model's folder as engines load it: with an output layer of its own where the model ties it to the embedding.

Adapters of the output layer (`train_unembed`) change what the model answers, and never how it reads tokens. Engines get
adapters merged into whole weights, so theirs cannot be one tensor for both. The trainer keeps one: peft adds an adapter
to the output layer without touching what it shares.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from primerl.train.model.packed_model import model_shape
from primerl.train.weights.frozen import INDEX, weight_files
from primerl.train.weights.names import published
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import Shares, file_name, own_tensors

CONFIG = "config.json"
TIED = "tie_word_embeddings"


def tied_head(model: Any) -> str | None:
    """Name of the output layer's weights where they are the embedding's."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    head = model.get_output_embeddings()
    return next(
        (f"{name}.weight" for name, one in model.named_modules() if one is head and f"{name}.weight" in tied), None
    )


def publish_apart(model: Any, head: str) -> None:
    """From here on the output layer's weights are published as well, though they are the embedding's."""
    model.all_tied_weights_keys = {name: of for name, of in model.all_tied_weights_keys.items() if name != head}


def engines_folder(folder: Path, target: Path, *, trusted: bool) -> Path:
    """The folder that engines are to load: `folder` itself, or, where the model is tied, `target`, which is replaced:
    it links the weights of `folder`, and holds the output layer's.

    Raises ModelError where the model cannot be loaded, OSError or SafetensorError where the folder cannot be written.
    """
    shutil.rmtree(target, ignore_errors=True)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get(TIED) is False and "text_config" not in config:
        return folder
    model = model_shape(folder, trust_remote_code=trusted)
    head = tied_head(model)
    if head is None:
        return folder
    embedding = model.all_tied_weights_keys[head]
    (stored,) = published(model, {embedding: own_tensors(model)[embedding]})
    target.mkdir(parents=True)
    files = weight_files(folder)
    for one in folder.iterdir():
        if one.is_file() and one not in files and one.name not in (CONFIG, INDEX):
            (target / one.name).symlink_to(one.resolve())
    _link_weights(files, target, stored, head)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part[TIED] = False
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


def _link_weights(files: list[Path], target: Path, embedding: str, head: str) -> None:
    """Files of weights, with one more for the output layer's, which are the embedding's."""
    holders: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = file_name(number, len(files) + 1)
        (target / name).symlink_to(file.resolve())
        with safe_open(file, "pt") as content:
            holders |= dict.fromkeys(content.keys(), name)
            if embedding in holders and holders[embedding] == name:
                weights = content.get_tensor(embedding)
    added = file_name(len(files) + 1, len(files) + 1)
    save_file({head: weights}, target / added, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": holders | {head: added}}
    (target / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


class UntiedPublisher(WeightsPublisher):
    """Publishes tensors that are one in the trainer as two: files cannot hold one memory under two names."""

    def _shares(self, model: Any) -> Shares:
        written: set[int] = set()
        for file, name, tensor in super()._shares(model):
            own: Tensor = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
            yield file, name, own
