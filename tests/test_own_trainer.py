"""Training loops of users without a run: when they can be used, and what is written and noted of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import primerl as primerl_package
import pytest
import torch
from end_to_end import REPOSITORY, SMALL, arguments_of, steps_of
from own_trainer_helpers import Alone, write_own
from primerl import api
from primerl.launch.supervise.failures import FAILED, INTERRUPTED
from primerl.own_trainer import connection, lifetime
from primerl.own_trainer.connection import Connection
from primerl.own_trainer.lifetime import Lifetime
from primerl.own_trainer.outcome import is_orderly, outcome
from primerl.runs.registry import Registry
from primerl.runs.standing import standing
from primerl.train.checkpoint.step_folders import SavingError
from primerl.train.loop.metrics import MetricsWriter
from transformers import AutoModelForCausalLM

FILE = str(REPOSITORY / "examples" / "reverse-text" / "rl-ci.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_own(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def policy(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def loop(tmp_path: Path, folder: Path) -> Any:
    loop = Alone(tmp_path / "run", folder)
    yield loop
    loop._close_metrics()


def lines(loop: Alone) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (loop.output_dir / "metrics.jsonl").read_text().splitlines()]


def test_publishing_twice_is_refused(loop: Alone, policy: Any) -> None:
    again = "publish makes the next one: call it once after each batch"
    loop.publish(policy)
    with pytest.raises(RuntimeError, match=rf"policy 0 is published already, and {again}"):
        loop.publish(policy)
    for _ in loop.batches():
        loop.publish(policy)
        with pytest.raises(RuntimeError, match=again):
            loop.publish(policy)
    assert loop.announced == [0, 1, 2, 3]


def test_a_batch_that_is_fetched_again_is_counted_once(loop: Alone, policy: Any) -> None:
    for _ in range(3):
        for _ in loop.batches():
            break
    for _ in loop.batches():
        loop.publish(policy)
    counted = [(line["progress/num_samples"], line["progress/num_tokens"]) for line in lines(loop)]
    assert counted == [(2, 7), (4, 14), (6, 21)]


def test_weights_to_begin_with_that_are_refused_leave_the_metrics(
    loop: Alone, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that starts over in a run's folder, with another model: its lines are all that is left of that run."""
    before = [{"step": step, "reward/all/mean": 0.5} for step in (1, 2, 3)]
    loop.output_dir.mkdir(parents=True, exist_ok=True)
    (loop.output_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in before))

    def refuse(*_: object) -> None:
        raise RuntimeError("version 0 was published before, with other weights")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_announce", refuse)
        with pytest.raises(RuntimeError, match="with other weights"):
            loop.publish(policy)
    assert lines(loop) == before
    loop.publish(policy)
    assert lines(loop) == []


def test_a_loop_resumes_with_the_counts_of_its_checkpoints_step(loop: Alone, policy: Any) -> None:
    """A script that was killed after step 3, of which step 2 was saved last."""
    loop.publish(policy)
    for _ in loop.batches():
        loop.publish(policy)
    again = Alone(loop.output_dir, Path(loop.model_path))
    again.resume_after(2)
    again.publish(policy)
    for _ in again.batches():
        again.publish(policy)
    again._close_metrics()
    counted = [(line["step"], line["progress/num_samples"], line["progress/num_tokens"]) for line in lines(again)]
    assert counted == [(1, 2, 7), (2, 4, 14), (3, 6, 21)]


def test_a_loop_without_its_metrics_counts_from_there(loop: Alone, policy: Any) -> None:
    loop.resume_after(2)
    loop.publish(policy)
    for _ in loop.batches():
        loop.publish(policy)
    assert [(line["step"], line["progress/num_samples"]) for line in lines(loop)] == [(3, 2)]


def test_a_step_that_is_published_again_is_written_once(
    loop: Alone, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the orchestrator has not answered")

    loop.publish(policy)
    for _ in loop.batches():
        with monkeypatch.context() as patched:
            patched.setattr(loop, "_announce", fail)
            with pytest.raises(RuntimeError, match="has not answered"):
                loop.publish(policy, metrics={"loss/mean": 1.0})
        loop.publish(policy, metrics={"loss/mean": 2.0})
    counted = [(line["step"], line["progress/num_samples"], line["loss/mean"]) for line in lines(loop)]
    assert counted == [(1, 2, 2.0), (2, 4, 2.0), (3, 6, 2.0)]


def test_a_line_that_could_not_be_written_is_written_once(
    loop: Alone, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where half of it is there."""
    loop.publish(policy)

    def half(writer: MetricsWriter, step: int, metrics: dict[str, float]) -> None:
        writer._file.write(f'{{"step": {step}, "loss')
        raise SavingError("no space left")

    for _ in loop.batches():
        with monkeypatch.context() as patched:
            patched.setattr(MetricsWriter, "write", half)
            with pytest.raises(SavingError, match="no space left"):
                loop.publish(policy)
        loop.publish(policy)
    assert [(line["step"], line["progress/num_samples"]) for line in lines(loop)] == [(1, 2), (2, 4), (3, 6)]


def test_a_loop_that_goes_back_amid_a_step_forgets_its_batch(loop: Alone, policy: Any) -> None:
    loop.publish(policy)
    for batch in loop.batches():
        if batch.step == 3:
            break
        loop.publish(policy)
    loop.resume_after(1)
    loop.publish(policy)
    for _ in loop.batches():
        loop.publish(policy)
    assert [(line["step"], line["progress/num_samples"]) for line in lines(loop)] == [(1, 2), (2, 4), (3, 6)]
    assert loop.announced == [0, 1, 2, 1, 2, 3]


# Metrics


def test_numbers_of_torch_and_numpy_are_metrics(loop: Alone, policy: Any) -> None:
    given = {
        "a": torch.tensor(0.5),
        "b": numpy.float32(0.25),
        "c": torch.tensor([2]),
        "d": 3,
        "e": True,
        "f": float("nan"),
    }
    next(loop.batches())
    loop.publish(policy, metrics=given)
    (line,) = lines(loop)
    assert [line[name] for name in given] == [0.5, 0.25, 2, 3, 1, None]
    assert line["reward/all/mean"] == 0.5


@pytest.mark.parametrize(
    ("metrics", "error", "told"),
    [
        ({"optim/grad_norm": torch.ones(2)}, TypeError, r"'optim/grad_norm' has shape \[2\], and has to be one number"),
        ({"a": numpy.ones((2, 2))}, TypeError, r"'a' has shape \[2, 2\]"),
        ({"a": "0.5"}, TypeError, "'a' is a str, and has to be a number"),
        ({"a": None}, TypeError, "'a' is a NoneType"),
        ({"a": 10**400}, TypeError, "'a' is larger than any float"),
        ({1: 0.5}, TypeError, "the name 1 is no string"),
        (0.5, TypeError, "metrics is a float, and has to be a dict"),
        ({"step": 99}, ValueError, "'step' is in the step's line already"),
        ({"timestamp": 0.0}, ValueError, "'timestamp' is"),
        ({"reward/all/mean": 7.0}, ValueError, "'reward/all/mean' is"),
        ({"progress/num_tokens": 7.0}, ValueError, "'progress/num_tokens' is"),
    ],
)
def test_other_metrics_are_refused_by_name_before_anything_is_written(
    loop: Alone, policy: Any, metrics: Any, error: type[Exception], told: str
) -> None:
    next(loop.batches())
    with pytest.raises(error, match=told):
        loop.publish(policy, metrics=metrics)
    assert lines(loop) == []
    assert [path.name for path in (loop.output_dir / "broadcasts").glob("step_*")] == ["step_0"]
    loop.publish(policy, metrics={"optim/grad_norm": 1.0})
    assert lines(loop)[0]["step"] == 1


def test_a_line_keeps_its_own_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"step": 99.0, "timestamp": 0.0, "loss/mean": 1.0})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["loss/mean"]) == (3, 1.0)
    assert line["timestamp"] > 0


# From when to when a run can be used


def run_in(folder: Path, *flags: str) -> primerl_package.Run:
    return primerl_package.Run(FILE, "--output-dir", str(folder), *flags)


def test_a_run_that_is_not_entered_says_how_to_use_it(tmp_path: Path, policy: Any) -> None:
    run = run_in(tmp_path / "run")
    for use in (
        lambda: next(run.batches()),
        lambda: run.publish(policy),
        run.restore,
        lambda: run.resume_after(1),
        run.status,
        lambda: run.url,
    ):
        with pytest.raises(
            RuntimeError, match=r"has not been started: use it as `with primerl\.Run\(\.\.\.\) as run:`"
        ):
            use()
    assert not (tmp_path / "run").exists()


def test_a_run_is_for_one_block(tmp_path: Path, policy: Any) -> None:
    run = run_in(tmp_path / "run")
    run._lifetime.begin()
    for end in (lambda: None, run._lifetime.end):
        end()
        with pytest.raises(RuntimeError, match="is for one `with` block, and this one has had its own: make a new one"):
            run.__enter__()
    for use in (lambda: next(run.batches()), lambda: run.publish(policy), run.restore):
        with pytest.raises(RuntimeError, match="make a new one"):
            use()
    # Nothing is left to do at a second end.
    run.__exit__(None, None, None)
    assert not (tmp_path / "run").exists()


def test_a_start_that_was_refused_can_be_repeated(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", "--dry-run")
    for _ in range(2):
        with pytest.raises(primerl_package.ConfigError, match="dry_run"):
            run.__enter__()


def test_a_forked_process_ends_nothing(tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path / "run")
    run._lifetime.begin()
    own = os.getpid()
    monkeypatch.setattr(lifetime.os, "getpid", lambda: own + 1)
    # Its parent's processes, folder and summary would be touched by this; there are none here to touch.
    run.__exit__(SystemExit, SystemExit(3), None)
    with pytest.raises(RuntimeError, match=rf"belongs to process {own}, from which this one was forked"):
        run.publish(policy)
    monkeypatch.undo()
    assert run._lifetime.is_here


def test_a_connection_that_is_closed_says_so(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    one = object.__new__(Connection)
    one._lifetime = Lifetime(connection.CLOSED, connection.CLOSED)
    one._lifetime.begin()
    one._heartbeat = one._fetched = one._client = SimpleNamespace(leave=lambda: None, close=lambda: None)  # type: ignore[assignment]
    one._metrics = None
    one._peers = SimpleNamespace(leave=lambda *, orderly: closed.append(orderly), named=lambda error: None)  # type: ignore[assignment]
    own = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(lifetime.os, "getpid", lambda: own + 1)
        one.close()
    assert closed == []
    with pytest.raises(SystemExit), one:
        raise SystemExit(0)
    one.close()
    assert closed == [True]
    for use in (one.__enter__, lambda: one.publish(policy), lambda: next(one.batches())):
        with pytest.raises(RuntimeError, match=r"this connection is closed: call primerl\.connect again"):
            use()


# How a run ends


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0), SystemExit(None)])
def test_a_script_that_exits_leaves_as_by_break(error: BaseException | None) -> None:
    assert is_orderly(error)
    assert outcome(error, None, 3) == (INTERRUPTED, "the training script left before step 3 was trained")
    assert outcome(error, None, None) == (0, "finished")
    assert outcome(error, "engine died", None) == (FAILED, "engine died")


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (SystemExit(3), FAILED, "the training script has exited with code 3"),
        (SystemExit("no data"), FAILED, "the training script has exited with code 1: no data"),
        (ValueError("x"), FAILED, "the training script: ValueError: x"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
)
def test_a_script_that_fails_is_noted_with_what_it_failed_of(error: BaseException, code: int, reason: str) -> None:
    assert not is_orderly(error)
    assert outcome(error, None, None) == (code, reason)


def test_sections_that_a_script_does_not_use_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"store is ignored: only `primerl rl` acts on it\. A training script uploads"):
        run_in(tmp_path / "run", "--store.url", str(tmp_path / "store"))
    assert api.ENTERED.startswith("a primerl.Run")


LEAVES_EARLY = """
import os
import sys
import primerl
from transformers import AutoModelForCausalLM

with primerl.Run(*sys.argv[1:]) as run:
    policy = AutoModelForCausalLM.from_pretrained(run.model_path)
    for batch in run.batches():
        if (child := os.fork()) == 0:
            sys.exit(3)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        run.publish(policy)
        if batch.step == 2:
            sys.exit()
"""


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_forked_process_leaves_the_run_alone_and_an_exit_stops_it(folder: Path, tmp_path: Path) -> None:
    output, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(LEAVES_EARLY, encoding="utf-8")
    _, file, *overrides = arguments_of(folder, output, *SMALL, "--max-steps", "1000")
    done = subprocess.run([sys.executable, str(script), file, *overrides], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["child 3", "child 3"]
    assert steps_of(output) == [1, 2]
    with Registry(reading=True) as registry:
        (run,) = (run for run in registry.all() if run.output_dir == output)
    assert standing(run).status == "STOPPED"
