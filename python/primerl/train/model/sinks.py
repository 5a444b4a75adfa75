"""Attention sinks (gpt-oss) by a flash kernel that knows nothing of them.

A sink s of a head is one more score in its softmax, of a key without a value. Of O and L = logsumexp of the scores,
which the kernel returns, follows what attention with the sink is:

    L' = logaddexp(L, s)         O' = O exp(L - L')

Backward, a flash kernel computes the shares again as P = exp(S - L) and needs delta = rowsum(dO * O). Given L' and O'
in their place, these are the shares and the delta of attention with the sink, so its dQ, dK and dV are exact; and

    ds = -sum over the queries of exp(s - L') delta

(Dao, "FlashAttention-2", 2023, section 3.1, for the kernel's backward pass.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 - registers the operators

from primerl.train.model.packed import PackedSequences

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries [T, H, D], keys and values [T, H_kv, D] -> attention [T, H, D] and logsumexp [H, T] fp32."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Gradient of the attention, queries, keys, values, attention, logsumexp -> gradients of queries, keys and values."""


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: tuple[Forward, Backward]) -> Tensor:
    """Attention [T, H, D]; `sinks` [H]."""
    out: Tensor = _WithSinks.apply(q, k, v, sinks, kernel)  # type: ignore[no-untyped-call]
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: tuple[Forward, Backward]) -> Tensor:
        out, lse = kernel[0](q, k, v)
        score = sinks.to(lse.dtype).unsqueeze(1)
        joined = torch.logaddexp(lse, score)
        share = (lse - joined).exp().transpose(0, 1).unsqueeze(-1)  # [T, H, 1]
        out = (out * share).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, joined)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, joined = ctx.saved_tensors
        grad = gradients[0].contiguous()
        dq, dk, dv = ctx.kernel[1](grad, q, k, v, out, joined)
        delta = (grad.to(joined.dtype) * out.to(joined.dtype)).sum(-1).transpose(0, 1)  # [H, T]
        shares = (sinks.to(joined.dtype).unsqueeze(1) - joined).exp()
        return dq, dk, dv, -(shares * delta).sum(1).to(sinks.dtype), None


def flash_kernel(packed: PackedSequences, scale: float, window: int | None) -> tuple[Forward, Backward]:
    """Torch's flash attention over the packed row (GPU, half precision), by the operators that `varlen_attn` is made
    of; keys and values may have fewer heads than queries."""
    row = (packed.boundaries, packed.boundaries, packed.longest, packed.longest)
    left = -1 if window is None else window - 1
    causal, span = window is None, [left, 0]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *row, causal, scale, span)
        return out, lse

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout of 0
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, lse, *row, causal, nothing, scale, span
        )
        return dq, dk, dv

    return forward, backward
