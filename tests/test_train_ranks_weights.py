"""Several ranks publish and save what one does, also of mixtures, adapters and compiled layers; a rank that fails or is
killed while it writes leaves a version that is whole or none."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.weights.receiver import close_links, receive
from rank_helpers import MAIN, Case, load_shards, run_cases, start_ranks
from sft_helpers import metrics, write_rows
from sft_helpers import settings as sft_settings
from test_train_metrics import mixture  # noqa: F401 (a fixture)
from test_train_ranks import LOSS, WEIGHT, split_batch
from train_helpers import OrchestratorDouble

pytestmark = pytest.mark.processes

STEPS = 3


class Run:
    """Of reinforcement learning, with an orchestrator of its own."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, ranks: int, **changes: Any) -> None:
        self.double = stack.enter_context(OrchestratorDouble(lambda step, rank: split_batch(step, rank, ranks)))
        values = {
            "output_dir": str(folder / name),
            "orchestrator_url": self.double.url,
            "max_steps": STEPS,
            "threads": 1,
            "optim": {"lr": 3e-3, "max_norm": 0.5},
            "weights": {"keep_all": True},
            "dist_timeout_s": 120.0,
            **changes,
        }
        self.case = Case("rl", ranks, values)
        self.output = folder / name

    def published(self, version: int) -> dict[str, torch.Tensor]:
        return load_shards(self.output / "broadcasts" / f"step_{version}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, TinyConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2), seed=3)
    return path


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    folder: Path,
    mixture: Path,  # noqa: F811
) -> Iterator[dict[str, Run]]:
    """Each of one rank and of two, made in one go, since each process imports torch."""
    path = tmp_path_factory.mktemp("rl")
    kinds: dict[str, dict[str, Any]] = {
        "adapter": {"model": {"path": str(folder), "lora": {"rank": 4, "broadcast": "adapter"}}},
        "merged": {"model": {"path": str(folder), "lora": {"rank": 4, "broadcast": "merged"}}},
        "experts": {"model": {"path": str(mixture)}},
    }
    with ExitStack() as stack:
        found = {
            f"{kind}_{ranks}": Run(stack, path, f"{kind}_{ranks}", ranks, **changes)
            for kind, changes in kinds.items()
            for ranks in (1, 2)
        }
        half = {"keep_all": True, "dtype": "bfloat16", "max_shard_bytes": 30_000, "transport": "collective"}
        sending = Run(stack, path, "sending", 2, model={"path": str(folder)}, weights=half)
        received.clear()
        sending.double.before_weights = receive_from
        found["sending"] = sending
        run_cases([run.case for run in found.values()])
        yield found


received: dict[int, dict[str, torch.Tensor]] = {}
"""What was sent by the ranks of the run "sending" when they announced it."""


def receive_from(fields: dict[str, Any]) -> None:
    contents = json.loads(Path(fields["manifest"]).read_text())
    received[fields["version"]] = {
        name: tensor
        for file in contents["files"]
        for name, tensor in receive(fields["manifest"], file["name"], engine="e", timeout_s=20.0).items()
    }


@pytest.mark.parametrize("kind", ["adapter", "merged", "experts"])
def test_two_ranks_publish_and_save_what_one_does(runs: dict[str, Run], kind: str) -> None:
    one, two = runs[f"{kind}_1"], runs[f"{kind}_2"]
    lines = list(zip(metrics(one.output), metrics(two.output), strict=True))
    assert [line["step"] for line, _ in lines] == list(range(1, STEPS + 1))
    for here, there in lines:
        for metric in here:
            if metric.startswith(("loss", "optim", "entropy")):
                assert there[metric] == pytest.approx(here[metric], rel=LOSS, abs=1e-6), metric
    pairs = [(one.published(version), two.published(version)) for version in range(STEPS + 1)]
    pairs.append(tuple(load_shards(run.output / "weights" / f"step_{STEPS}") for run in (one, two)))  # type: ignore[arg-type]
    for first, second in pairs:
        assert first.keys() == second.keys()
        for name in first:
            assert first[name].dtype == second[name].dtype
            assert (first[name].double() - second[name].double()).abs().max().item() <= 2 * WEIGHT, name
    moved = max((pairs[0][0][name] - pairs[STEPS][0][name]).abs().max().item() for name in pairs[0][0])
    assert moved > 1e-3


def test_ranks_send_what_they_have_published(runs: dict[str, Run]) -> None:
    """From the run's own ranks, when the orchestrator is told; in the dtype and files that the settings name."""
    close_links()
    files = [path.name for path in (runs["sending"].output / "broadcasts" / "step_1").glob("*.safetensors")]
    assert len(files) > 2
    assert sorted(received) == list(range(STEPS + 1))
    for version, tensors in received.items():
        published = runs["sending"].published(version)
        assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
        assert sorted(tensors) == sorted(published)
        assert all(torch.equal(tensors[name], published[name]) for name in tensors)


def test_two_ranks_train_experts_and_compiled_layers(tmp_path: Path, mixture: Path) -> None:  # noqa: F811
    generator = random.Random(1)
    words = ["x" * generator.randint(1, 12) for _ in range(23)]
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": word} for word in words))

    def case(name: str, ranks: int, **changes: Any) -> Case:
        given = {"max_steps": 3, "data": {"batch_size": 150, "seq_len": 75}, **changes}
        return Case("sft", ranks, sft_settings(tmp_path, output_dir=str(tmp_path / name), **given))

    experts = {"model": {"path": str(mixture)}}
    run_cases(
        [
            case("experts_1", 1, **experts),
            case("experts_2", 2, **experts),
            case("plain_1", 1),
            case("compiled_2", 2, compile=True),
        ],
        COMPILED + MAIN,
    )
    for one, two in (("experts_1", "experts_2"), ("plain_1", "compiled_2")):
        for here, there in zip(metrics(tmp_path / one), metrics(tmp_path / two), strict=True):
            for metric in here:
                if metric.startswith(("loss", "optim", "max_vio", "routing")):
                    assert there[metric] == pytest.approx(here[metric], rel=LOSS, abs=1e-6), metric
        first, second = (load_shards(tmp_path / name / "weights" / "step_3") for name in (one, two))
        assert first.keys() == second.keys()
        assert max((first[name] - second[name]).abs().max().item() for name in first) <= 2 * WEIGHT


COMPILED = """
from functools import partial
from primerl.train.model import loading, memory
loading.prepare = partial(memory.prepare, backend="aot_eager")
"""
"""What torch.compile makes of layers that are gathered around it; without minutes of a C++ compiler."""


BROKEN = """
import os, signal
from primerl.train.weights import publish as weights
save_file = weights.save_file
def broken(tensors, path, **options):
    if os.environ["RANK"] == "1" and ".step_2." in str(path):
        if HOW == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")
    save_file(tensors, path, **options)
weights.save_file = broken
"""


@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_rank_that_ends_while_it_writes(folder: Path, tmp_path: Path, how: str) -> None:
    with ExitStack() as stack:
        model = {"path": str(folder)}
        # The threads of a rank wait so long for one that is gone; a collective ends at once. It may be either.
        settings = {"model": model, "ckpt": {"interval": 1}, "dist_timeout_s": 30.0}
        whole, run = (Run(stack, tmp_path, name, 2, **settings) for name in ("whole", "interrupted"))
        case = Case("rl", 2, run.case.values, code=1)
        processes = start_ranks([case], f"HOW = {how!r}\n{BROKEN}{MAIN}")
        said = ends_of(processes)
        if how == "killed":
            assert processes[1].returncode == -signal.SIGKILL
            assert "rank 1 is gone or hangs" in said[0]
        else:
            where = run.output / "broadcasts"
            assert f"the weights of policy 2 cannot be written to {where}: [Errno 28] No space left" in said[1]
        assert processes[0].returncode == 0, said[0]
        assert [call["version"] for call in run.double.called("/trainer/weights")] == [0, 1]
        assert not (run.output / "broadcasts" / "step_2").exists()
        # The same command goes on from the last checkpoint.
        run_cases([whole.case, Case("rl", 2, run.case.values)])
        for version in range(STEPS + 1):
            one, two = whole.published(version), run.published(version)
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
        assert not list((run.output / "broadcasts").glob(".step_*"))


def ends_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    said = []
    try:
        for process in processes:
            process.wait(timeout=120)
    finally:
        for process in processes:
            process.kill()
            said.append(process.communicate()[0])
    return said
