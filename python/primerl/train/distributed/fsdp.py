"""Divides a model among the data ranks by torch's FSDP2 (`fully_shard`): each holds a share of every weight, gradient
and optimizer state, in fp32, and the whole weights of a layer only while it computes that layer.

With a mesh of (dp_replicate, dp_shard), each of the dp_replicate groups of dp_shard ranks holds the whole model (HSDP):
weights are gathered within a group, gradients summed over all.

    load the model on the CPU -> prove -> prepare -> shard -> Optimizer(model.named_parameters())

Gradients are sums over the ranks, not means: the loss is already divided by the tokens of all ranks.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from primerl.train.distributed.ranks import Ranks
from primerl.train.model.layers import layers
from primerl.train.model.packed_model import PackedSequences, output_head, predicted_hidden
from primerl.train.objective.logprobs import LogitsHook, token_logprobs

FORWARD = "packed_logprobs"
"""Method of a sharded model that gathers the weights around what `packed_logprobs` computes."""


def shard(model: Any, ranks: Ranks, dtype: torch.dtype) -> None:
    """Divide a model that is whole, in fp32, on every rank; it then computes in `dtype`. Raises ModelError."""
    if ranks.mesh is None:
        return
    # Inputs are not cast, so that temperatures stay exact.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers(model):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    # Embeddings, output layer and last norm stay whole from the forward to the backward pass.
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.computes_in = dtype
    setattr(model, FORWARD, MethodType(_packed_logprobs, model))
    register_fsdp_forward_method(model, FORWARD)


def packed_logprobs(
    model: Any,
    token_ids: Tensor,
    packed: PackedSequences,
    targets: Tensor,
    temperatures: Tensor | None = None,
    *,
    hook: LogitsHook | None = None,
    entropy: bool = True,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities and entropies of the tokens at packed indices `targets` (see `logprobs.token_logprobs`), and,
    for the targets at the indices `plain`, also log-probabilities at temperature 1 among all tokens."""
    compute = getattr(model, FORWARD) if isinstance(model, FSDPModule) else MethodType(_packed_logprobs, model)
    answer: tuple[Tensor, Tensor, Tensor | None] = compute(
        token_ids, packed, targets, temperatures, hook, entropy, plain
    )
    return answer


def _packed_logprobs(
    model: Any,
    token_ids: Tensor,
    packed: PackedSequences,
    targets: Tensor,
    temperatures: Tensor | None,
    hook: LogitsHook | None,
    entropy: bool,
    plain: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden, predicted = predicted_hidden(model, token_ids, packed, targets), token_ids[targets]
    head = output_head(model)
    logprobs, entropies = token_logprobs(hidden, head, predicted, temperatures, hook=hook, entropy=entropy)
    if plain is None:
        return logprobs, entropies, None
    return logprobs, entropies, token_logprobs(hidden[plain], head, predicted[plain], entropy=False)[0]


def nothing(model: Any, ranks: Ranks) -> Tensor:
    """A forward pass with loss 0, for a rank with fewer micro-batches: gathering weights takes all ranks."""
    token_ids = torch.zeros(2, dtype=torch.int64, device=ranks.device)
    packed = PackedSequences.from_lengths([2], ranks.device)
    logprobs, *_ = packed_logprobs(model, token_ids, packed, torch.ones(1, dtype=torch.int64, device=ranks.device))
    return logprobs.sum() * 0.0


def sum_gradients_after(model: Any, *, last: bool) -> None:
    """To be called before each backward pass of a step. Each scatters its gradients, so that a rank holds those of its
    own share only, in fp32; only the last one sums them over groups that hold the whole model (HSDP)."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor, or all of it if it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is divided among ranks, on each of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """The index, in the whole tensor, of the first row that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    shares = tensor.device_mesh["dp_shard"]
    return min(tensor.shape[0], shares.get_local_rank() * -(-tensor.shape[0] // shares.size()))
