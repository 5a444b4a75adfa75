"""Log-probabilities and entropies of tokens from hidden states, a few tokens at a time.

With 16k tokens and a vocabulary of 152k, logits are 10 GB in fp32, and so is their gradient. Here neither exists:
logits are computed for a chunk of tokens, reduced to one number a token, dropped, and computed again in the backward
pass, where the chunk's share of the gradients of hidden states and output weights is added up at once.

Axes: N tokens, H hidden size, V vocabulary, n tokens of a chunk.

With raw logits r = scale * (W h + b), capped logits x = cap * tanh(r / cap) where the model caps them (x = r else),
and z = x / temperature, for the token a of each row:

    logprob = z_a - logsumexp(z)              d logprob / dz = onehot(a) - p
    entropy = -sum(p * log p)                 d entropy / dz = -p * (log p + entropy)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**26
"""Logits of a chunk: 256 MiB in fp32. About three times as much is allocated at once."""

LOWEST = -1e30
"""Replaces minus infinity, whose product with the probability 0 would be NaN."""

LogitsHook = Callable[[Tensor, slice], Tensor]
"""`(logits [n, V], rows) -> logits`: removes tokens from the distribution by setting their logits to minus infinity.

The logits are fp32 and already divided by the temperatures; `rows` are the chunk's rows among the N. They may be
changed in place. A hook is called in the forward and again in the backward pass and has to answer the same; it may
change no value but to minus infinity, for the gradient of what it leaves is taken to be its own.
"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter of the output layer, of rank R, which adds `scale * B A h` to `W h`. Differentiable by A and B."""

    a: Tensor  # [R, H]
    b: Tensor  # [V, R]
    scale: float

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`scale * A h`, [n, R], in the dtype of the states, and B: what is added is the first times B transposed."""
        return self.scale * torch.nn.functional.linear(hidden, self.a.to(hidden.dtype)), self.b


@dataclass(frozen=True, slots=True)
class OutputHead:
    """What a model makes of its last hidden states: `softcap * tanh(scale * (W h + b) / softcap)`."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    adapter: LowRank | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V], in fp32 (fp64 stays as it is)."""
        return self.logits_with(hidden, None if self.adapter is None else self.adapter.factors(hidden))

    def logits_with(self, hidden: Tensor, factors: tuple[Tensor, Tensor] | None) -> Tensor:
        """`factors`: of what an adapter adds, [n, R] and [V, R]."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if factors is not None:
            narrow, b = factors
            logits = logits + torch.nn.functional.linear(narrow, b.to(narrow.dtype))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    token_ids: Tensor,
    temperatures: Tensor | None = None,
    *,
    hook: LogitsHook | None = None,
    entropy: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, in nats; both [N] fp32 and differentiable.

    Args:
        hidden: [N, H], the state each token is predicted from.
        token_ids: [N] int64.
        temperatures: [N], above 0; the engine sampled from softmax(logits / temperature). 1 if omitted.
        entropy: whether entropies are wanted, which take about a seventh of the time; [0] where they are not.
        chunk_tokens: tokens of a chunk, instead of what `CHUNK_ELEMENTS` allows.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_ELEMENTS // head.weight.shape[0])
    plan = _Plan(head.scale, head.softcap, hook, chunk_tokens, entropy)
    # Few numbers a token, so that torch differentiates A; the Function does B, whose product has a row a word.
    narrow, b = (None, None) if head.adapter is None else head.adapter.factors(hidden)
    given = (hidden, head.weight, head.bias, narrow, b, token_ids, temperatures, plan)
    return _TokenLogprobs.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Plan:
    scale: float
    softcap: float | None
    hook: LogitsHook | None
    chunk_tokens: int
    entropy: bool

    def chunks(self, tokens: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, tokens)) for start in range(0, tokens, self.chunk_tokens)]

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        narrow: Tensor | None,
        b: Tensor | None,
        temperatures: Tensor | None,
        rows: slice,
    ) -> tuple[Tensor, Tensor | None]:
        """z of the chunk, [n, V], and the derivative of the cap, if there is one."""
        adds = None if narrow is None or b is None else (narrow[rows], b)
        head = OutputHead(weight, bias, self.scale, self.softcap)
        logits, slope = head.logits_with(hidden[rows], adds), None
        if self.softcap is not None:
            slope = (logits / self.softcap).square_().neg_().add_(1.0)
        if temperatures is not None:
            logits = logits.div_(temperatures[rows].unsqueeze(1))
        if self.hook is not None:
            logits = self.hook(logits, rows).clamp_(min=LOWEST)
        return logits, slope


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        narrow: Tensor | None,
        b: Tensor | None,
        token_ids: Tensor,
        temperatures: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normalizers = (torch.empty(token_ids.shape, dtype=dtype, device=hidden.device) for _ in range(2))
        entropies = torch.empty(token_ids.shape if plan.entropy else 0, dtype=dtype, device=hidden.device)
        for rows in plan.chunks(token_ids.shape[0]):
            logits, _ = plan.logits(hidden, weight, bias, narrow, b, temperatures, rows)
            normalizer = torch.logsumexp(logits, dim=1)
            normalizers[rows] = normalizer
            logprobs[rows] = logits.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1) - normalizer
            if plan.entropy:
                log_shares = logits.sub_(normalizer.unsqueeze(1))
                entropies[rows] = -log_shares.exp().mul_(log_shares).sum(dim=1)
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, narrow, b, token_ids, temperatures, normalizers, entropies)
        ctx.set_materialize_grads(False)
        if not plan.entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, bias, narrow, b, token_ids, temperatures, normalizers, entropies = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dtype = normalizers.dtype
        for_hidden = torch.empty_like(hidden) if wanted[0] else None
        for_narrow = torch.empty_like(narrow) if wanted[3] else None
        # Summed over the chunks in fp32, whatever dtype the weights have.
        for_weight, for_bias, for_b = (
            torch.zeros(one.shape, dtype=dtype, device=one.device) if wanted[place] else None
            for place, one in ((1, weight), (2, bias), (4, b))
        )
        for rows in ctx.plan.chunks(token_ids.shape[0]):
            logits, slope = ctx.plan.logits(hidden, weight, bias, narrow, b, temperatures, rows)
            gradient = _logits_gradient(
                logits.sub_(normalizers[rows].unsqueeze(1)),
                token_ids[rows].unsqueeze(1),
                entropies[rows].unsqueeze(1),
                None if by_logprob is None else by_logprob[rows].unsqueeze(1),
                None if by_entropy is None else by_entropy[rows].unsqueeze(1),
            )
            # Each of these passes over the chunk takes time, also where it changes nothing.
            if temperatures is not None:
                gradient.div_(temperatures[rows].unsqueeze(1))
            if ctx.plan.scale != 1.0:
                gradient.mul_(ctx.plan.scale)
            if slope is not None:
                gradient.mul_(slope)
            if for_bias is not None:
                for_bias += gradient.sum(dim=0)
            gradient = gradient.to(weight.dtype)
            if for_hidden is not None:
                for_hidden[rows] = gradient @ weight
            if for_narrow is not None:
                for_narrow[rows] = gradient @ b.to(gradient.dtype)
            if for_weight is not None:
                _add_product(for_weight, gradient, hidden[rows])
            if for_b is not None:
                _add_product(for_b, gradient, narrow[rows])
        totals = ((for_weight, weight), (for_bias, bias), (for_narrow, narrow), (for_b, b))
        return (
            for_hidden,
            *(None if total is None else total.to(one.dtype) for total, one in totals),
            None,
            None,
            None,
        )


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Adds `gradient^T rows`, [V, n] [n, H], to a total that may be in fp32."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, rows)
    else:
        total += gradient.T @ rows


def _logits_gradient(
    log_shares: Tensor, token_ids: Tensor, entropy: Tensor, by_logprob: Tensor | None, by_entropy: Tensor | None
) -> Tensor:
    """Gradient with respect to z, [n, V], from those with respect to log-probability and entropy, [n, 1].

    `log_shares`, log p, is used up.
    """
    shares = log_shares.exp()
    if by_entropy is None:
        factor: Tensor | None = None
    else:
        factor = log_shares.add_(entropy).mul_(-by_entropy)
    if by_logprob is None:
        return shares.zero_() if factor is None else shares.mul_(factor)
    gradient = shares.mul_(-by_logprob if factor is None else factor.sub_(by_logprob))
    return gradient.scatter_add_(1, token_ids, by_logprob.to(gradient.dtype))
