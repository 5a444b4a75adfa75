"""Truncated sampling: the engine's, the trainer's and verify's reading of it, against one in plain Python."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from primerl.inference.torch.sampling import Rows, sample
from primerl.train.data.batch import BatchError, decode_batch
from primerl.train.objective import logprobs as chunked
from primerl.train.objective.truncation import Truncation, replaying, truncate
from primerl.verify.reference import SLACK, truncated_logprobs
from train_helpers import Sequence, encode_batch

VOCABULARY = 50
SETTINGS = [
    (1.0, 0, 0.0),
    (0.9, 0, 0.0),
    (0.3, 0, 0.0),
    (0.001, 0, 0.0),
    (1.0, 1, 0.0),
    (1.0, 7, 0.0),
    (1.0, 1000, 0.0),
    (1.0, 0, 0.1),
    (1.0, 0, 1.0),
    (0.8, 5, 0.0),
    (0.6, 20, 0.05),
    (0.95, 0, 0.3),
    (1.0, 3, 0.01),
]


def kept(scaled: list[float], top_p: float, top_k: int, min_p: float) -> set[int]:
    """Token ids by vLLM's rules and in its order: min_p, then top_k, then top_p."""

    def softmax(ids: set[int]) -> dict[int, float]:
        highest = max(scaled[i] for i in ids)
        weights = {i: math.exp(scaled[i] - highest) for i in ids}
        return {i: weight / math.fsum(weights.values()) for i, weight in weights.items()}

    ids = set(range(len(scaled)))
    probabilities = softmax(ids)
    floor = min_p * max(probabilities.values())
    ids = {i for i in ids if probabilities[i] >= floor}
    if 0 < top_k < len(scaled):
        lowest = sorted(scaled, reverse=True)[top_k - 1]
        ids = {i for i in ids if scaled[i] >= lowest}
    probabilities = softmax(ids)
    chosen: set[int] = set()
    if top_p == 1:
        return ids
    # vLLM's words: ascending, a token goes when the sum up to it is at most 1 - p; the last one stays.
    total = 0.0
    for i in sorted(ids, key=lambda i: scaled[i]):
        total += probabilities[i]
        if total > 1 - top_p:
            chosen.add(i)
    return chosen or {max(ids, key=lambda i: scaled[i])}


def logprob(scaled: list[float], token: int, *setting: Any) -> float:
    ids = kept(scaled, *setting) | {token}
    highest = max(scaled[i] for i in ids)
    return scaled[token] - highest - math.log(math.fsum(math.exp(scaled[i] - highest) for i in ids))


def cases(seed: int) -> tuple[torch.Tensor, torch.Tensor, Truncation, torch.Tensor]:
    """Logits [N, V], temperatures, truncations and uniform numbers, four of each setting, in any order."""
    generator = torch.Generator().manual_seed(seed)
    settings = SETTINGS * 4
    random.Random(seed).shuffle(settings)
    count = len(settings)
    logits = 3 * torch.randn(count, VOCABULARY, generator=generator)
    temperatures = 0.4 + 1.5 * torch.rand(count, generator=generator)
    top_p, top_k, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    uniforms = torch.rand(count, dtype=torch.float64, generator=generator)
    return logits, temperatures, Truncation(top_p, top_k, min_p), uniforms


def sampled(
    logits: torch.Tensor, temperatures: torch.Tensor, truncation: Truncation, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the embedded engine samples, and its processed log-probabilities. It is never given a larger `top_k` than
    the vocabulary is."""
    top_k = truncation.top_k.clamp(max=VOCABULARY)
    token_ids, _, processed = sample(
        logits, Rows(uniforms, temperatures, truncation.top_p, top_k, truncation.min_p, None)
    )
    return token_ids, processed


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor, truncation: Truncation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's, a few tokens at a time, of a model whose hidden states are its logits."""
    head = chunked.OutputHead(torch.eye(logits.shape[1]))
    hook = None if truncation is None else replaying(token_ids, truncation)
    return chunked.token_logprobs(logits, head, token_ids, temperatures, hook=hook, chunk_tokens=7)


def setting_of(truncation: Truncation, row: int) -> tuple[float, int, float]:
    return float(truncation.top_p[row]), int(truncation.top_k[row]), float(truncation.min_p[row])


@pytest.mark.parametrize("seed", range(5))
def test_the_engine_keeps_what_vllms_rules_keep(seed: int) -> None:
    logits, temperatures, truncation, uniforms = cases(seed)
    token_ids, processed = sampled(logits, temperatures, truncation, uniforms)
    for row, scaled in enumerate((logits / temperatures.unsqueeze(1)).tolist()):
        setting = setting_of(truncation, row)
        found = set(processed[row].isfinite().nonzero().flatten().tolist())
        assert found == kept(scaled, *setting), setting
        token = int(token_ids[row])
        assert token in found
        assert float(processed[row, token]) == pytest.approx(logprob(scaled, token, *setting), abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_trainer_agrees_with_the_engine_and_with_the_rules(seed: int) -> None:
    logits, temperatures, truncation, uniforms = cases(seed)
    token_ids, processed = sampled(logits, temperatures, truncation, uniforms)
    logprobs, entropy = token_logprobs(logits, token_ids, temperatures, truncation)
    torch.testing.assert_close(logprobs, processed.gather(1, token_ids.unsqueeze(1)).squeeze(1), rtol=0, atol=1e-6)
    expected = [
        logprob(scaled, int(token), *setting_of(truncation, row))
        for row, (scaled, token) in enumerate(
            zip((logits / temperatures.unsqueeze(1)).tolist(), token_ids.tolist(), strict=True)
        )
    ]
    torch.testing.assert_close(logprobs, torch.tensor(expected), rtol=0, atol=1e-5)
    probabilities = processed.exp()
    torch.testing.assert_close(entropy, -(probabilities * processed).nan_to_num(0.0).sum(1), rtol=0, atol=1e-5)


def test_what_nothing_is_left_out_of_is_as_without_truncation() -> None:
    logits, temperatures, _, _ = cases(7)
    count = len(logits)
    token_ids = torch.arange(count) % VOCABULARY
    all_kept = Truncation(torch.ones(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count))
    # Beside one that leaves tokens out, so that no way around is taken.
    all_kept.top_p[0] = 0.5
    with_it, entropy_with = token_logprobs(logits, token_ids, temperatures, all_kept)
    without, entropy = token_logprobs(logits, token_ids, temperatures)
    assert torch.equal(with_it[1:], without[1:])
    assert torch.equal(entropy_with[1:], entropy[1:])


def test_a_token_that_left_the_set_is_kept_beside_the_others() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    truncation = Truncation(torch.tensor([1.0]), torch.tensor([2]), torch.tensor([0.0]))
    one = torch.ones(1)
    logprobs, _ = token_logprobs(logits, torch.tensor([3]), one, truncation)
    torch.testing.assert_close(logprobs, 0.0 - torch.tensor([[3.0, 2.0, 0.0]]).logsumexp(1))
    left = truncate(logits, torch.tensor([3]), truncation)
    assert left.isfinite().tolist() == [[True, True, False, True]]


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_kept_tokens_alone(seed: int) -> None:
    """d log p(y) / d z_j = [j = y] - p(j) where j is kept, 0 elsewhere; over the temperature for logits."""
    logits, temperatures, truncation, uniforms = cases(seed)
    # Some tokens the truncation would have left out.
    token_ids = (uniforms * VOCABULARY).long()
    logits.requires_grad_()
    weights = torch.linspace(-1, 1, len(logits))
    logprobs, _ = token_logprobs(logits, token_ids, temperatures, truncation)
    (logprobs * weights).sum().backward()
    assert logits.grad is not None
    outside = 0
    for row, scaled in enumerate((logits.detach() / temperatures.unsqueeze(1)).tolist()):
        token, setting = int(token_ids[row]), setting_of(truncation, row)
        outside += token not in kept(scaled, *setting)
        ids = sorted(kept(scaled, *setting) | {token})
        expected = torch.zeros(VOCABULARY)
        expected[ids] = -torch.tensor(scaled)[ids].softmax(0)
        expected[token] += 1
        expected *= weights[row] / temperatures[row]
        torch.testing.assert_close(logits.grad[row], expected, rtol=1e-4, atol=1e-6)
    assert outside > 5


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_of_verify_follows_the_rules(seed: int) -> None:
    logits, temperatures, truncation, uniforms = cases(seed)
    token_ids = (uniforms * VOCABULARY).long().tolist()
    for row, scaled in enumerate(logits.double() / temperatures.unsqueeze(1)):
        top_p, top_k, min_p = setting_of(truncation, row)
        nominal, *_ = truncated_logprobs(scaled, token_ids[row], top_p=top_p, top_k=top_k, min_p=min_p)
        expected = logprob(scaled.tolist(), token_ids[row], top_p, top_k, min_p)
        assert nominal == pytest.approx(expected, abs=1e-9)


def test_the_reference_knows_both_sides_of_an_edge() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)

    def sets(**setting: Any) -> list[float]:
        off: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return [math.exp(value) for value in truncated_logprobs(probabilities.log(), 0, **{**off, **setting})]

    near = 0.8 + SLACK / 2
    assert sets(top_p=near) == pytest.approx([0.5 / 0.95, 0.5 / 0.95, 0.5 / 0.8])
    assert sets(top_p=0.85) == pytest.approx([0.5 / 0.95] * 3)
    assert sets(min_p=0.3 * (1 + SLACK / 2)) == pytest.approx([0.5 / 0.8, 0.5 / 0.95, 0.5 / 0.8])
    assert sets(min_p=0.2) == pytest.approx([0.5 / 0.95] * 3)
    # The second place is certain, the edge of it is not: without it only what was sampled is left.
    assert sets(top_k=2) == pytest.approx([0.5 / 0.8, 0.5 / 0.8, 1.0])


def encoded(**runs: Any) -> bytes:
    sequences = [Sequence(prompt=[1, 2], sampled=[3, 4], logprobs=[-1.0, -2.0])] * 2
    return encode_batch(1, [sequences, sequences], truncations={0: [runs]})


def test_runs_in_the_header_become_columns() -> None:
    first, second = decode_batch(encoded(begin=2, end=4, top_p=0.9, top_k=5, min_p=0.25)).micro_batches
    assert second.truncation is None
    assert first.truncation is not None
    assert first.truncation.top_k.tolist() == [0, 0, 5, 5, 0, 0, 0, 0]
    assert first.truncation.min_p.tolist() == [0, 0, 0.25, 0.25, 0, 0, 0, 0]
    torch.testing.assert_close(first.truncation.top_p, torch.tensor([1, 1, 0.9, 0.9, 1, 1, 1, 1]))


@pytest.mark.parametrize("bad", [{"end": 9}, {"begin": 4}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.5}])
def test_runs_that_cannot_be_are_named(bad: dict[str, Any]) -> None:
    good: dict[str, Any] = {"begin": 2, "end": 4, "top_p": 0.9, "top_k": 5, "min_p": 0.25}
    with pytest.raises(BatchError, match="truncations: "):
        decode_batch(encoded(**{**good, **bad}))
