"""On-policy distillation by the trainer, against one sequence and one token at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_helpers import load_shards
from safetensors.torch import load_file
from settings_helpers import run_trainer
from train_helpers import OrchestratorDouble, Sequence, encode_batch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("own_logging")

TOP_K, MAX_RATIO, LR = 5, 2.0, 1.0


def samples(temperature: float) -> list[Sequence]:
    """Random tokens; probabilities of an engine that has sharpened its own, and of a teacher that has not."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    def between(low: float, high: float, count: int) -> list[float]:
        return (low + (high - low) * torch.rand(count, generator=generator)).tolist()

    found = []
    for index, count in enumerate((7, 3, 9)):
        prompt = tokens(4)
        engine, teacher = between(-8.0, -4.0, count), [0.0] * 4 + between(-9.0, -2.0, count)
        sample = Sequence(prompt, tokens(count), engine, advantage=1.0 - index, temperature=temperature)
        sample.environment, sample.extra = int(index == 2), {"teacher_logprobs": teacher}
        found.append(sample)
    return found


def trained(folder: Path, output: Path, temperature: float, *, truncated: bool, rl_weight: float) -> dict[str, Any]:
    """One step of plain gradient descent: its line of metrics. What was sampled is one micro-batch."""
    own = samples(temperature)
    run = {"begin": 0, "end": sum(map(len, own)), "top_p": 1.0, "top_k": TOP_K, "min_p": 0.0}
    body = encode_batch(1, [own], truncations={0: [run]} if truncated else None)
    loss = {"type": "importance", "args": {"max_ratio": 0.0}, "rl_weight": rl_weight, "ref_kl_weight": 1.0}
    with OrchestratorDouble(lambda step, rank: (200, body)) as double:
        values = {
            "output_dir": str(output),
            "orchestrator_url": double.url,
            "max_steps": 1,
            "threads": 1,
            "environments": ["one", "other"],
            "model": {"path": str(folder)},
            "optim": {"type": "sgd", "args": {"momentum": 0.0}, "lr": LR, "max_norm": 1e9},
            "loss": {**loss, "ref_kl_max_ratio": MAX_RATIO},
        }
        assert run_trainer(values) == 0
    (line,) = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return dict(line)


def reference(folder: Path, temperature: float, *, truncated: bool, rl_weight: float) -> tuple[Any, dict[str, float]]:
    """The model with the gradient of its parameters, and metrics."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    own = samples(temperature)
    count = sum(len(sample.sampled) for sample in own)
    distances: dict[str, list[float]] = {"one": [], "other": []}
    total = mismatch = 0.0
    for sample in own:
        token_ids = torch.tensor([sample.prompt + sample.sampled])
        logits = model(input_ids=token_ids).logits[0]
        for index, (token, engine) in enumerate(zip(sample.sampled, sample.logprobs, strict=True)):
            place = len(sample.prompt) + index
            row = logits[place - 1]
            # The policy itself, which is to be the teacher, and what it is sampled from.
            plain, scaled = row.log_softmax(0)[token], row / temperature
            if truncated:
                kept = set(scaled.topk(TOP_K).indices.tolist()) | {token}
                scaled = torch.stack([scaled[token], *(scaled[other] for other in kept - {token})])
                sampled_from = scaled.log_softmax(0)[0]
            else:
                sampled_from = scaled.log_softmax(0)[token]
            distance = plain - sample.extra["teacher_logprobs"][place]
            weight = min((plain - engine).exp().item(), MAX_RATIO)
            loss = weight * distance**2 / 2
            loss = loss - rl_weight * (sampled_from - engine).exp().item() * sample.advantage * sampled_from
            (loss / count).backward(retain_graph=True)
            total += loss.item() / count
            distances["other" if sample.environment else "one"].append(distance.item())
            ratio = (sampled_from - engine).item()
            mismatch += (torch.tensor(ratio).expm1().item() - ratio) / count
    metrics = {f"ref_kl/{name}/mean": sum(values) / len(values) for name, values in distances.items()}
    metrics["ref_kl/all/mean"] = sum(map(sum, distances.values())) / count
    return model, {**metrics, "loss/mean": total, "mismatch_kl/all/mean": mismatch}


@pytest.mark.parametrize("rl_weight", [0.0, 0.5])
@pytest.mark.parametrize(("temperature", "truncated"), [(1.0, False), (0.5, False), (0.5, True), (1.0, True)])
def test_the_policy_itself_is_drawn_to_the_teacher(
    folder: Path, tmp_path: Path, temperature: float, truncated: bool, rl_weight: float
) -> None:
    """And not what it is sampled from, at another temperature or truncated: loss, gradient and distance."""
    line = trained(folder, tmp_path, temperature, truncated=truncated, rl_weight=rl_weight)
    model, expected = reference(folder, temperature, truncated=truncated, rl_weight=rl_weight)
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    before, after = load_file(folder / "model.safetensors"), load_shards(tmp_path / "broadcasts" / "step_1")
    largest = 0.0
    for name, parameter in model.named_parameters():
        if name not in after:
            continue  # tied
        moved = (before[name] - after[name]) / LR
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=2e-6)
        largest = max(largest, moved.abs().max().item())
    assert largest > 1e-2


def test_only_where_they_differ_it_is_computed_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from primerl.train.distributed import fsdp

    calls: list[int] = []
    compute = fsdp.token_logprobs

    def counted(hidden: torch.Tensor, *given: Any, **named: Any) -> Any:
        calls.append(hidden.shape[0])
        return compute(hidden, *given, **named)

    monkeypatch.setattr(fsdp, "token_logprobs", counted)
    for temperature, times in ((1.0, 1), (0.5, 2)):
        calls.clear()
        trained(folder, tmp_path / str(times), temperature, truncated=False, rl_weight=0.0)
        # Also of the probe, a few tokens of each policy that is published.
        assert calls.count(sum(len(sample.sampled) for sample in samples(1.0))) == times
