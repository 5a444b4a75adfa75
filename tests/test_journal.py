"""`primerl trace` and `primerl buffer` on the journal of a small run."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import mock_command, running
from primerl._core import Orchestrator, PrimerlError, inspect_buffer, inspect_run
from primerl.cli import main
from primerl.runs.tables import table
from primerl.runs.trace import end_line, report_line
from run_helpers import begin as register
from test_orchestrator_in_process import PATIENCE_S, begin, publish, settings, work


@pytest.fixture(scope="module")
def run(model: Path, mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two groups of two, and asked about while it goes on."""
    output = tmp_path_factory.mktemp("journal") / "run"
    log = output.parent / "engine.log"
    with (
        running("mock", mock_command(mock_binary), None, log) as engine,
        Orchestrator(settings(model, output, engines=[engine.url])) as orchestrator,
    ):
        begin(orchestrator, output)
        worker = threading.Thread(target=work, args=(orchestrator.url,))
        worker.start()
        publish(orchestrator, output, 0)
        for step in (1, 2):
            assert orchestrator.next_batch(step, 0) is not None
            assert main(["trace", str(output), "--check"]) == 0, "while the run goes on"
            publish(orchestrator, output, step)
        worker.join(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not orchestrator.status()["run"]["finished"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    return output


def told(*arguments: str | Path, code: int = 0, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints; a complaint, if it is refused."""
    assert main([str(argument) for argument in arguments]) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def test_the_check_and_the_summary(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((file, file.stat().st_mtime_ns) for file in run.rglob("*"))
    check = told("trace", run, "--check", capsys=capsys)
    assert check.startswith("2 steps, 8 rollouts trained, ")
    assert check.endswith(" events: every invariant holds\n")
    summary = told("trace", run, capsys=capsys)
    assert "2 of 2" in summary
    assert "trained 8" in summary
    assert "weights_published" in summary
    answer = json.loads(told("trace", run, "--json", capsys=capsys))
    assert answer["rollouts"]["trained"] == 8
    assert answer["events"]["weights_published"] == 3
    assert (answer["restarts"], answer["story"]["events_before"]) == (0, 0)
    told("trace", run, "--idle", capsys=capsys)
    told("trace", run, "--dropped", capsys=capsys)
    assert sorted((file, file.stat().st_mtime_ns) for file in run.rglob("*")) == before, "reading writes nothing"


def test_from_a_step_to_its_group_and_a_rollout_and_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = json.loads(told("trace", run, "batch", "2", "--json", capsys=capsys))
    assert step == json.loads(told("trace", run, "step", "2", "--json", capsys=capsys))
    assert (step["rollouts"], len(step["groups"]), sum(step["staleness"].values())) == (4, 2, 4)
    assert step["fetched"][0]["fetched_s"] <= step["published_s"][0] <= step["proved"][0]["proved_s"]
    text = told("trace", run, "step", "2", capsys=capsys)
    assert "fetched by rank 0" in text
    assert "version 2 published" in text
    assert "proved by engine 0" in text

    line = step["groups"][0]["rollouts"][0]
    group = json.loads(told("trace", run, "group", line["group"], "--json", capsys=capsys))
    assert [rollout["ended"] for rollout in group["rollouts"]] == ["trained", "trained"]
    assert group["began_s"] <= group["complete_s"] <= group["cut_s"] == step["cut_s"]
    assert "cut into the batch of step 2" in told("trace", run, "group", line["group"], capsys=capsys)

    rollout = json.loads(told("trace", run, "rollout", line["rollout"], "--json", capsys=capsys))
    assert (rollout["end"]["ended"], rollout["end"]["step"], rollout["worker_name"]) == ("trained", 2, "w")
    (turn,) = rollout["turns"]
    assert (turn["fork"], turn["engines"]) == ("first_turn", [0])
    assert turn["sampled_tokens"] == sum(tokens for _, tokens in turn["versions"]) == line["sampled_tokens"]
    assert [report["reward"] for report in rollout["reports"]] == line["rewards"]
    text = told("trace", run, "rollout", line["rollout"], capsys=capsys)
    assert "first_turn" in text
    assert "trained at step 2" in text


def test_the_published_words_for_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path))
    copy = tmp_path / "copy"  # the list's id is written into the folder
    shutil.copytree(run, copy)
    name = register(copy)
    assert json.loads(told("train", "progress", name, capsys=capsys))["steps_with_samples"] == [1, 2]
    page = json.loads(told("train", "rollouts", name, "--step", "2", "-n", "3", "-p", "2", capsys=capsys))
    assert (page["total"], page["total_pages"], len(page["samples"])) == (4, 2, 1)
    whole = json.loads(told("train", "rollouts", name, "-s", "2", capsys=capsys))["samples"]
    assert whole[3:] == page["samples"]
    step = json.loads(told("trace", run, "step", "2", "--json", capsys=capsys))
    assert [one["rollout"] for one in whole] == [
        one["rollout"] for group in step["groups"] for one in group["rollouts"]
    ]
    found = json.loads(told("train", "distributions", name, capsys=capsys))
    rewards = [reward for one in whole for reward in one["rewards"]]
    assert (found["step"], sum(one["count"] for one in found["bins"])) == (2, len(rewards))
    assert found["bins"][0]["low"] <= min(rewards) <= max(rewards) <= found["bins"][-1]["high"]
    refused = told("train", "rollouts", name, "--step", "9", code=2, capsys=capsys)
    assert "has no step 9; it has 1 to 2" in refused


def test_where_the_time_went_adds_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(told("trace", run, "--idle", "--json", capsys=capsys))
    for states in (answer["trainer"], answer["engines"][0]["states"]):
        assert sum(state["seconds"] for state in states) == pytest.approx(answer["seconds"], abs=1e-4)
        assert sum(state["share"] for state in states) == pytest.approx(1)
    names = {state["state"] for state in answer["trainer"]}
    assert {"busy", "waits/rollouts"} <= names
    assert "serves while rollouts are in flight" in told("trace", run, "--idle", capsys=capsys)


def test_the_buffer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told("buffer", run, capsys=capsys)
    assert "off: pools are only recorded" in text
    answer = json.loads(told("buffer", run, "--example", "task", "3", "--steps", "1", "--json", capsys=capsys))
    assert answer["environments"][0]["examples"] == 10
    assert [step["step"] for step in answer["steps"]] == [2]
    assert answer["example"]["example"] == 3
    assert "example 3: " in told("buffer", run, "--example", "task", "3", capsys=capsys)
    assert "examples 0 to 9" in told("buffer", run, "--example", "task", "10", code=2, capsys=capsys)
    assert "there are: task" in told("buffer", run, "--example", "tusk", "1", code=2, capsys=capsys)
    assert "counted from 0" in told("buffer", run, "--example", "task", "x", code=2, capsys=capsys)


def test_what_cannot_be_told_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it holds steps from 1 to 2" in told("trace", run, "step", "3", code=2, capsys=capsys)
    assert "it holds rollouts from 0 to" in told("trace", run, "rollout", 10**6, code=2, capsys=capsys)
    assert "holds no journal" in told("trace", tmp_path, code=2, capsys=capsys)
    assert "there is no folder" in told("buffer", tmp_path / "none", code=2, capsys=capsys)
    assert "rollout NUMBER" in told("trace", run, "rollout", code=2, capsys=capsys)
    assert "rollout NUMBER" in told("trace", run, "rollout", "1", "--idle", code=2, capsys=capsys)
    assert "invalid choice" in told("trace", run, "rolout", "1", code=2, capsys=capsys)
    assert "'one' is not a number" in told("trace", run, "rollout", "one", code=2, capsys=capsys)


def test_damage_is_named_and_a_broken_promise_fails(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    batch = damaged / "spool" / "step_2" / "rank_0.msgpack"
    content = batch.read_bytes()
    batch.write_bytes(content[:-1])
    assert "step_2/rank_0.msgpack is not the batch" in told("trace", damaged, "--check", code=1, capsys=capsys)
    batch.unlink()
    assert "the batch of step 2 is not in" in told("trace", damaged, "--check", code=1, capsys=capsys)
    answer = json.loads(told("trace", damaged, "--check", "--json", code=1, capsys=capsys))
    assert answer["broken"]["event"] is None
    batch.write_bytes(content)
    log = damaged / "journal" / "000000000000.log"
    whole = log.read_bytes()
    log.write_bytes(whole[:-5])
    assert "every invariant holds" in told("trace", damaged, "--check", capsys=capsys), "a torn tail is read over"
    middle = len(whole) // 2
    log.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert str(log) in told("trace", damaged, "--check", code=2, capsys=capsys)


def test_a_question_that_does_not_exist(run: Path) -> None:
    wrong: list[tuple[Any, ...]] = [("steps",), ("step",), ("check", 3)]
    for question in wrong:
        with pytest.raises(ValueError, match="one of summary"):
            inspect_run(run, *question)
    with pytest.raises(ValueError, match="both, or none"):
        inspect_buffer(run, "task")
    with pytest.raises(PrimerlError, match="holds no journal"):
        inspect_run(run / "journal")


def test_a_failure_is_told_with_its_kind() -> None:
    end = {"step": None, "ended": "failed", "reason": "environment", "error": "tool", "message": "ToolError: no"}
    assert end_line(end) == "failed (environment, error of kind tool): ToolError: no"
    stale = {"step": None, "ended": "stale", "reason": "too_old", "error": None, "message": None}
    assert end_line(stale) == "stale (too_old)"


def test_what_a_worker_wrote_is_shown_as_it_is() -> None:
    """JSON has no NaN, and a name moves no cursor."""
    report = {"trainable": True, "ok": True, "truncated": False, "stop_condition": None, "reward": None}
    shown = report_line({**report, "metrics": {"exact": None, "length": 3.0}})
    assert shown == "reward not a number, exact not a number, length 3"
    (line,) = table(("",), [("\x1b[31mred\nline",)])
    assert line.strip() == "?[31mred?line"


def test_tables_align_numbers_and_words() -> None:
    lines = table(("name", "count"), [("a", 1), ("longer", 100)])
    assert lines == ["  name    count", "  a           1", "  longer    100"]
    assert table(("", ""), [("a", None)]) == ["  a  -"]
