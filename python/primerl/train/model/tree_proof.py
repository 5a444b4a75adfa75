"""Proves before training that a model computes samples that begin alike as a tree as it computes them one by one.

A wrong mask, or a layer that carries something from token to token in the row, would train on something else without
an error. A model for which the proof fails is trained without sharing, which is always right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from primerl.train.model.packed_model import FLASH_TAKES_GQA, PackedSequences, predicted_hidden
from primerl.train.model.prefixes import PrefixTree
from primerl.train.model.proof import TOLERANCE, near
from primerl.train.model.recurrent import mixers
from primerl.train.model.tree_attention import by_kernel, by_unit

log = logging.getLogger(__name__)

LENGTHS = (7, 12, 11, 11, 14, 5)
SHARED = (0, 5, 8, 5, 11, 0)
"""Siblings at two depths, which would see each other if the mask were wrong; one that begins with all of another; one
that shares nothing."""

KERNEL_LENGTHS, KERNEL_SHARED = (40, 33, 70, 21), (0, 24, 30, 3)
KERNEL_TOLERANCE = 0.03
"""Norm of the difference of a kernel in half precision from fp32, as a share of the values' norm. A causal mask that is
aligned at the start of the keys is off by the size of the values."""


def tree_refusal(model: Any) -> str | None:
    """Why this model, whole and proved by `proof.prove`, cannot compute shared tokens once; None if it can."""
    if mixers(model):
        return "it has layers that carry a state from token to token, which would have to branch"
    try:
        plain, plain_gradient = _computed(model, PackedSequences.from_lengths(LENGTHS, _device(model)))
        packed = PackedSequences.sharing(LENGTHS, SHARED, _device(model))
        assert packed.tree is not None
        states, gradient = _computed(model, packed)
    except Exception as error:  # noqa: BLE001 (models raise anything; without sharing it is computed as it was proved)
        return f"its forward pass over a tree fails: {type(error).__name__}: {error}"
    summed = torch.zeros_like(gradient, dtype=torch.float32).index_add_(0, packed.tree.row_of, plain_gradient.float())
    tolerance = TOLERANCE[states.dtype]
    if not near(states, plain, tolerance):
        return "computed as a tree, its hidden states are others than one sample after another"
    if not near(gradient, summed, tolerance):
        return "computed as a tree, its gradients are others than one sample after another"
    return None


def _device(model: Any) -> torch.device:
    found: torch.device = next(model.parameters()).device
    return found


def _token_ids(model: Any) -> Tensor:
    """[T] int64, random but for what the sequences share."""
    most = min(model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    sequences: list[Tensor] = []
    for length, shared in zip(LENGTHS, SHARED, strict=True):
        own = torch.randint(0, most, (length - shared,), generator=generator)
        sequences.append(torch.cat([sequences[-1][:shared], own]) if sequences else own)
    return torch.cat(sequences).to(_device(model))


def _computed(model: Any, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """Hidden states of all tokens of all samples, [T, H], and the gradients of a random projection of them with respect
    to the embeddings of the row's tokens, [N, H]."""
    given: list[Tensor] = []

    def keep(_module: Any, _given: Any, output: Tensor) -> Tensor:
        given.append(output.detach().requires_grad_())
        return given[0].clone()  # which may be changed in place

    token_ids = _token_ids(model)
    targets = torch.arange(1, len(token_ids) + 1, device=token_ids.device)
    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            states = predicted_hidden(model, token_ids, packed, targets)
    finally:
        hook.remove()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(states.device)
    (gradient,) = torch.autograd.grad((states.float() * weights).sum(), given[0])
    return states.detach(), gradient.squeeze(0)


def kernel_refusal(
    device: torch.device, dtype: torch.dtype, kernel: Callable[..., Any] = varlen.varlen_attn
) -> str | None:
    """Why torch's attention over packed rows cannot be used for trees on this device; None if it can. It must align the
    causal mask, and windows, at the end of keys that are longer than the queries, forward and backward; its own tests
    train with equal lengths only."""
    tree = PrefixTree.of(KERNEL_LENGTHS, KERNEL_SHARED, device)
    generator = torch.Generator().manual_seed(0)
    rows = tree.kept.shape[0]
    grouped: dict[str, Any] = {"enable_gqa": True} if FLASH_TAKES_GQA else {}
    q, k, v, weights = (torch.randn(rows, heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4))
    for window in (None, 16):
        try:
            found = _attended(partial(by_kernel, kernel, **grouped), q, k, v, weights, tree, window)
        except Exception as error:  # noqa: BLE001 (kernels refuse in ways of their own)
            return f"torch's varlen_attn does not take keys longer than queries: {type(error).__name__}: {error}"
        expected = _attended(by_unit, q.float(), k.float(), v.float(), weights, tree, window)
        for name, one, other in zip(("output", "gradient", "gradient", "gradient"), found, expected, strict=True):
            if not bool(one.isfinite().all()) or not near(one, other, KERNEL_TOLERANCE):
                kind = "" if window is None else " with a window"
                return f"the {name} of torch's varlen_attn{kind} is wrong where keys are longer than queries"
    return None


def _attended(
    compute: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    tree: PrefixTree,
    window: int | None,
) -> list[Tensor]:
    """What a way of attention answers, and the gradients of q, k and v."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = compute(*given, tree, q.shape[2] ** -0.5, window)
        return [out.detach(), *torch.autograd.grad((out.float() * weights.float()).sum(), given)]
