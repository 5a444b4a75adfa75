"""Shared prefixes in training: a step of the policy trainer and of supervised fine-tuning, with and without trees."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import primerl.train.loop.batches
import pytest
import torch
from primerl.train.data.batch import Batch, decode_batch
from primerl.train.data.experts import RoutedExperts
from primerl.train.data.packing import micro_batch
from primerl.train.data.rows import Row
from primerl.train.data.trees import packed_groups, packed_trees
from primerl.train.loop.policy_trainer import Trainer
from primerl.train.model.flops import ModelShape
from primerl.train.model.packed_model import load_model
from primerl.train.model.prefixes import shared_with_previous, unique_tokens
from primerl.train.objective.cross_entropy import row_losses, summed_loss
from rank_helpers import Case, load_shards, run_cases
from settings_helpers import run_sft, run_trainer
from sft_helpers import metrics, settings, write_rows
from train_helpers import Answer, OrchestratorDouble, Sequence, encode_batch

CPU = torch.device("cpu")
BY_PLACE = ("loss/", "entropy/", "mismatch_kl/", "masked/", "optim/", "progress/", "staleness/", "val/", "seq_len/")
"""Metrics that do not depend on how a step was computed."""


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for here, there in zip(one, other, strict=True):
        names = [name for name in here if name.startswith(BY_PLACE)]
        assert names
        assert {name: there[name] for name in names} == pytest.approx(
            {name: here[name] for name in names}, rel=1e-4, abs=1e-6
        )


# ---- policy trainer


def group(step: int) -> list[Sequence]:
    """Branches behind one prompt, in the order of their tokens: a sampled token is trained by one sample and context of
    the next, or trained by two with other advantages."""
    draw = random.Random(step)

    def sample(prompt: list[int], sampled: list[int], advantage: float, rollout: int) -> Sequence:
        logprobs = [-4 - 2 * draw.random() for _ in sampled]
        return Sequence(prompt, sampled, logprobs, max(0, step - 1), advantage, 1.0, 100 * step + rollout)

    prompt, turn = ([draw.randrange(100, 200) for _ in range(n)] for n in (20, 6))
    ends = [[start, *(draw.randrange(256) for _ in range(5))] for start in (10, 20, 30, 40)]
    return [
        sample(prompt, [5, *turn], 1.0, 0),
        sample([*prompt, 5, *turn], ends[0], 1.0, 0),
        sample(prompt, [5, *turn, *ends[1]], -0.5, 1),
        sample(prompt, [6, *ends[2]], 0.3, 2),
        sample(prompt, [6, *ends[3]], -0.7, 3),
    ]


def train(folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[dict[str, Any]]:
    """Three steps; the batches say what their samples share. Returns the metrics."""

    def decoded(body: Any) -> Batch:
        batch = decode_batch(body)
        parts = []
        for part in batch.micro_batches:
            rows = [own.numpy() for own in torch.split(part.token_ids, list(part.sequence_lengths))]
            parts.append(replace(part, shared=tuple(shared_with_previous(rows))))
        return replace(batch, micro_batches=tuple(parts))

    monkeypatch.setattr(primerl.train.loop.batches, "decode_batch", decoded)

    def answer(step: int, _rank: int) -> Any:
        return 200, encode_batch(step, [group(step), []])

    with OrchestratorDouble(answer) as double:
        values = {
            "output_dir": str(output),
            "orchestrator_url": double.url,
            "max_steps": 3,
            "threads": 1,
            "model": {"path": str(folder)},
            # AdamW would magnify rounding where a gradient is nearly 0.
            "optim": {"type": "sgd", "lr": 0.1},
            "weights": {"keep_all": True},
            "peak_tflops": 1e-3,
            **changes,
        }
        assert run_trainer(values) == 0
    return metrics(output)


@pytest.mark.parametrize(
    ("family", "lora", "changes"),
    [
        ("", None, {}),
        ("", None, {"loss": {"type": "gspo"}}),
        ("", None, {"activation_checkpointing": "full"}),
        ("qwen3_moe", None, {"activation_checkpointing": "selective"}),
        ("qwen3_moe", {"rank": 4}, {"activation_checkpointing": "full"}),
    ],
)
@pytest.mark.usefixtures("own_logging")
def test_a_policy_is_trained_the_same(
    family: str,
    lora: dict[str, Any] | None,
    changes: dict[str, Any],
    folder: Path,
    folders: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(folders(family) if family else folder)
    changes = {**changes, "model": {"path": path, **({"lora": lora} if lora else {})}}
    tree = train(folder, tmp_path / "tree", monkeypatch, **changes)
    plain = train(folder, tmp_path / "plain", monkeypatch, shared_prefixes="off", **changes)
    assert_same(plain, tree)
    one, other = (load_shards(tmp_path / name / "broadcasts" / "step_3") for name in ("plain", "tree"))
    assert max((one[name] - other[name]).abs().max().item() for name in one) <= 2e-6
    sizes = [(unique(group(step)), sum(map(len, group(step)))) for step in (1, 2, 3)]
    for line, without, (computed, tokens) in zip(tree, plain, sizes, strict=True):
        assert line["perf/shared_tokens"] == pytest.approx(computed / tokens)
        assert line["perf/throughput_unique"] == pytest.approx(line["perf/throughput"] * computed / tokens)
        assert without["perf/shared_tokens"] == 1.0
        assert without["perf/throughput_unique"] == without["perf/throughput"]


def test_samples_with_recorded_experts_share_nothing() -> None:
    """An engine may have chosen other experts for the same tokens of another sample."""
    samples = group(1)
    shared = shared_with_previous([np.array(sample.prompt + sample.sampled) for sample in samples])
    (part,) = decode_batch(encode_batch(1, [samples], shared={0: shared})).micro_batches
    trainer: Any = SimpleNamespace(shares=True)
    assert Trainer.shared(trainer, part) == tuple(shared)
    recorded = RoutedExperts((), torch.zeros(0, 2, 2, dtype=torch.uint8))
    assert Trainer.shared(trainer, replace(part, experts=recorded)) == ()


def unique(samples: list[Sequence]) -> int:
    tokens = [(sample.prompt + sample.sampled) for sample in samples]
    return len({tuple(own[:end]) for own in tokens for end in range(1, len(own) + 1)})


def test_flops_are_of_what_is_computed(folder: Path) -> None:
    shape = ModelShape.of(load_model(folder))
    # The second adds 3 tokens behind 7: pairs 8 + 9 + 10, as the last three of a sequence of 10.
    found = shape.flops([9, 10], 4, [0, 7])
    assert found == pytest.approx(shape.flops([9], 4) + shape.flops([10], 0) - shape.flops([7], 0))
    width = shape.attentions[0].width
    own = 6 * 3 * shape.matrix_parameters + 12 * len(shape.attentions) * width * (8 + 9 + 10)
    assert found - shape.flops([9], 4) == pytest.approx(own)


# ---- supervised fine-tuning


def rows_behind_prompts(draw: random.Random, count: int, prompts: int) -> list[Row]:
    starts = [[draw.randrange(256) for _ in range(draw.randint(30, 60))] for _ in range(prompts)]
    rows = []
    for index in range(count):
        start = draw.choice(starts)
        tokens = start + [draw.randrange(256) for _ in range(draw.randint(1, 20))]
        mask = [0] * len(start) + [1] * (len(tokens) - len(start))
        rows.append(Row(torch.tensor(tokens, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8), 0, index))
    return rows


def test_rows_that_begin_alike_come_together() -> None:
    draw = random.Random(1)
    for _ in range(100):
        rows = rows_behind_prompts(draw, draw.randint(1, 40), draw.randint(1, 5))
        seq_len = draw.randint(80, 300)
        groups = packed_trees(rows, seq_len)
        assert sorted(row.index for group in groups for row in group) == list(range(len(rows)))
        for group in groups:
            shared = shared_with_previous([row.token_ids.numpy() for row in group], 32)
            assert unique_tokens([len(row) for row in group], shared) <= seq_len
        assert len(groups) <= len(packed_groups(rows, seq_len))
        shuffled = draw.sample(rows, len(rows))
        tokens = [[row.token_ids.tolist() for row in group] for group in groups]
        if any(micro_batch(group, CPU, share=True).packed.shared for group in groups):
            assert [[row.token_ids.tolist() for row in group] for group in packed_trees(shuffled, seq_len)] == tokens


def test_rows_that_share_little_are_packed_as_without_trees() -> None:
    draw = random.Random(2)
    rows = [Row(torch.randint(0, 256, (draw.randint(20, 90),)).int(), torch.ones(90), 0, i) for i in range(30)]
    start = torch.arange(31).int()
    rows += [Row(torch.cat([start, torch.tensor([i]).int()]), torch.ones(32), 0, 30 + i) for i in range(20)]
    assert packed_trees(rows, 100) == packed_groups(rows, 100)


def test_a_micro_batch_of_rows_has_the_same_losses(folder: Path) -> None:
    rows = rows_behind_prompts(random.Random(3), 12, 2)
    (group,) = packed_trees(rows, 10_000)
    model, found = load_model(folder), []
    for share in (False, True):
        batch = micro_batch(group, CPU, share=share)
        assert bool(batch.packed.shared) == share
        model.zero_grad()
        summed_loss(model, batch).backward()
        found.append((row_losses(model, [batch], 1), [one.grad.clone() for one in model.parameters()]))
    (losses, gradients), (of_tree, gradients_of_tree) = found
    assert of_tree == pytest.approx(losses, abs=1e-4)
    for one, other in zip(gradients, gradients_of_tree, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def sft_values(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    if not (folder / "rows.jsonl").exists():
        draw, prompts = random.Random(4), ["Answer in one word. " * 3, "Say it in other words, please. " * 2]
        rows = [{"prompt": draw.choice(prompts), "completion": "xyz"[: draw.randint(1, 3)] * 3} for _ in range(40)]
        write_rows(folder / "rows.jsonl", *rows)
    optim = {"lr": 1e-2, "schedule": "constant", "warmup_steps": 0}
    data = {"batch_size": 700, "seq_len": 200}
    val = {"interval": 2, "data": {"path": str(folder / "rows.jsonl")}}
    given = {"max_steps": 3, "data": data, "optim": optim, "val": val, "peak_tflops": 1e-3, "dist_timeout_s": 120.0}
    return settings(folder, output_dir=str(folder / output), **{**given, **changes})


def assert_same_training(one: Path, other: Path) -> None:
    assert_same(metrics(one), metrics(other))
    here, there = (load_shards(output / "weights" / "step_3") for output in (one, other))
    assert max((here[name] - there[name]).abs().max().item() for name in here) <= 2e-5


@pytest.mark.usefixtures("own_logging")
def test_rows_are_fitted_the_same(tmp_path: Path) -> None:
    assert run_sft(sft_values(tmp_path, "tree")) == 0
    assert run_sft(sft_values(tmp_path, "plain", shared_prefixes="off")) == 0
    assert_same_training(tmp_path / "plain", tmp_path / "tree")
    tree, plain = (
        [line for line in metrics(tmp_path / name) if "perf/shared_tokens" in line] for name in ("tree", "plain")
    )
    assert len(tree) == len(plain) == 3
    assert all(line["perf/shared_tokens"] < 0.7 for line in tree)
    assert all(line["perf/shared_tokens"] == 1.0 for line in plain)


@pytest.mark.usefixtures("own_logging")
def test_an_adapter_with_dropout_shares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = {"rank": 2, "dropout": 0.1}
    base = sft_values(tmp_path, "run", max_steps=1)
    values = {**base, "model": {**base["model"], "lora": lora}}
    assert run_sft(values) == 0
    said = "tokens that samples share are computed once for each sample (shared_prefixes): the adapter has dropout"
    assert capsys.readouterr().out.count(said) == 1
    assert [line["perf/shared_tokens"] for line in metrics(tmp_path / "run") if "loss/mean" in line] == [1.0]


# ---- several ranks


def policy_micro_batches(step: int) -> list[list[Sequence]]:
    """Two groups, and samples that share nothing: of two ranks, one has a tree and those, the other a tree only."""
    others = [group(step + 40)[0], group(step + 80)[0]]
    return [[replace(one, version=step - 1) for one in own] for own in (group(step), group(step + 20), others)]


def part_of_policy_batch(step: int, rank: int, ranks: int) -> Answer:
    micro_batches = policy_micro_batches(step)
    tokens = sum(len(sample.sampled) for samples in micro_batches for sample in samples)
    own = micro_batches[rank::ranks]
    shared = {}
    for number, samples in enumerate(own):
        shared[number] = shared_with_previous([np.array(sample.prompt + sample.sampled) for sample in samples])
    return 200, encode_batch(step, own, rank=rank, ranks=ranks, loss_tokens=tokens, shared=shared)


RANKED = {"one": (1, "auto"), "one_plain": (1, "off"), "two": (2, "auto"), "two_plain": (2, "off")}


@pytest.fixture(scope="module")
def ranked_runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with runs of fine-tuning and of RL by the names of `RANKED`; in one go, since a process imports torch."""
    sft, rl = (tmp_path_factory.mktemp(name) for name in ("sft", "rl"))
    cases = []
    with contextlib.ExitStack() as doubles:
        for name, (ranks, shared_prefixes) in RANKED.items():
            cases.append(Case("sft", ranks, sft_values(sft, name, shared_prefixes=shared_prefixes)))
            double = OrchestratorDouble(lambda step, rank, ranks=ranks: part_of_policy_batch(step, rank, ranks))
            values = {
                "output_dir": str(rl / name),
                "orchestrator_url": doubles.enter_context(double).url,
                "max_steps": 3,
                "threads": 1,
                "model": {"path": str(folder)},
                "optim": {"lr": 1e-3, "max_norm": 0.5},
                "weights": {"keep_all": True},
                "peak_tflops": 1e-3,
                "dist_timeout_s": 120.0,
                "shared_prefixes": shared_prefixes,
            }
            cases.append(Case("rl", ranks, values))
        run_cases(cases)
    return sft, rl


@pytest.mark.processes
@pytest.mark.timeout(300)  # two processes import torch, on what may be a busy machine
def test_two_ranks_fit_rows_as_one_does(ranked_runs: tuple[Path, Path]) -> None:
    runs, _ = ranked_runs
    assert_same_training(runs / "one", runs / "two")
    assert_same_training(runs / "two_plain", runs / "two")
    shared = {name: [line.get("perf/shared_tokens") for line in metrics(runs / name)] for name in RANKED}
    assert shared["one"] == shared["two"] != shared["two_plain"]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["one", "two", "two_plain"])
def test_two_ranks_train_a_policy_as_one_does(name: str, ranked_runs: tuple[Path, Path]) -> None:
    """With trees and without: every metric but of time, and the weights of each step, by AdamW."""
    _, runs = ranked_runs
    plain, other = metrics(runs / "one_plain"), metrics(runs / name)
    assert len(plain) == 3
    for here, there in zip(plain, other, strict=True):
        assert here["optim/grad_norm"] > 0
        names = [metric for metric in here if not metric.startswith(("time", "perf"))]
        assert {metric: there[metric] for metric in names} == pytest.approx(
            {metric: here[metric] for metric in names}, rel=2e-5, abs=1e-6
        )
    for version in range(1, 4):
        one, two = (load_shards(runs / run / "broadcasts" / f"step_{version}") for run in ("one_plain", name))
        assert max((one[tensor] - two[tensor]).abs().max().item() for tensor in one) <= 2e-6
    samples = [policy_micro_batches(step) for step in (1, 2, 3)]
    computed = [sum(map(unique, parts)) / sum(len(own) for part in parts for own in part) for parts in samples]
    expected = computed if RANKED[name][1] == "auto" else [1.0] * 3
    assert [line["perf/shared_tokens"] for line in other] == pytest.approx(expected)


def test_gathered_keys_of_rows_are_bounded() -> None:
    """One long beginning with short answers: by unique tokens alone, all rows would be in one micro-batch."""
    common = torch.arange(400, dtype=torch.int32)
    rows = [
        Row(torch.cat([common, torch.full((10,), 1000 + n, dtype=torch.int32)]), torch.ones(410, dtype=torch.uint8))
        for n in range(60)
    ]
    groups = packed_trees(rows, 1000)
    assert sum(map(len, groups)) == 60
    assert len(groups) == 4  # of at most 8,000 tokens in full
    assert all(sum(map(len, group)) <= 8 * 1000 for group in groups)
