"""Runs compared: what differs, whether a difference is one, and what a reader must not see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docs_pages import shown
from primerl._core import RunCurves
from primerl.launch.preflight import output_folder
from primerl.process.redaction import MARK
from primerl.runs import compare, example, standing
from primerl.runs.compare import differing, flat
from primerl.runs.listings import Listed, UnknownExampleError
from primerl.runs.registry import Registry
from run_helpers import begin, end, told

pytestmark = pytest.mark.usefixtures("state")


def test_only_what_differs_is_told_and_no_secret() -> None:
    def config(rate: float, key: str) -> dict[str, Any]:
        env = {"id": "task", "env_vars": {"HOME_PAGE": key}, "api_key_env": "KEY"}
        return {
            "model": {"path": "m"},
            "trainer": {"optim": {"lr": rate}},
            "wandb": {"api_key": key},
            "env": [env, {"id": "task", "weight": rate}],
        }

    first, second = flat(config(1e-5, "sk-first-secret")), flat(config(1e-6, "sk-second-secret"))
    assert differing([first, second]) == [
        {"key": "trainer.optim.lr", "values": [1e-5, 1e-6]},
        {"key": "env[1].weight", "values": [1e-5, 1e-6]},
    ]
    assert (first["wandb.api_key"], first["env[task].env_vars.HOME_PAGE"]) == (MARK, MARK)
    assert first["env[task].api_key_env"] == "KEY"
    assert differing([first, {}])[0] == {"key": "model.path", "values": ["m", None]}


def line(version: int, reward: float, *, complete: bool = True) -> dict[str, Any]:
    ends = {"avg@2/low": reward - 0.05, "avg@2/high": reward + 0.05}
    more = {"avg@2": reward, "pass@2": reward, **ends}
    return {
        "environment": "math",
        "version": version,
        "rollouts": 8,
        "complete": complete,
        "mean_reward": reward,
        **more,
    }


def with_examples(folder: Path, one: dict[str, Any], by_key: dict[str, float], **others: Any) -> None:
    """The file that belongs to a line, as the orchestrator writes it: scores by key."""
    content = {"rollouts": one["rollouts"], "mean_reward": one["mean_reward"], "examples": list(range(len(by_key)))}
    content |= {"keys": list(by_key), "scores": {"avg@2": list(by_key.values())}, **others}
    file = folder / "evaluations" / f"v{one['version']}" / "math.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(content))


def trained(folder: Path, lines: list[dict[str, Any]], *, seed: int = 1) -> str:
    run = begin(folder, name=folder.name, config=f'seed = {seed}\n[monitors]\napi_key = "sk-secret-{seed}"\n')
    metrics = [{"step": step, "reward/all/mean": step / 10, "progress/num_tokens": 100 * step} for step in range(1, 8)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in metrics))
    (folder / "evals.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    summary = {"exit_code": 0, "wall_s": 7200.0, "start_s": 1.0, "run_s": 7000.0, "gpus": 2}
    summary |= {"processes": {"trainer": {"cpu_s": 3500.0}}, "launcher_cpu_s": 100.0}
    (folder / "run" / "summary.json").write_text(json.dumps(summary))
    end(run)
    return run


def test_runs_are_compared_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trained(tmp_path / "first", [line(0, 0.2), line(4, 0.3)])
    # The newest was closed before its end: it is not compared.
    second = trained(tmp_path / "second", [line(4, 0.5), line(7, 0.9, complete=False)], seed=2)
    (command,) = shown(__file__, "docs/dashboard.md")
    printed = told(*command[1:], capsys=capsys)
    assert "0.300 [0.250, 0.350]" in printed
    assert "0.500 [0.450, 0.550], +0.200 [+0.129, +0.271] significant" in printed
    assert "0.500, +0.200\n" in printed, "pass@2 has no interval"
    assert "GPU hours" in printed
    assert "sk-secret" not in printed
    found = json.loads(told("run", "compare", first, second, "--json", capsys=capsys))
    assert found["config"] == [{"key": "seed", "values": [1, 2]}]
    one = found["runs"][0]
    assert (one["id"], one["reward"], one["problem"]) == (first, pytest.approx(0.5), None)
    assert one["cost"] == {
        "wall_s": 7200,
        "sampled_tokens": 0,
        "trained_tokens": 700,
        "cpu_hours": 1.0,
        "gpu_hours": 4.0,
    }


def test_runs_that_measured_the_same_examples_are_compared_by_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardness = {f"key-{number}": number / 40 for number in range(40)}
    before, after = line(4, 0.5), line(4, 0.55)
    first, second = trained(tmp_path / "first", [before]), trained(tmp_path / "second", [after])
    with_examples(tmp_path / "first", before, hardness)
    # In another order, since another seed made it; each is 0.04 or 0.06 better.
    better = {key: score + 0.05 + 0.01 * (-1) ** at for at, (key, score) in enumerate(hardness.items())}
    with_examples(tmp_path / "second", after, dict(reversed(better.items())))
    found = json.loads(told("run", "compare", first, second, "--json", capsys=capsys))
    reward, passed = found["evaluations"]
    assert reward["score"] == "reward"
    difference = reward["differences"][1]
    assert (difference["test"], difference["pairs"], difference["unpaired"]) == ("paired_t", 40, None)
    assert difference["by"] == pytest.approx(0.05)
    assert difference["p"] < 1e-20
    assert difference["significant"] is True
    assert 0.046 < difference["low"] < 0.05 < difference["high"] < 0.054
    # Of pass@2 there are none, so it is compared by the intervals.
    other = passed["differences"][1]
    assert (other["test"], other["p"], other["unpaired"]) == (
        "intervals",
        None,
        "scores of single examples were not kept",
    )
    printed = told("run", "compare", first, second, capsys=capsys)
    assert "+0.050 [+0.047, +0.053] significant (p " in printed
    assert ", 40 pairs)" in printed


@pytest.mark.parametrize(
    ("keys", "others", "why"),
    [
        ([f"key-{number}" for number in range(5, 15)], {}, None),
        ([f"key-{number}" for number in range(6, 16)], {}, "4 of 10 examples are the same"),
        ([f"other-{number}" for number in range(10)], {}, "0 of 10 examples are the same"),
        ([None] * 10, {}, "scores of single examples were not kept"),
        # Of another line: an evaluation that was measured again, while it is looked at.
        ([f"key-{number}" for number in range(10)], {"mean_reward": 0.1}, "scores of single examples were not kept"),
        ([f"key-{number}" for number in range(10)], {"keys": 3}, "scores of single examples were not kept"),
        ([f"key-{number}" for number in range(10)], {"scores": []}, "scores of single examples were not kept"),
    ],
)
def test_only_the_same_examples_are_paired(
    tmp_path: Path, keys: list[Any], others: dict[str, Any], why: str | None
) -> None:
    before, after = line(4, 0.5), line(4, 0.6)
    with_examples(tmp_path / "first", before, {f"key-{number}": number / 10 for number in range(10)})
    listed = {"keys": keys, "scores": {"avg@2": [number / 20 for number in range(10)]}, **others}
    with_examples(tmp_path / "second", after, {}, **listed)
    (reward, _) = compare.side_by_side([[before], [after]], [tmp_path / "first", tmp_path / "second"])
    difference = reward["differences"][1]
    assert difference["unpaired"] == why
    assert difference["pairs"] == (5 if why is None else None)


def test_an_example_that_is_listed_twice_is_two(tmp_path: Path) -> None:
    one = line(4, 0.5)
    keys = ["same", "same", "other"]
    with_examples(tmp_path, one, {}, keys=keys, scores={"avg@2": [1.0, 0.0, None]})
    found = compare.examples_of(tmp_path, one, 4)
    assert found is not None
    assert found.of("avg@2") == {("same", 1): 1.0, ("same", 2): 0.0}


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trained(tmp_path / "first", [line(4, 0.3)])
    damaged = trained(tmp_path / "damaged", [line(4, 0.3)])
    with (tmp_path / "damaged" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew\n[]\n{"step": 10}\n{"step":')
    with (tmp_path / "damaged" / "evals.jsonl").open("a") as file:
        file.write("?\n")
    (tmp_path / "damaged" / "run" / "summary.json").write_text("[3")
    gone = trained(tmp_path / "gone", [])
    shutil.rmtree(tmp_path / "gone")
    found = json.loads(told("run", "compare", first, damaged, gone, "--json", capsys=capsys))
    problems = [one["problem"] for one in found["runs"]]
    assert problems[0] is None
    assert problems[1] == (
        "its metrics.jsonl is damaged: 2 lines, the first of them line 8, are not as a run writes them, and omitted, "
        "2 steps are missing, the first of them 8, it ends within a line, which is omitted; "
        "its evals.jsonl is damaged: line 2 is not as a run writes it, and omitted"
    )
    assert problems[2] == f"its folder {tmp_path / 'gone'} is gone"
    assert [one["reward"] for one in found["runs"]] == [pytest.approx(0.5), pytest.approx(0.65), None]
    assert found["runs"][1]["cost"]["wall_s"] is None
    printed = told("run", "compare", first, damaged, gone, capsys=capsys)
    assert f"{damaged}: its metrics.jsonl is damaged: 2 lines" in printed


def test_metrics_that_were_cut_are_named_once_the_run_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, cut = trained(tmp_path / "first", []), trained(tmp_path / "cut", [])
    summary = tmp_path / "cut" / "run" / "summary.json"
    known = {"status": {"run": {"published_version": 9, "step": 9}}}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | known))

    def problem() -> str | None:
        return json.loads(told("run", "compare", first, cut, "--json", capsys=capsys))["runs"][1]["problem"]

    assert problem() == "its metrics.jsonl is damaged: it ends with step 7 of 9"
    # It was stopped after it had resumed from a checkpoint: the lines after that are dropped, the policies are not.
    finished = summary.read_text()
    summary.write_text(json.dumps(json.loads(finished) | {"exit_code": 130}))
    assert problem() is None
    summary.write_text(finished)
    begin(tmp_path / "cut", name="cut")
    output = str(tmp_path / "cut")
    with output_folder.claimed(output, clean=False, kind="rl"), (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        # It is being written.
        file.write('{"step": 8}\n{"step": 9}\n{"st')
        file.flush()
        assert problem() is None


def test_a_summary_is_read_once_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trained(tmp_path / "first", [])
    with Registry(reading=True) as registry:
        run = registry.find(first)
    read = []
    monkeypatch.setattr(standing, "json", SimpleNamespace(loads=lambda text: read.append(text) or json.loads(text)))
    found = [standing.summary_of(run) for _ in range(3)]
    assert len(read) == 1
    file = tmp_path / "first" / "run" / "summary.json"
    file.write_text(json.dumps({**(found[0] or {}), "exit_code": 130}))
    again = standing.summary_of(run)
    assert again is not None
    assert (again["exit_code"], len(read)) == (130, 2)


def test_what_a_model_was_asked_and_said_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = trained(tmp_path / "first", []), trained(tmp_path / "second", [])
    rollout = {"step": 1, "status": "done", "reward": 1.0, "sampled_tokens": 3, "answer": "yes\x1b[2J"}
    asked = {"rollouts": [rollout | {"prompt": "a\tb\x1b]0;title\x07\r\nsecond"}]}
    monkeypatch.setattr(example, "rollouts_of", lambda *_: {"runs": {first: asked}, "problems": {}})
    printed = told("run", "compare", first, second, "--env", "math", "--example", "1", capsys=capsys)
    assert printed.startswith("example 1 of 'math':\n  a       b?]0;title?\n  second\n")
    assert "yes?[2J" in printed
    assert all(line.isprintable() for line in printed.splitlines())


def test_an_environment_without_examples_has_no_numbers() -> None:
    with pytest.raises(UnknownExampleError) as caught:
        Listed([], 0).check("task", 3)
    assert str(caught.value) == "there is no example 3: environment 'task' has none"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["first"], "expected from 2 to 8 runs, not 1"),
        (["first", "first"], "given twice"),
        (["first", "unknown"], "no run 'unknown'"),
        (["neither", "first", "nor"], "no run 'neither'; `primerl run list` lists them there is no run 'nor'"),
    ],
)
def test_what_cannot_be_compared(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "first", [])
    assert said in " ".join(told("run", "compare", *given, code=2, capsys=capsys).split())


def test_a_checkpoint_has_the_scores_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_4" / "state.pt").write_bytes(b"12345")
    (row,) = compare.checkpoints(tmp_path, [line(3, 0.1), line(4, 0.3), {"environment": "math"}])
    assert (row["step"], row["kinds"], row["ready"], row["bytes"]) == (4, ["checkpoint"], True, 5)
    assert row["scores"]["math"]["reward"] == {"mean": 0.3, "low": 0.25, "high": 0.35}


def test_a_line_that_is_no_evaluation_is_left_out(tmp_path: Path) -> None:
    lines = ["[]", '{"environment": 3}', '{"environment": "a", "mean_reward": null, "avg@1": "x"}', "{"]
    (tmp_path / "evals.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = compare.evaluations_of(RunCurves(tmp_path))
    assert compare.scores(found) == {}
