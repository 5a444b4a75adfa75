"""Attention over a row that is a prefix tree (`prefixes`): a token sees its ancestors and nothing else.

A unit's queries are the end of a sequence, and its keys are gathered from the row: those of the whole sequence.

    GPU, half precision   one call of torch's `varlen_attn`, which aligns the causal mask at the end of longer keys
    elsewhere             unit by unit, in blocks of queries with a mask; written out where no fused kernel exists

A key is gathered once for each unit below it. Its gradients are added up in fp32: in bf16 the sum of 256 terms is off
by 1.6 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from primerl.train.model.packed import BLOCK_QUERIES, by_rows, written_out
from primerl.train.model.prefixes import PrefixTree


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.runs, ctx.rows = runs, x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = given
        precise = torch.promote_types(gradient.dtype, torch.float32)
        summed = torch.zeros(ctx.rows, *gradient.shape[1:], dtype=precise, device=gradient.device)
        if gradient.is_cuda:
            summed.index_add_(0, ctx.saved_tensors[0], gradient.to(precise))
        else:
            # Whole runs at a time: on a CPU `index_add_` takes a call for each row.
            at = 0
            for begin, end in ctx.runs:
                summed[begin:end] += gradient[at : at + end - begin]
                at += end - begin
        return summed.to(gradient.dtype), None, None


def gathered(x: Tensor, tree: PrefixTree) -> Tensor:
    """Keys or values of the row, [N, H_kv, D], as those of each unit, one after another: [K, H_kv, D]."""
    found: Tensor = _Gathered.apply(x, tree.keys, tree.runs)  # type: ignore[no-untyped-call]
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # else each tree would be traced again
def by_kernel(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: PrefixTree,
    scale: float,
    window: int | None,
    **grouped: Any,
) -> Tensor:
    """Attention of the row's queries, [N, H, D], by `kernel`, torch's `varlen_attn`. k, v: [N, H_kv, D]."""
    rows = (tree.query_bounds, tree.key_bounds, tree.most_queries, tree.most_keys)
    return by_rows(kernel, q, gathered(k, tree), gathered(v, tree), rows, scale, window, **grouped)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # else every tree would be traced into a graph of its own
def by_unit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: PrefixTree,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same without a kernel for packed rows: [N, H, D], as wide as values. q: [N, H, D]; k: [N, H_kv, D]; v:
    [N, H_kv, D_v]; `softcap` and `sinks` as in `packed.written_out`."""
    queries = torch.split(q, [unit.end - unit.begin for unit in tree.units])
    sizes = [unit.last - unit.first for unit in tree.units]
    keys, values = (torch.split(gathered(x, tree), sizes) for x in (k, v))
    by_hand = softcap is not None or sinks is not None or (window is not None and q.is_cuda)
    outs = []
    for unit, own_q, own_k, own_v in zip(tree.units, queries, keys, values, strict=True):
        rows_q, rows_k, rows_v = (x.transpose(0, 1).unsqueeze(0) for x in (own_q, own_k, own_v))
        if by_hand:
            out = written_out(rows_q, rows_k, rows_v, scale, window, softcap, sinks, unit.offset)
        else:
            out = _fused(rows_q, rows_k, rows_v, unit.offset, scale, window)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def _fused(q: Tensor, k: Tensor, v: Tensor, offset: int, scale: float, window: int | None) -> Tensor:
    """[1, H, Q, D] over [1, H_kv, offset + Q, D] -> [1, H, Q, D]; a mask exists of one block of queries at a time."""
    grouped, length = q.shape[1] != k.shape[1], q.shape[2]
    if grouped and q.is_cuda:
        # The kernel of what flash attention does not take has no GQA.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if not offset and (window is None or window >= length):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    parts = []
    for start in range(0, length, BLOCK_QUERIES):
        end = min(start + BLOCK_QUERIES, length)
        first = 0 if window is None else max(0, offset + start - window + 1)
        last = offset + end
        at = torch.arange(offset + start, last, device=q.device).unsqueeze(1)
        distance = at - torch.arange(first, last, device=q.device)
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        block = (q[:, :, start:end], k[:, :, first:last], v[:, :, first:last])
        parts.append(scaled_dot_product_attention(*block, attn_mask=seen, scale=scale, enable_gqa=grouped))
    return torch.cat(parts, dim=2)
