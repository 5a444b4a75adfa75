"""Attention written out, for what fused kernels do not know: capped scores (Gemma 2) and sinks (GPT-OSS).

A few queries at a time, with only the keys they can see, computed again in the backward pass: the scores of a whole
sequence never exist.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERIES = 512
"""Of a block."""


def written_out(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention, scores and shares in fp32.

    Args:
        q: [S, H, L, D].
        k, v: [S, H_kv, L, D].
        window: keys a query sees, its own included; all before it when None.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [H], one more score in each head's softmax, of a key without a value.
    """
    heads, length = q.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    parts = []
    for start in range(0, length, QUERIES):
        end = min(start + QUERIES, length)
        first = 0 if window is None else max(0, start - window + 1)
        given = (
            q[:, :, start:end],
            k[:, :, first:end],
            v[:, :, first:end],
            sinks,
            start - first,
            scale,
            window,
            softcap,
        )
        if length > QUERIES and torch.is_grad_enabled():
            parts.append(checkpoint(_block, *given, use_reentrant=False))
        else:
            parts.append(_block(*given))
    return torch.cat(parts, dim=2)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    offset: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The query i is at the key `offset` + i."""
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + offset
    distance = at - torch.arange(k.shape[2], device=q.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return shares.to(v.dtype) @ v
