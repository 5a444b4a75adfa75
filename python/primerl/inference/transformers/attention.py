"""Attention of new tokens over the contexts of their sequences, for `transformers`' attention interface.

C sequences of Q tokens attend to L keys and values, padded at the right: `cache.Rows` knows where each one's new tokens
begin. Axes: H heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from primerl.inference.transformers.cache import Rows
from primerl.train.model.architectures import note_of, query_scale
from primerl.train.model.packed import ModelError

ATTENTION = "primerl_cached"
"""Name of the attention below in `transformers`' registry."""

_ROWS: ContextVar[Rows | None] = ContextVar("rows", default=None)
"""What the forward pass of this thread computes. Not every architecture hands its keyword arguments on to attention."""


@contextmanager
def computing(rows: Rows) -> Iterator[None]:
    """Around a forward pass of these sequences."""
    before = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(before)


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,  # [C, H, Q, D]
    key: Tensor,  # [C, K, L, D]
    value: Tensor,  # [C, K, L, D]
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; returns [C, Q, H, D], as `transformers` expects it."""
    rows = _ROWS.get()
    if rows is None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} uses a kind of attention that this engine does not support")
    note = note_of(module)
    if note is not None and note.scale is not None:
        # As in training: positions are those within the sequence.
        query = (query * query_scale(note, rows.positions)[:, None, :, None]).to(query.dtype)
    mask = rows.mask(key.shape[2], sliding_window, None if note is None else note.chunk)
    if softcap is not None or s_aux is not None:
        out = _written_out(query, key, value, mask, scaling, softcap, s_aux)
    else:
        grouped = query.shape[1] != key.shape[1]
        how: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": grouped}
        out = scaled_dot_product_attention(query, key, value, **how)
    return out.transpose(1, 2), None


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[C, H, Q, D]. Scores s become softcap * tanh(s / softcap); `sinks` [H] is one more score in each head's softmax,
    of a key without a value. Scores and shares in fp32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return shares.to(value.dtype) @ value
