"""A model's memory under the names and shapes of a checkpoint: what is written there is what the model computes with.

`transformers` joins tensors of a checkpoint when it loads one (the experts of a mixture become one tensor), and renames
some. What it does the other way round when it saves, and the trainer when it publishes, is done here once, with a
model's places in memory in place of its values: each published tensor turns out to be a view of one of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from primerl.train.distributed.ranks import ALONE
from primerl.train.model.packed import ModelError
from primerl.train.weights.names import published
from primerl.train.weights.shards import own_tensors, plan


def published_views(model: Any) -> dict[str, Tensor]:
    """Views of the model's own tensors, by the names that the trainer publishes them under.

    Raises ModelError where a published tensor is no part of one of the model's.
    """
    state = {name: tensor.detach() for name, tensor in own_tensors(model).items()}
    found: dict[str, Tensor] = {}
    for shard in plan(model, ALONE):
        for group in shard.groups:
            own = {name: state[name] for name in group}
            named = published(model, dict(own))
            known = {(tensor.data_ptr(), tensor.shape): tensor for tensor in own.values()}
            same = {name: known.get((tensor.data_ptr(), tensor.shape)) for name, tensor in named.items()}
            if all(tensor is not None for tensor in same.values()):
                found |= {name: tensor for name, tensor in same.items() if tensor is not None}
            else:
                found |= _views(model, own)
    return found


def _views(model: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the tensors of one group, found from where their values go."""
    numbered, ends, end = {}, [], 0
    for name, tensor in own.items():
        if not tensor.is_contiguous():
            raise ModelError(f"{type(model).__name__}: {name} is not contiguous, so new weights cannot be loaded")
        numbered[name] = torch.arange(end, end + tensor.numel()).view(tensor.shape)
        end += tensor.numel()
        ends.append((end, tensor))
    views = {}
    for name, places in published(model, numbered).items():
        view = _view(places, ends)
        if view is None:
            raise ModelError(
                f"{type(model).__name__}: {name} of a checkpoint does not correspond to a part of a single "
                "model tensor, so new weights cannot be loaded"
            )
        views[name] = view
    if sum(view.numel() for view in views.values()) != end:
        raise ModelError(f"{type(model).__name__}: a checkpoint has other tensors than the model ({', '.join(own)})")
    return views


def _view(places: Tensor, ends: list[tuple[int, Tensor]]) -> Tensor | None:
    """The view whose elements are at `places`, where these are evenly spaced along each axis of one tensor. `ends`: the
    tensors in the order of their places, each with the place after its last."""
    first = int(places.flatten()[0])
    begin, end, tensor = next(
        (end - tensor.numel(), end, tensor) for end, tensor in ends if end - tensor.numel() <= first < end
    )
    steps = [
        int(places.select(axis, 1).flatten()[0]) - first if size > 1 else 0 for axis, size in enumerate(places.shape)
    ]
    expected = torch.tensor(first)
    for axis, (size, step) in enumerate(zip(places.shape, steps, strict=True)):
        along = [1] * places.dim()
        along[axis] = size
        expected = expected + (torch.arange(size) * step).view(along)
    if min(steps, default=0) < 0 or int(places.max()) >= end or not torch.equal(expected, places):
        return None
    return tensor.as_strided(places.shape, steps, tensor.storage_offset() + first - begin)
