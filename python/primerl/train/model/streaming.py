"""A large model that is divided among ranks is never whole in memory: each tensor goes from its file to its shares.

    streamed        the leading rank: the model on torch's meta device, with buffers, and where each tensor is on disk
                    (None where that is not known: it is loaded whole then)
    first_layers    the leading rank: the same model with its first layers only, with the values of the files;
                    others: its shape. What `prove` tries, and what is divided first, in place of the whole model
    value           one tensor, in fp32

The first layers are at least two, and as many as it takes to have one of each kind. Of what `transformers`
converts while it loads, only experts are read so, which files have one by one; a model with other names is not.
"""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from primerl.train.model import experts
from primerl.train.model.architectures import annotate
from primerl.train.model.footprint import parameters
from primerl.train.model.packed_model import ATTENTION, IMPLEMENTATIONS, ModelError, kind_of, model_shape, reading

log = logging.getLogger(__name__)

LARGE = 2 * 10**9
"""Parameters from which on a model is streamed: 8 GB in fp32, which any machine that trains has."""
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacks of a mixture's experts, and the matrices of each expert in files, as `transformers` puts them together."""
INDEX = "model.safetensors.index.json"
OF_FILE = "of_file"
"""Attribute of a parameter (or buffer) without values: its name in the files."""
IS_READ = "_is_hf_initialized"
"""Attribute of a parameter by which `transformers` knows that its value was in a file."""
SOURCE = "streamed_from"
"""Attribute of a model without values, on the leading rank: its `Source`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensors of a model folder are."""

    files: dict[str, Path]
    """By the tensor's name."""

    @classmethod
    def of(cls, folder: Path) -> Source:
        """Raises OSError, ValueError or KeyError for files that cannot be read."""
        index = folder / INDEX
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return cls({name: folder / file for name, file in names.items()})
        (file,) = sorted(folder.glob("*.safetensors"))
        with safe_open(file, "pt") as content:
            return cls(dict.fromkeys(content.keys(), file))

    def parts(self, name: str) -> list[list[str]]:
        """Names in the files of what a tensor is made of: of each expert of a stack, the matrices that are one below
        the other in it. Empty where it is not there."""
        if name in self.files:
            return [[name]]
        layer, _, kind = name.rpartition(".")
        matrices = STACKED.get(kind, ()) if layer.endswith(".experts") else ()
        found: list[list[str]] = []
        while matrices:
            own = [f"{layer}.{len(found)}.{matrix}.weight" for matrix in matrices]
            if not all(one in self.files for one in own):
                break
            found.append(own)
        return found

    def shape(self, name: str) -> list[int] | None:
        """None where it is not there."""
        parts = self.parts(name)
        if not parts or name in self.files:
            return self._shape(name) if parts else None
        rows = [self._shape(one) for one in parts[0]]
        return [len(parts), sum(shape[0] for shape in rows), *rows[0][1:]]

    def _shape(self, name: str) -> list[int]:
        with safe_open(self.files[name], "pt") as content:
            found: list[int] = content.get_slice(name).get_shape()
            return found

    def value(self, name: str) -> Tensor:
        """The tensor, in fp32 where it is of floating point."""
        if name in self.files:
            return self._value(name)
        parts = self.parts(name)
        stack = torch.empty(self.shape(name) or [0])
        for index, own in enumerate(parts):
            torch.cat([self._value(one) for one in own], out=stack[index])
        return stack

    def _value(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as content:
            tensor: Tensor = content.get_tensor(name)
        return tensor.float() if tensor.is_floating_point() else tensor


def is_large(folder: Path) -> bool:
    """By its config alone."""
    try:
        count = parameters(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
    return count is not None and count >= LARGE


def streamed(folder: Path) -> Any | None:
    """The leading rank's model without values of its parameters. Raises ModelError."""
    try:
        source = Source.of(folder)
    except (OSError, ValueError, KeyError):
        return None
    model = model_shape(folder)
    if not _name(model, source):
        log.info("the model's files hold other tensors than the model, so it is loaded whole")
        return None
    _make_buffers(model)
    try:
        small = _first_layers(folder)
    except ModelError as error:  # some say in other keys which layers belong together
        log.info("the model cannot be built from its first layers alone, so it is loaded whole: %s", error)
        return None
    known = _same_buffers(model, small) and _name(small, source, all_of_it=False)
    if not known or _changes_embeddings(small):
        log.info("the model's first layers, or its buffers, are not known without the rest, so it is loaded whole")
        return None
    setattr(model, SOURCE, source)
    return model


def _name(model: Any, source: Source, *, all_of_it: bool = True) -> bool:
    """Tells each parameter and saved buffer its name in the files; whether all are there, and (of the whole model)
    nothing else is."""
    own = {**dict(model.named_parameters()), **{name: model.get_buffer(name) for name in _saved_buffers(model)}}
    for name, tensor in own.items():
        if list(tensor.shape) != source.shape(name):
            return False
        setattr(tensor, OF_FILE, name)
    # Where a tied tensor is there twice, `transformers` looks whether the two are one.
    read = {part for name in own for parts in source.parts(name) for part in parts}
    return not all_of_it or source.files.keys() <= read


def _saved_buffers(model: Any) -> list[str]:
    named = {name for name, _ in model.named_buffers()}
    return [name for name in model.state_dict() if name in named]


def _make_buffers(model: Any) -> None:
    """Values of what is in no file, as `transformers` makes them: its models set them where they set first weights,
    which have no memory here."""
    saved = set(_saved_buffers(model))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and f"{prefix}.{name}".lstrip(".") not in saved:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.no_grad():
        model.initialize_weights()


def _same_buffers(model: Any, small: Any) -> bool:
    """Whether the values are those of a model that was made on the CPU; and none is left without."""
    made = dict(small.named_buffers())
    for name, buffer in model.named_buffers():
        if getattr(buffer, OF_FILE, None) is not None:
            continue
        if buffer.is_meta or (name in made and not torch.equal(buffer, made[name])):
            return False
    others = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return not any(tensor.is_meta for tensor in others)


@torch.no_grad()
def _changes_embeddings(small: Any) -> bool:
    """Whether `transformers` sets rows of embeddings after it has read them (Youtu: that of padding)."""
    for module in small.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 1.0
            setattr(module.weight, IS_READ, True)
            small._init_weights(module)
            if not bool((module.weight[module.padding_idx] == 1.0).all()):
                return True
    return False


def first_layers(folder: Path, source: Source | None) -> Any:
    """With the values of the files where a source is given, else its shape. Raises ModelError."""
    if source is None:
        with torch.device("meta"):
            return _first_layers(folder).to("meta")
    model = _first_layers(folder)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if source.parts(name):
                tensor.copy_(source.value(name))
    return model


def _first_layers(folder: Path) -> Any:
    """In fp32, with random weights where the default device is the CPU."""
    with reading(folder) as (_, config):
        short = _shortened(config)
        with torch.random.fork_rng(devices=[]):
            kind, own = kind_of(short)
            made = kind.from_config(short, dtype=torch.float32, **IMPLEMENTATIONS, **own)
    model = made.train()
    annotate(model, ATTENTION)
    experts.install(model)
    return model


def _shortened(config: Any) -> Any:
    """The config of the first layers: what it lists for each layer is cut, too."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    total = text.num_hidden_layers
    count = min(total, _count(text, total))
    for name, value in list(vars(text).items()):
        if (
            isinstance(value, list | tuple | str)
            and len(value) == total
            and name not in ("architectures", "model_type")
        ):
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return short


def _count(text: Any, total: int) -> int:
    """At least two layers, and one of each kind."""
    wanted = max(2, (getattr(text, "first_k_dense_replace", 0) or 0) + 1, getattr(text, "decoder_sparse_step", 1) or 1)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern"):
        kinds = getattr(text, name, None)
        if kinds and len(kinds) == total:
            wanted = max(wanted, *(list(kinds).index(kind) + 1 for kind in set(kinds)))
    return wanted


def value_of(model_source: Source | None, name: str | None, given: Tensor) -> Tensor:
    """The tensor itself, or its value from the files where it has none."""
    if model_source is None or name is None or not given.is_meta:
        return given
    return model_source.value(name)
