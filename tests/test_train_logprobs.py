"""Log-probabilities in chunks against the whole table of logits, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from primerl.train.objective.logprobs import LowRank, OutputHead, token_logprobs
from torch import Tensor

TOKENS, HIDDEN, VOCABULARY = 23, 16, 57
LOW_RANK_SCALE = 1.5


def inputs(dtype: torch.dtype, *, bias: bool = False, rank: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=generator),
        "weight": 0.5 * torch.randn(VOCABULARY, HIDDEN, generator=generator),
    }
    if bias:
        made["bias"] = torch.randn(VOCABULARY, generator=generator)
    if rank:
        made["a"] = 0.5 * torch.randn(rank, HIDDEN, generator=generator)
        made["b"] = 0.5 * torch.randn(VOCABULARY, rank, generator=generator)
    return {
        **{name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()},
        "token_ids": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        "temperatures": 0.5 + torch.rand(TOKENS, generator=generator),
        "by_logprob": torch.randn(TOKENS, generator=generator),
        "by_entropy": torch.randn(TOKENS, generator=generator),
    }


def plain(given: dict[str, Any], scale: float, softcap: float | None, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    logits = torch.nn.functional.linear(given["hidden"], given["weight"], given.get("bias"))
    if "a" in given:
        logits = logits + LOW_RANK_SCALE * given["hidden"] @ given["a"].T @ given["b"].T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / given["temperatures"].unsqueeze(1)
    if kept is not None:
        logits = logits.masked_fill(~kept, -1e30)
    log_shares = logits.log_softmax(-1)
    logprobs = log_shares.gather(1, given["token_ids"].unsqueeze(1)).squeeze(1)
    return logprobs, -(log_shares.exp() * log_shares).sum(-1)


def compare(given: dict[str, Any], tolerance: float, with_entropy: bool, **head: Any) -> None:
    kept = head.pop("kept", None)

    def hook(logits: Tensor, rows: slice) -> Tensor:
        assert logits.dtype in (torch.float32, torch.float64)
        assert logits.shape == (rows.stop - rows.start, VOCABULARY)
        return logits.masked_fill(~kept[rows], -torch.inf)

    leaves = [given[name] for name in ("hidden", "weight", "bias", "a", "b") if name in given]
    adapter = LowRank(given["a"], given["b"], LOW_RANK_SCALE) if "a" in given else None
    results = []
    for chunk_tokens in (None, 1, 5, TOKENS):
        if chunk_tokens is None:
            logprobs, entropy = plain(given, head.get("scale", 1.0), head.get("softcap"), kept)
        else:
            made = OutputHead(given["weight"], given.get("bias"), adapter=adapter, **head)
            logprobs, entropy = token_logprobs(
                given["hidden"],
                made,
                given["token_ids"],
                given["temperatures"],
                hook=None if kept is None else hook,
                entropy=with_entropy,
                chunk_tokens=chunk_tokens,
            )
        target = (logprobs * given["by_logprob"]).sum()
        if with_entropy:
            target = target + (entropy * given["by_entropy"]).sum()
        elif chunk_tokens is not None:
            assert entropy.shape == (0,)
            assert not entropy.requires_grad
        gradients = torch.autograd.grad(target, leaves)
        results.append([logprobs.detach(), *([entropy.detach()] if with_entropy else []), *gradients])
    for result in results[1:]:
        for ours, expected in zip(result, results[0], strict=True):
            assert ours.dtype == expected.dtype
            scale = max(1.0, expected.abs().max().item())
            assert (ours - expected).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    "head",
    [{}, {"scale": 0.125}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 5.0}],
    ids=["plain", "scale", "softcap", "both"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_the_whole(bias: bool, head: dict[str, Any], with_entropy: bool) -> None:
    compare(inputs(torch.float64, bias=bias), 1e-12, with_entropy, **head)
    compare(inputs(torch.float32, bias=bias), 1e-5, with_entropy, **head)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_an_adapter_of_the_output_layer_is_differentiated(with_entropy: bool) -> None:
    compare(inputs(torch.float64, bias=True, rank=3), 1e-12, with_entropy, scale=3.0, softcap=5.0)
    compare(inputs(torch.float32, rank=3), 1e-5, with_entropy)


def test_chunks_equal_the_whole_in_bfloat16() -> None:
    """Logits come out of a product in bf16 in both; gradients differ by the rounding of partial sums."""
    compare(inputs(torch.bfloat16), 2e-2, with_entropy=True)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_hook_leaves_tokens_out(with_entropy: bool) -> None:
    given = inputs(torch.float64, bias=True)
    kept = torch.rand(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.3
    kept.scatter_(1, given["token_ids"].unsqueeze(1), True)
    compare(given, 1e-12, with_entropy, kept=kept)


def test_only_the_entropy_is_wanted() -> None:
    given = inputs(torch.float64)
    _, entropy = token_logprobs(
        given["hidden"], OutputHead(given["weight"]), given["token_ids"], given["temperatures"], chunk_tokens=4
    )
    _, expected = plain(given, 1.0, None, None)
    for ours, theirs in zip(
        torch.autograd.grad(entropy.sum(), [given["hidden"], given["weight"]]),
        torch.autograd.grad(expected.sum(), [given["hidden"], given["weight"]]),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_frozen_weights_and_no_tokens() -> None:
    given = inputs(torch.float32)
    logprobs, _ = token_logprobs(given["hidden"], OutputHead(given["weight"].detach()), given["token_ids"])
    logprobs.sum().backward()
    assert given["hidden"].grad is not None
    none, entropy = token_logprobs(given["hidden"][:0], OutputHead(given["weight"]), given["token_ids"][:0])
    (none.sum() + entropy.sum()).backward()
    assert none.shape == entropy.shape == (0,)
    assert given["weight"].grad.abs().max() == 0


def test_tied_weights_get_both_gradients() -> None:
    given = inputs(torch.float64)
    embedding, ids = given["weight"], given["token_ids"]
    ours = token_logprobs(embedding[ids].tanh(), OutputHead(embedding), ids.flip(0), chunk_tokens=6)[0].sum()
    theirs = (embedding[ids].tanh() @ embedding.T).log_softmax(-1).gather(1, ids.flip(0).unsqueeze(1)).sum()
    (one,), (other,) = torch.autograd.grad(ours, [embedding]), torch.autograd.grad(theirs, [embedding])
    assert torch.allclose(one, other, atol=1e-12)
