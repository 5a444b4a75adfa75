"""What fails in `primerl eval`: endpoints that are down, hang or let nobody in; rollouts that are measured again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from end_to_end import read_lines
from eval_endpoint import KEY, Endpoint, config, evaluate, of_endpoint, serving
from primerl.evals import greedy, results
from primerl.evals.preflight import measures_again
from primerl.launch.evaluation import line
from primerl.launch.report.evaluations import Evaluated


def rewards(output: Path) -> dict[float | None, int]:
    return dict(Counter(found["reward"] for found in read_lines(output / results.RESULTS)))


@pytest.mark.processes
def test_an_outage_ends_it_and_is_not_measured(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(status=500)) as served:
        down = evaluate(output, *of_endpoint(served), "--timeouts.outage-s", "1")
        assert down.returncode == 1, down.stdout + down.stderr
        assert "the server that is measured (served at" in down.stdout
        assert "status 500" in down.stdout
        assert KEY not in down.stdout + down.stderr
        assert read_lines(output / results.RESULTS) == []
        served.status = 200
        back = evaluate(output, *of_endpoint(served))
        assert back.returncode == 0, back.stdout + back.stderr
    assert Counter(line["reward"] for line in read_lines(output / results.RESULTS)) == {1.0: 4}


@pytest.mark.processes
def test_an_endpoint_that_hangs_ends_it_as_one_that_fails(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(answers=1)) as served:
        # The one that is answered has to be scored within that time.
        hung = evaluate(output, *of_endpoint(served), "--timeouts.outage-s", "5", "--concurrency", "3")
        assert hung.returncode == 1, hung.stdout + hung.stderr
        assert "the server that is measured (served at" in hung.stdout
        assert "it takes requests and says nothing (raise timeouts.outage_s" in hung.stdout
        assert rewards(output) == {1.0: 1}
        served.open.set()
        # More or fewer at a time is no other evaluation.
        back = evaluate(output, *of_endpoint(served), "--concurrency", "2")
        assert back.returncode == 0, back.stdout + back.stderr
    assert rewards(output) == {1.0: 4}


@pytest.mark.processes
@pytest.mark.parametrize("status", [402, 404])
def test_an_endpoint_that_lets_nobody_in_any_more_ends_it(tmp_path: Path, status: int) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(good=2, status=status)) as served:
        shut = evaluate(output, *of_endpoint(served), "--timeouts.outage-s", "1", "--concurrency", "1", "-k", "2")
        assert shut.returncode == 1, shut.stdout + shut.stderr
        assert f"last: status {status}: down, and your key was" in shut.stdout
        assert KEY not in shut.stdout + shut.stderr
        # One that is refused alone may be refused for what is in it.
        lost = {404: {1.0: 2, None: 1}, 402: {1.0: 2}}[status]
        assert rewards(output) == lost
        served.status = 200
        back = evaluate(output, *of_endpoint(served), "-k", "2")
        assert back.returncode == 0, back.stdout + back.stderr
    assert rewards(output).get(1.0, 0) == 8 - lost.get(None, 0)


@pytest.mark.processes
def test_what_failed_is_measured_again_where_that_is_asked_for_or_all_of_it_did(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(status=400)) as served:
        arguments = [*of_endpoint(served), "--concurrency", "1"]
        nothing = evaluate(output, *arguments)
        assert nothing.returncode == 1, nothing.stdout + nothing.stderr
        assert "nothing could be measured; most rollouts failed with environment: " in nothing.stdout
        assert "the same command measures it again" in nothing.stdout
        served.good = len(served.asked) + 2
        some = evaluate(output, *arguments)
        assert some.returncode == 0, some.stdout + some.stderr
        assert "measuring again what has failed" in some.stdout
        assert "warning: 2 of 4 rollouts of 'reverse-text' failed and count with reward 0" in some.stdout
        assert rewards(output) == {1.0: 2, None: 2}
        served.status = 200
        asked = len(served.asked)
        over = evaluate(output, *arguments)
        assert (over.returncode, len(served.asked)) == (0, asked), "it is over"
        again = evaluate(output, *arguments, "--retry-errors")
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(served.asked) == asked + 2
        assert rewards(output) == {1.0: 4}
        assert "warning" not in again.stdout
        once_more = evaluate(output, *arguments, "--retry-errors")
        assert "nothing has failed here that could be measured again" in once_more.stdout
        assert len(served.asked) == asked + 2
    (report,) = read_lines(output / results.EVALS)
    assert (report["failed"], report["measured_again"], report["pass@1"]) == (0, 2, 1.0)
    replaced = read_lines(output / "replaced_evals.jsonl")
    assert [found["failed"] for found in replaced] == [4, 2]
    assert "retry_errors" not in (output / "configs" / "eval.toml").read_text()


@pytest.mark.processes
def test_one_that_is_closed_before_all_has_ended_is_incomplete(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(answers=2)) as served:
        arguments = [*of_endpoint(served), "--concurrency", "1"]
        hung = evaluate(output, *arguments, "--timeouts.outage-s", "2")
        assert hung.returncode == 1, hung.stdout + hung.stderr
        # It has taken longer than that by now.
        closed = evaluate(output, *arguments, "--timeouts.evaluation-s", "1")
        assert closed.returncode == 1, closed.stdout + closed.stderr
        assert "incomplete: of 'reverse-text' 2 of 4 rollouts had not ended by timeouts.evaluation_s" in closed.stdout
        assert " 2 of 4 " in closed.stdout
        found = json.loads((output / results.SUMMARY).read_text())["environments"]["reverse-text"]
        assert (found["complete"], found["unmeasured"], found["rollouts"]) == (False, 2, 2)
        assert evaluate(output, *arguments).returncode == 1, "and stays so"
        served.open.set()
        whole = evaluate(output, *arguments, "--retry-errors")
        assert whole.returncode == 0, whole.stdout + whole.stderr
        assert "incomplete" not in whole.stdout
    assert rewards(output) == {1.0: 4}


@pytest.mark.processes
def test_one_in_which_nothing_has_ended_is_incomplete(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(answers=0)) as served:
        late = evaluate(output, *of_endpoint(served), "--timeouts.evaluation-s", "1")
        assert late.returncode == 1, late.stdout + late.stderr
        assert "nothing could be measured; the same command with --retry-errors measures it again" in late.stdout
        found = json.loads((output / results.SUMMARY).read_text())["environments"]["reverse-text"]
        assert (found["complete"], found["scores"]) == (False, None)
        served.open.set()
        whole = evaluate(output, *of_endpoint(served), "--retry-errors")
        assert whole.returncode == 0, whole.stdout + whole.stderr
    assert rewards(output) == {1.0: 4}


@pytest.mark.processes
def test_a_rollout_whose_time_is_up_names_the_endpoint_it_waited_for(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(answers=2)) as served:
        late = evaluate(output, *of_endpoint(served), "--timeouts.rollout-s", "8", "--concurrency", "4")
        assert late.returncode == 0, late.stdout + late.stderr
        assert "2 of 4 rollouts of 'reverse-text' failed" in late.stdout
    failed = [line for line in read_lines(output / results.RESULTS) if line["error"] is not None]
    assert [line["error"] for line in failed] == ["engine", "engine"]
    for found in failed:
        assert "the environment did not end within" in found["message"]
        assert (
            f"a request to eval.env.reverse-text.client ({served.url}/chat/completions) had had no answer for"
            in (found["message"])
        )


def test_what_is_left_out_or_failed_is_told(tmp_path: Path) -> None:
    report = {"environment": "a", "version": 0, "rollouts": 32, "failed": 1, "avg@1": 0.5, "pass@1": 0.5}
    report |= {"expected": 72, "unmeasured": 40, "complete": False}
    tally = results.Tally(rollouts=32, measured=31)
    tally.errors["engine"] += 1
    summary = {"environments": {"a": tally.summary(report)}}
    assert summary["environments"]["a"]["complete"] is False
    assert "32 of 72" in results.table(summary)
    (tmp_path / results.RESULTS).write_text(
        json.dumps({"environment": "a", "error": "engine", "message": "it broke"}) + "\n"
    )
    failed, left_out = results.warnings(tmp_path, summary)
    assert failed.startswith("warning: 1 of 32 rollouts of 'a' failed and count with reward 0, most with engine: it br")
    assert left_out.startswith("incomplete: of 'a' 40 of 72 rollouts had not ended by timeouts.evaluation_s")


def test_an_evaluation_of_which_nothing_is_known_is_not_measured_again(tmp_path: Path) -> None:
    given = config(output_dir=str(tmp_path), retry_errors=True)
    assert not measures_again(given, tmp_path), "nothing has begun"
    with pytest.raises(ValueError, match="clean_output_dir deletes the evaluation that retry_errors continues"):
        config(retry_errors=True, clean_output_dir=True)


def test_evaluations_that_are_not_complete_are_told_of_once() -> None:
    said: list[str] = []
    whole = {"environment": "a", "version": 0, "rollouts": 72, "expected": 72, "complete": True}
    before = {**whole, "version": 3, "rollouts": 5, "complete": False}
    now = {**before, "version": 6, "rollouts": 32}
    watch = Evaluated(said.append, [whole, before])
    watch.look([whole, before])
    watch.look([whole, before])
    assert said == [], "the start before has told of it"
    watch.look([whole, before, now])
    watch.look([whole, before, now])
    (told,) = said
    assert "the evaluation of 'a' at version 6 was closed with 32 of 72 rollouts" in told


def test_scores_are_told_once() -> None:
    said: list[str] = []
    watch = Evaluated(said.append)
    report = {"environment": "a", "version": 20, "rollouts": 128, "expected": 128, "complete": True, "failed": 3}
    report |= {"mean_reward": 0.53125, "avg@4": 0.53125, "avg@4/low": 0.49, "avg@4/high": 0.572, "pass@4": 0.8}
    other = {**report, "environment": "b", "mean_reward": None, "failed": 0, "pass@4": None}
    for reports in ([], [report], [report, other], [other]):
        watch.look(reports)
    assert said == [
        "evaluation of 'a' at version 20: reward 0.531 (0.490 to 0.572), pass@4 0.800; 128 rollouts, 3 failed",
        "evaluation of 'b' at version 20: no reward; 128 rollouts",
    ]


def test_the_line_says_what_is_waited_for() -> None:
    def wait(who: str, what: str, since_s: float) -> dict[str, Any]:
        return {"who": who, "for": what, "since_s": since_s}

    status: dict[str, Any] = {"rollouts": {"evaluated": 3, "failed": 0, "in_flight": 2}}
    plain = "3 rollouts measured, 0 failed, 2 in flight"
    end = wait("the end", "the evaluation of version 0 to end (3 of 8 rollouts)", 99.0) | {"end": True}
    short = wait("rollout 5", "an answer of eval.env.a.client (http://h/v1)", 3.0)
    assert line({**status, "waits": [end, short]}) == plain
    long = {**short, "since_s": 64.0}
    idle = {**wait("worker env_a_1", "a lease", 80.0), "usual": True}
    told = line({**status, "waits": [end, idle, long]})
    assert told == f"{plain}; rollout 5 waits for an answer of eval.env.a.client (http://h/v1) (64 s)"


def test_greedy_rollouts_of_one_example_are_warned_of_by_name() -> None:
    assert greedy.repeated([("a", 1, 0.0), ("b", 4, 1.0)]) is None
    told = greedy.repeated([("a", 4, 0.0), ("b", 4, 1.0), ("c", 2, 0.0)])
    assert told is not None
    assert told.startswith("warning: 'a', 'c': rollouts_per_example is above 1 at temperature 0 (greedy)")
