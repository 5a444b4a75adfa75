"""Several data ranks train what one does: the same losses, weights and places in the data; any number of them goes on
from a checkpoint of any other number. In fp32; sums are in another order, which is what the tolerances are for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.checkpoint.state import Checkpoints
from primerl.train.sft_settings import SFTConfig
from rank_helpers import Case, load_shards, run_cases
from settings_helpers import refusal
from sft_helpers import metrics, settings, write_rows
from test_train_rl import sequences
from train_helpers import AHEAD, Answer, OrchestratorDouble, encode_batch, waiting
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.processes

STEPS = 6
SAVED = 3
LOSS, WEIGHT = 2e-5, 2e-6
"""Largest difference of a loss or gradient norm, relative, and of a weight; a step moves weights by up to 1e-2."""


def sft_values(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    """Seven micro-batches a step or so: no number of ranks above one divides them at every step."""
    given = {
        "max_steps": STEPS,
        "data": {"batch_size": 150, "seq_len": 40},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 0},
        "val": {"interval": 3, "data": {"path": str(folder / "rows.jsonl")}},
        "ckpt": {"interval": SAVED},
        "dist_timeout_s": 120.0,
        **changes,
    }
    return settings(folder, output_dir=str(folder / output), **given)


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All runs of supervised fine-tuning, by name; made in one go, since each process imports torch."""
    folder = tmp_path_factory.mktemp("sft")
    generator = random.Random(1)
    texts = ["x" * generator.randint(1, 20) for _ in range(29)]
    write_rows(folder / "rows.jsonl", *({"prompt": "a", "completion": text} for text in texts))

    def case(name: str, ranks: int, **changes: Any) -> Case:
        return Case("sft", ranks, sft_values(folder, name, **changes))

    def goes_on(name: str, ranks: int, source: str, **changes: Any) -> Case:
        """From step 3 of another run, whose later steps are set aside."""
        values = sft_values(folder, name, ckpt={"interval": SAVED, "resume_step": SAVED}, **changes)
        return Case("sft", ranks, values, copied_from=str(folder / source))

    # Layers of Mamba-2, and an adapter.
    base = write_family(folder / "bamba", "bamba")
    state = {"model": {"path": str(base), "lora": {"rank": 2}}}
    muon = {"optim": {"type": "muon", "lr": 1e-2, "schedule": "constant", "warmup_steps": 0}}
    cases = [
        case("one", 1),
        case("two", 2),
        case("four", 4),
        case("hybrid", 4, dp_replicate=2, activation_checkpointing="full"),
        goes_on("two_one", 1, "two"),
        goes_on("one_two", 2, "one"),
        goes_on("two_two", 2, "two"),
        goes_on("two_four", 4, "two", dp_replicate=2),
        case("muon_one", 1, **muon),
        case("muon_two", 2, **muon),
        goes_on("muon_one_two", 2, "muon_one", **muon),
        case("half_one", 1, dtype="bfloat16"),
        case("half_two", 2, dtype="bfloat16"),
        goes_on("half_two_one", 1, "half_two", dtype="bfloat16"),
        case("state_one", 1, **state),
        case("state_two", 2, activation_checkpointing="full", **state),
    ]
    run_cases(cases)
    return {case.output.name: case.output for case in cases}


def differences(one: Path, other: Path) -> tuple[float, float]:
    """Largest relative one of losses, gradient norms and everything counted; largest of the last weights."""
    lines = list(zip(metrics(one), metrics(other), strict=True))
    assert [line["step"] for line, _ in lines] == list(range(STEPS + 1))
    of_metrics = 0.0
    for here, there in lines:
        names = [name for name in here if name.startswith(("loss", "val", "optim", "progress"))]
        assert set(names) <= there.keys()
        for name in names:
            of_metrics = max(of_metrics, abs(here[name] - there[name]) / max(abs(here[name]), 1e-3))
    first, second = (load_shards(path / "weights" / f"step_{STEPS}") for path in (one, other))
    assert first.keys() == second.keys()
    return of_metrics, max((first[name].float() - second[name].float()).abs().max().item() for name in first)


@pytest.mark.parametrize("name", ["two", "four", "hybrid", "two_one", "one_two", "two_four"])
def test_any_number_of_ranks_trains_the_same(sft_runs: dict[str, Path], name: str) -> None:
    """Loss, norm, share of zeros, validation, mixture and weights; also where the number changes at step 3."""
    of_metrics, of_weights = differences(sft_runs["one"], sft_runs[name])
    assert of_metrics <= LOSS
    assert of_weights <= WEIGHT


def test_layers_with_a_state_train_the_same_under_an_adapter(sft_runs: dict[str, Path]) -> None:
    of_metrics, of_weights = differences(sft_runs["state_one"], sft_runs["state_two"])
    assert of_metrics <= LOSS
    assert of_weights <= WEIGHT


def test_the_same_number_goes_on_bit_by_bit(sft_runs: dict[str, Path]) -> None:
    assert differences(sft_runs["two"], sft_runs["two_two"]) == (0.0, 0.0)


def test_the_model_folder_is_that_of_one_rank(sft_runs: dict[str, Path]) -> None:
    one, two = (sft_runs[name] / "weights" / f"step_{STEPS}" for name in ("one", "two"))
    rest = {path.name for path in one.iterdir()} - {"model.safetensors"}
    index = json.loads((two / "model.safetensors.index.json").read_text())
    files = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert set(index["weight_map"].values()) == files
    assert {path.name for path in two.iterdir()} == {*rest, *files, "model.safetensors.index.json"}
    for name in rest:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(two).state_dict()
    whole = load_shards(two)
    assert sorted(whole) == sorted(load_shards(one))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())
    half, divided = (sft_runs[name] / "weights" / f"step_{STEPS}" for name in ("half_one", "half_two"))
    assert (half / "config.json").read_bytes() == (divided / "config.json").read_bytes()
    tensors = load_shards(divided).values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


@pytest.mark.parametrize(("one", "other"), [("muon_one", "muon_two"), ("muon_one", "muon_one_two")])
def test_muon_sees_whole_matrices(sft_runs: dict[str, Path], one: str, other: str) -> None:
    """Loss and norms agree. Weights only roughly: directions that a gradient hardly has are made as long as others, in
    bf16, so rounding is seen there (q_proj: a quarter of its movement over six steps)."""
    of_metrics, of_weights = differences(sft_runs[one], sft_runs[other])
    assert of_metrics <= 1e-2
    assert of_weights <= 2e-2


@pytest.mark.parametrize("other", ["half_two", "half_two_one"])
def test_half_precision_is_close(sft_runs: dict[str, Path], other: str) -> None:
    """Master weights are in fp32 in either; what is computed in bf16 rounds otherwise."""
    of_metrics, of_weights = differences(sft_runs["half_one"], sft_runs[other])
    assert of_metrics <= 1e-1
    assert of_weights <= 3e-2


def test_each_rank_writes_its_share(sft_runs: dict[str, Path]) -> None:
    def sizes(name: str) -> list[int]:
        files = (sft_runs[name] / "checkpoints" / f"step_{STEPS}" / "trainer").glob("*.distcp")
        return [path.stat().st_size for path in files]

    assert len(sizes("one")) == 1
    assert len(sizes("four")) == 4
    assert max(sizes("four")) < 0.6 * sizes("one")[0]
    assert Checkpoints(sft_runs["four"], None).steps() == [SAVED, STEPS]


def split_batch(step: int, rank: int, ranks: int) -> Answer:
    """Three micro-batches, of which the first ranks have one more; the tokens of all are what each is told."""
    samples = sequences(step)
    micro_batches = [samples[:3], samples[3:5], samples[5:]]
    own = micro_batches[rank::ranks] or [[]]
    tokens = sum(len(sample.sampled) for sample in samples)
    return 200, encode_batch(step, own, rank=rank, ranks=ranks, loss_tokens=tokens, metrics={"reward/all/mean": 0.5})


@pytest.fixture(scope="module")
def rl_runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[dict[str, Path], dict[str, OrchestratorDouble]]]:
    folder = tmp_path_factory.mktemp("rl")
    write_model(folder / "tiny", TinyConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2), seed=3)
    doubles = {
        name: OrchestratorDouble(lambda step, rank, ranks=ranks: split_batch(step, rank, ranks))
        for name, ranks in (("one", 1), ("two", 2), ("four", 4), ("two_one", 1))
    }
    # Each time the other one of the two ranks has to ask for its batch once more.
    doubles["two"].ahead = lambda step, rank: split_batch(step, rank, 2) if rank == step % 2 else waiting("the others")
    for double in doubles.values():
        double.__enter__()

    def case(name: str, ranks: int, copied_from: str = "", **changes: Any) -> Case:
        values = {
            "output_dir": str(folder / name),
            "orchestrator_url": doubles[name].url,
            "max_steps": STEPS,
            "threads": 1,
            "model": {"path": str(folder / "tiny")},
            "optim": {"lr": 3e-3, "max_norm": 0.5},
            "weights": {"keep_all": True},
            "dist_timeout_s": 120.0,
            **changes,
        }
        return Case("rl", ranks, values, copied_from=str(folder / copied_from) if copied_from else "")

    # One of `max_steps` 3, and the same folder gone on with by another number of ranks.
    cases = [
        case("one", 1),
        case("two", 2, ckpt={"interval": SAVED, "keep_last": 2}),
        case("four", 4, dp_replicate=2),
    ]
    run_cases(cases)
    (folder / "two" / "checkpoints" / f"step_{STEPS}").rename(folder / f"step_{STEPS}")
    run_cases([case("two_one", 1, copied_from="two")])
    yield {path.name: path for path in folder.iterdir()}, doubles
    for double in doubles.values():
        double.__exit__()


@pytest.mark.parametrize("name", ["two", "four", "two_one"])
def test_policies_are_those_of_one_rank(
    rl_runs: tuple[dict[str, Path], dict[str, OrchestratorDouble]], name: str
) -> None:
    runs, _ = rl_runs
    lines = list(zip(metrics(runs["one"]), metrics(runs[name]), strict=True))
    assert [line["step"] for line, _ in lines] == list(range(1, STEPS + 1))
    for here, there in lines:
        for metric in here:
            if not metric.startswith(("time", "perf")):
                assert there[metric] == pytest.approx(here[metric], rel=LOSS, abs=1e-6), metric
    for version in range(STEPS + 1):
        one, other = (load_shards(runs[run] / "broadcasts" / f"step_{version}") for run in ("one", name))
        assert max((one[tensor] - other[tensor]).abs().max().item() for tensor in one) <= WEIGHT


def test_each_rank_asks_for_its_own_and_one_speaks_for_all(
    rl_runs: tuple[dict[str, Path], dict[str, OrchestratorDouble]],
) -> None:
    _, doubles = rl_runs
    all_batches = {(step, rank) for step in range(1, STEPS + 1) for rank in (0, 1)}
    ahead, asked = (
        [(call["step"], call["rank"]) for call in doubles["two"].called(path)] for path in (AHEAD, "/trainer/batch")
    )
    assert set(ahead) == {(step, rank) for step, rank in all_batches if step > 1}
    assert len(asked) == len(set(asked))
    # One rank of the two has its batch before the other asks for its own.
    assert set(asked) == {(step, rank) for step, rank in all_batches if step == 1 or rank != step % 2}
    four = {(call["step"], call["rank"]) for call in doubles["four"].called("/trainer/batch")}
    assert four == {(step, rank) for step in range(1, STEPS + 1) for rank in range(4)}
    assert [call["version"] for call in doubles["two"].called("/trainer/weights")] == list(range(STEPS + 1))
    # The older of the two that are kept: the batches after it stay with the orchestrator.
    assert [call["step"] for call in doubles["two"].called("/trainer/checkpoint")] == [SAVED, SAVED]
    assert doubles["two_one"].called("/trainer/resume") == [{"step": SAVED}]
    assert len(doubles["two"].called("/trainer/resume")) == 1


def test_settings_that_do_not_fit() -> None:
    base = {"output_dir": "x", "max_steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}
    for changes, message in [
        ({"ranks": 4, "dp_replicate": 3}, r"dp_replicate is 3; it must divide ranks \(4\)"),
        ({"context_parallel": 2}, "context_parallel is 2; only 1 is supported: .*packed"),
        ({"ranks": 0}, "ranks"),
    ]:
        assert re.search(message, refusal(SFTConfig, {**base, **changes}))
