"""Episodes of several seats, by a real worker and the gateway: what is trained, and what it is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from engine_helpers import mock_command, running
from primerl._core import Orchestrator, inspect_run
from primerl.run_key import VARIABLE, run_key
from primerl.runs.trace import rollout as tell_rollout
from primerl.train.data.batch import Batch, decode_batch
from test_orchestrator_in_process import PATIENCE_S, begin, publish, settings

ENVIRONMENTS = Path(__file__).parent / "environments"
Trace = dict[str, Any]


@pytest.fixture
def engine_url(mock_binary: Path, tmp_path: Path) -> Iterator[str]:
    with running("mock", mock_command(mock_binary), None, tmp_path / "engine.log") as engine:
        yield engine.url


def start_worker(url: str, arguments: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    file = folder / "worker.toml"
    config = {"orchestrator_url": url, "environment": "task", "id": "seats-env", "args": arguments}
    file.write_text(tomli_w.dumps(config))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ENVIRONMENTS), *sys.path])}
    variables[VARIABLE] = run_key(folder / "out") or ""
    with (folder / "worker.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "primerl", "env-worker", "@", str(file)], stderr=log, env=variables
        )


def train_a_step(
    model: Path, engine_url: str, arguments: dict[str, Any], folder: Path
) -> tuple[Batch, dict[int, dict[str, Trace]], dict[int, list[int]]]:
    """The batch of the run's only step; of its rollouts, traces by seat; of its groups, the rollouts."""
    output = folder / "out"
    config = settings(model, output, engines=[engine_url], max_steps=1, algorithm={"type": "rloo"})
    with Orchestrator(config) as orchestrator:
        begin(orchestrator, output)
        worker = start_worker(orchestrator.url, arguments, folder)
        try:
            publish(orchestrator, output, 0)
            body = orchestrator.next_batch(1, 0)
            assert body is not None
            publish(orchestrator, output, 1)
            assert worker.wait(PATIENCE_S) == 0, (folder / "worker.log").read_text()
        finally:
            worker.kill()
            worker.wait()
    assert inspect_run(output, "check")["broken"] is None
    batch = decode_batch(body)
    traces, groups = {}, defaultdict(list)
    for rollout in sorted({number for micro in batch.micro_batches for number in micro.rollouts}):
        story = inspect_run(output, "rollout", rollout)
        traces[rollout] = {report["seat"]: report for report in story["reports"]}
        assert all(f"seat {seat!r}, session " in tell_rollout(story) for seat in traces[rollout])
        groups[story["group"]].append(rollout)
        for turn in story["turns"]:
            assert turn["session"] in [report["session"] for report in story["reports"]]
    return batch, traces, groups


def advantages_of(batch: Batch) -> dict[int, list[float]]:
    """By rollout, of each of its sequences."""
    found = defaultdict(list)
    for micro in batch.micro_batches:
        parts = zip(
            micro.rollouts,
            micro.advantages.split(micro.sequence_lengths),
            micro.loss_mask.split(micro.sequence_lengths),
            strict=True,
        )
        for rollout, advantages, mask in parts:
            [advantage] = set(advantages[mask.bool()].tolist())
            found[rollout].append(advantage)
    return found


def test_each_trained_seat_is_compared_with_itself(model: Path, engine_url: str, tmp_path: Path) -> None:
    batch, traces, groups = train_a_step(model, engine_url, {}, tmp_path)
    advantages = advantages_of(batch)
    assert [len(rollouts) for rollouts in groups.values()] == [2, 2]
    for one, other in groups.values():
        for mine, theirs in ((one, other), (other, one)):
            # RLOO of two: the difference of the rewards, which lie a thousand apart between the seats.
            expected = [traces[mine][seat]["reward"] - traces[theirs][seat]["reward"] for seat in ("asks", "answers")]
            assert sorted(advantages[mine]) == pytest.approx(sorted(expected))
            assert max(map(abs, expected)) < 1000


def test_a_judge_is_not_trained_and_meets_the_rollouts_limits(model: Path, engine_url: str, tmp_path: Path) -> None:
    arguments = {"judged": True, "taskset": {"limits": {"turns": 1}}}
    batch, traces, _ = train_a_step(model, engine_url, arguments, tmp_path)
    for rollout, advantages in advantages_of(batch).items():
        assert len(advantages) == 1, "one seat is trained"
        asks, answers = traces[rollout]["asks"], traces[rollout]["answers"]
        assert (asks["trainable"], answers["trainable"]) == (True, False)
        # The first turn was the rollout's last: the judge was refused, in words at which its harness ended in order.
        assert (answers["stop_condition"], answers["truncated"]) == ("limit_turns", True)
        assert answers["ok"]
        assert asks["stop_condition"] == "agent_completed"
