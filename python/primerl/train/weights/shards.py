"""Divides whole weights among the ranks as files: each gathers, hashes and writes a share, and none holds everything.

    plan(model, ranks, ...)      which tensors go to which file, and which rank makes it; the same on all ranks
    shares(model, ranks, plan)   gathers; each rank gets the tensors of its own files, one group at a time

A group is a layer, or what is outside the layers: tensors that are merged (an adapter), split or joined (a mixture's
experts) are in one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from primerl.train.adapters.merging import is_adapter, merged_state
from primerl.train.distributed.fsdp import whole
from primerl.train.distributed.ranks import Ranks
from primerl.train.weights.names import published

FILE = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
"""Size of a file above which another one is started."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of whole weights."""

    file: str
    rank: int
    """The rank that writes it."""
    groups: tuple[tuple[str, ...], ...]
    """Names in the model's state."""


Files = dict[str, dict[str, Tensor]]
"""Tensors by their names, by the names of their files."""
Shares = Iterable[tuple[str, str, Tensor]]
"""File, name and tensor of what a rank writes. Producing the next one may take all ranks."""


def own_tensors(model: Any) -> dict[str, Tensor]:
    """The model's state, tied tensors once, without what is not saved; of a divided model, this rank's shares."""
    left_out = {*(getattr(model, "all_tied_weights_keys", None) or {}), *(model._keys_to_ignore_on_save or ())}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}


def computing_dtype(model: Any) -> torch.dtype:
    """The dtype that a model computes in; one that is divided among ranks has its own tensors in fp32."""
    dtype: torch.dtype = getattr(model, "computes_in", None) or model.dtype
    return dtype


def plan(
    model: Any, ranks: Ranks, max_shard_bytes: int = MAX_SHARD_BYTES, dtype: torch.dtype | None = None
) -> list[Shard]:
    """Assigns whole groups to ranks, about the same number of bytes each, in files of at most `max_shard_bytes` unless
    a single group is larger."""
    dtype = dtype or computing_dtype(model)
    groups: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in own_tensors(model).items():
        group = _group(name)
        groups.setdefault(group, []).append(name)
        itemsize = dtype.itemsize if tensor.is_floating_point() else tensor.dtype.itemsize
        sizes[group] = sizes.get(group, 0) + (0 if is_adapter(name) else tensor.numel() * itemsize)
    loads = [0] * ranks.size
    ranks_of: dict[str, int] = {}
    # The largest first, each to the rank with the fewest bytes.
    for group in sorted(groups, key=lambda group: -sizes[group]):
        rank = loads.index(min(loads))
        ranks_of[group] = rank
        loads[rank] += sizes[group]
    files: list[tuple[int, list[str]]] = []
    for rank in range(ranks.size):
        filled = 0
        for group in groups:
            if ranks_of[group] != rank:
                continue
            if not files or files[-1][0] != rank or filled + sizes[group] > max_shard_bytes:
                files.append((rank, []))
                filled = 0
            files[-1][1].append(group)
            filled += sizes[group]
    return [
        Shard(file_name(number, len(files)), rank, tuple(tuple(groups[group]) for group in names))
        for number, (rank, names) in enumerate(files, 1)
    ]


def _group(name: str) -> str:
    layer = re.match(r".*?\.\d+\.", name)
    if layer:
        return layer[0]
    plain = name.replace(".base_layer.", ".")
    return plain.split(".lora_")[0] if is_adapter(plain) else plain.rpartition(".")[0]


def file_name(number: int, count: int) -> str:
    """The name that transformers would give it."""
    return FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def shares(
    model: Any, ranks: Ranks, shards: list[Shard], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """File, name and tensor of this rank's part of a Hugging Face checkpoint, with an adapter merged, as `dtype` or
    what the model computes in. They may be the model's own tensors, on its device.

    All ranks have to call and exhaust it: each tensor is gathered by all of them, which hold one group at most.
    """
    state = own_tensors(model)
    for shard in shards:
        for group in shard.groups:
            tensors = gathered(model, {name: state[name] for name in group}, keep=shard.rank == ranks.rank)
            if not tensors:
                continue
            named = published(model, merged_state(model, tensors))
            for name in sorted(named):
                tensor = named[name].detach()
                yield shard.file, name, tensor.to(dtype or tensor.dtype) if tensor.is_floating_point() else tensor


def by_file(shares: Shares) -> Files:
    """All tensors, contiguous on the CPU."""
    files: Files = {}
    for file, name, tensor in shares:
        files.setdefault(file, {})[name] = tensor.cpu().contiguous()
    return files


def bytes_of(files: Files) -> int:
    """Size on disk without the files' headers."""
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def gathered(model: Any, state: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors in the dtype that the model computes in, if `keep`, else none. All ranks that the model is divided
    among have to call it."""
    tensors = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            tensor = whole(tensor.detach().to(model.computes_in))
        if keep:
            tensors[name] = tensor.detach()
    return tensors
