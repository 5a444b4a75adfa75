"""From logits to sampled tokens. S rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """How each row is to be sampled. `None` stands for a setting no row uses."""

    uniforms: Tensor  # [S], float64 in (0, 1)
    temperatures: Tensor | None  # [S], 0 is greedy; None: all 1
    top_p: Tensor | None
    top_k: Tensor | None  # [S], int64, 0 is off
    min_p: Tensor | None
    banned: tuple[Tensor, Tensor] | None  # rows and token ids that must not be sampled


@dataclass(frozen=True)
class Scores:
    logprobs: Tensor  # [S]
    ranks: Tensor  # [S], 1 is the most likely
    top_ids: Tensor | None  # [S, k]
    top_logprobs: Tensor | None


def leave_out(logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
    """The logits [S, V], -inf where `allowed` [C, V] is false, which belongs to `rows` [C]. All that follows, raw
    log-probabilities included, is of what is left, as in vLLM."""
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))


def sample(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [S], raw log-probabilities [S, V], and processed ones: after bans, temperature and truncation."""
    raw = logits.log_softmax(-1)
    processed = _process(logits, raw, rows)
    cumulative = processed.exp().cumsum(-1, dtype=torch.float64)
    # A token of probability 0 is never met: its cumulative sum is that of the token before it.
    thresholds = (rows.uniforms * cumulative[:, -1]).unsqueeze(1)
    token_ids = torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).clamp_max_(logits.shape[-1] - 1)
    if cumulative.device.type != "cpu":
        # There it can be, rarely: parallel sums round differently.
        never = processed.gather(1, token_ids.unsqueeze(1)).squeeze(1).isneginf()
        token_ids = torch.where(never, processed.argmax(-1), token_ids)
    if rows.temperatures is not None:
        token_ids = torch.where(rows.temperatures == 0, processed.argmax(-1), token_ids)
    return token_ids, raw, processed


def _process(logits: Tensor, raw: Tensor, rows: Rows) -> Tensor:
    """Order as in vLLM: bans, temperature, min_p, top_k, top_p."""
    if rows.banned is None and rows.temperatures is None and _untruncated(rows):
        return raw
    if rows.banned is not None:
        logits = logits.index_put(rows.banned, logits.new_full((), -torch.inf))
    if rows.temperatures is not None:
        logits = logits / torch.where(rows.temperatures == 0, 1.0, rows.temperatures).unsqueeze(1)
    if rows.min_p is not None:
        floor = logits.amax(-1, keepdim=True) + rows.min_p.log().unsqueeze(1)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if rows.top_k is not None or rows.top_p is not None:
        logits = _truncate(logits, rows)
    return logits.log_softmax(-1)


def _untruncated(rows: Rows) -> bool:
    return rows.min_p is None and rows.top_k is None and rows.top_p is None


def _truncate(logits: Tensor, rows: Rows) -> Tensor:
    ordered, order = logits.sort(-1, descending=True)
    if rows.top_k is not None:
        last = torch.where(rows.top_k == 0, logits.shape[-1], rows.top_k) - 1
        floor = ordered.gather(1, last.unsqueeze(1))
        ordered = ordered.masked_fill(ordered < floor, -torch.inf)
    if rows.top_p is not None:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # The most likely token always stays.
        cut = before >= rows.top_p.unsqueeze(1)
        cut[:, 0] = False
        ordered = ordered.masked_fill(cut & (rows.top_p < 1).unsqueeze(1), -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def score(logprobs: Tensor, token_ids: Tensor, top: int) -> Scores:
    """Log-probability and rank of `token_ids` [S] under `logprobs` [S, V], and the `top` most likely tokens."""
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs >= own).sum(-1)
    if top == 0:
        return Scores(own.squeeze(1), ranks, None, None)
    top_logprobs, top_ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return Scores(own.squeeze(1), ranks, top_ids, top_logprobs)
