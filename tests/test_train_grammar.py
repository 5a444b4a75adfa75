"""Structured outputs: what an engine samples by a grammar, and the trainer's replay of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from primerl._core import GrammarMasks
from primerl.inference.torch.sampling import Rows, leave_out, sample
from primerl.train.data.batch import BatchError, decode_batch
from primerl.train.objective import logprobs as chunked
from primerl.train.objective.bitmasks import unpacked
from primerl.train.objective.grammar import Allowed, Replay, leaving_out
from primerl.train.objective.truncation import Truncation, replaying
from train_helpers import Sequence, encode_batch

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def masks(model: Path, vocabulary: int) -> GrammarMasks:
    return GrammarMasks(model, vocabulary)


@pytest.fixture(scope="module")
def end(model: Path) -> int:
    found = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    return int(found[0] if isinstance(found, list) else found)


def spec_of(end: int, schema: dict[str, Any] | None = None) -> str:
    return json.dumps({"structured_outputs": {"json": schema or SCHEMA}, "ends": [end]})


def answer(masks: GrammarMasks, spec: str, end: int, vocabulary: int, seed: int, **setting: Any) -> dict[str, Any]:
    """Tokens that torch samples among the allowed ones, at temperature `t` with `top_k`; with their logits."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    logprobs: list[float] = []
    logits: list[torch.Tensor] = []
    while not tokens or tokens[-1] != end:
        row = 2 * torch.randn(1, vocabulary, generator=generator)
        bits = torch.frombuffer(bytearray(masks.after(spec, tokens)), dtype=torch.uint8)
        found = unpacked(bits.unsqueeze(0), vocabulary)
        rows = Rows(
            uniforms=torch.rand(1, dtype=torch.float64, generator=generator),
            temperatures=torch.tensor([setting.get("temperature", 1.0)]),
            top_p=None,
            top_k=torch.tensor([setting.get("top_k", 0)]),
            min_p=None,
            banned=None,
        )
        left = leave_out(row, torch.tensor([0]), found)
        token, _, processed = sample(left, rows)
        tokens.append(int(token))
        logprobs.append(float(processed[0, token]))
        logits.append(row)
    return {"tokens": tokens, "logprobs": torch.tensor(logprobs), "logits": torch.cat(logits)}


def batch_of(found: dict[str, Any], spec: str, masks: GrammarMasks, identity: str | None = None) -> bytes:
    tokens = found["tokens"]
    own = Sequence(prompt=[1, 2], sampled=tokens, logprobs=found["logprobs"].tolist())
    run = [2, 2 + len(tokens), 0]
    header = {"kinds": [{"masks": identity or masks.identity, "spec": spec}], "runs": [run]}
    return encode_batch(1, [[own]], grammars={0: header})


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 3), (0.5, 2)])
def test_recorded_answers_are_replayed_exactly(
    model: Path, masks: GrammarMasks, end: int, vocabulary: int, temperature: float, top_k: int
) -> None:
    spec = spec_of(end)
    for seed in range(3):
        found = answer(masks, spec, end, vocabulary, seed, temperature=temperature, top_k=top_k)
        micro_batch = decode_batch(batch_of(found, spec, masks)).micro_batches[0]
        allowed = Replay(model).allowed(micro_batch)
        assert allowed is not None
        targets = micro_batch.trained()
        tokens = torch.tensor(found["tokens"])
        then = None
        if top_k:
            count = len(tokens)
            then = replaying(tokens, Truncation(torch.ones(count), torch.full((count,), top_k), torch.zeros(count)))
        # As hidden states, with a head that leaves them as they are.
        head = chunked.OutputHead(torch.eye(vocabulary))
        logprobs, _ = chunked.token_logprobs(
            found["logits"].clone().requires_grad_(),
            head,
            tokens,
            torch.full((len(tokens),), temperature),
            hook=leaving_out(allowed[targets], then),
            chunk_tokens=5,
        )
        assert (logprobs.detach() - found["logprobs"]).abs().max() < 1e-5
        # Of the same by torch alone.
        scaled = (found["logits"] / temperature).masked_fill(~allowed[targets].masks(vocabulary), -torch.inf)
        if not top_k:
            plain = scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            assert (plain - found["logprobs"]).abs().max() < 1e-5
        logprobs.sum().backward()


def test_context_is_not_masked_and_the_bits_are_the_sets() -> None:
    bits = torch.tensor([[255, 255], [0b0000_0101, 0b1]], dtype=torch.uint8)
    allowed = Allowed(bits, torch.tensor([0, 1, 1, 0]))
    masks = allowed.masks(12)
    assert masks[0].all()
    assert masks[3].all()
    assert masks[1].nonzero().squeeze(1).tolist() == masks[2].nonzero().squeeze(1).tolist() == [0, 2, 8]
    wider = allowed.masks(20)
    assert wider[0].all()
    assert wider[1].nonzero().squeeze(1).tolist() == [0, 2, 8]


def test_what_was_not_sampled_so_is_refused(model: Path, masks: GrammarMasks, end: int, vocabulary: int) -> None:
    spec = spec_of(end)
    found = answer(masks, spec, end, vocabulary, 5)
    wrong = {**found, "tokens": [found["tokens"][-1], *found["tokens"][1:]]}
    with pytest.raises(BatchError, match=r"rollout 0: .*token 0 of the answer.*not allowed"):
        Replay(model).allowed(decode_batch(batch_of(wrong, spec, masks)).micro_batches[0])
    other = decode_batch(batch_of(found, spec, masks, "llguidance-0.1/0000")).micro_batches[0]
    with pytest.raises(BatchError, match=r"llguidance-0\.1/0000.*one version of primerl"):
        Replay(model).allowed(other)


def test_another_models_tokenizer_is_named(tmp_path: Path, masks: GrammarMasks, end: int, vocabulary: int) -> None:
    spec = spec_of(end)
    found = answer(masks, spec, end, vocabulary, random.Random(3).randrange(100))
    micro_batch = decode_batch(batch_of(found, spec, masks)).micro_batches[0]
    with pytest.raises(BatchError, match="replayed with the tokenizer in"):
        Replay(tmp_path).allowed(micro_batch)
