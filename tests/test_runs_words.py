"""Commands as `prime` has them, with `primerl` in their place."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from primerl.cli import main
from primerl.cli.evaluation_arguments import written_out
from primerl.cli.run.metrics import _columns
from primerl.config.hosted import HostedConfig, compile_hosted
from primerl.config.schema.rl import RLConfig
from primerl.runs import secrets
from primerl.stores.choice import open_store
from run_helpers import begin, end, told
from store_helpers import adapter, saved

pytestmark = pytest.mark.usefixtures("state")

VALUE = "correct horse battery staple"


@pytest.fixture
def run(tmp_path: Path) -> str:
    folder = tmp_path / "run"
    run = begin(folder)
    end(run)
    for name in (
        "trainer",
        "envs/train/words/env_worker_0",
        "envs/train/words/env_worker_1",
        "envs/eval/held/env_worker_0",
    ):
        log = folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"{name} says {number}\n" for number in range(9)))
    lines = [{"step": step, "reward/all/mean": step / 10} for step in range(1, 8)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_logs(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told("rl", "logs", run, "--tail", "2", "-c", "trainer", capsys=capsys) == "trainer says 7\ntrainer says 8\n"
    assert told("rl", "logs", run, "-c", "trainer", "--all", "--search", "SAYS 3", capsys=capsys) == "trainer says 3\n"
    found = told("rl", "logs", run, "-c", "trainer", "-r", "--search", "[36]$", "--regex", capsys=capsys)
    assert found == "trainer says 3\ntrainer says 6\n"
    assert told("rl", "logs", run, "-c", "trainer", "--search", "[36]$", capsys=capsys) == ""
    refused = told("rl", "logs", run, "--search", "[", "--regex", code=2, capsys=capsys)
    assert "'[' is no regular expression" in refused
    shown = told("rl", "logs", run, "--env", "words", "--tail", "1", capsys=capsys)
    assert [line for line in shown.splitlines() if "says" in line] == [
        f"envs/train/words/env_worker_{number} says 8" for number in (0, 1)
    ]
    assert told("rl", "logs", run, "--env", "words/1", "-n", "1", capsys=capsys).count("says") == 1
    assert told("rl", "logs", run, "--component", "env-server", "-n", "1", capsys=capsys).count("says") == 3
    assert "has no log of 'absent'; there are envs/eval/held" in told(
        "rl", "logs", run, "--env", "absent", code=2, capsys=capsys
    )


@pytest.mark.processes
def test_lists_as_json_and_a_part_of_them(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(newer := begin(tmp_path / "newer"), 1)
    for arguments, ids in (([], [newer, run]), (["-n", "1"], [newer]), (["--status", "completed"], [run])):
        assert [one["id"] for one in json.loads(told("rl", "list", "-o", "json", *arguments, capsys=capsys))] == ids
    assert "invalid choice: 'BOGUS' (choose from PENDING" in told(
        "rl", "list", "--status", "bogus", code=2, capsys=capsys
    ).replace("'PENDING'", "PENDING")
    assert json.loads(told("train", "ls", "-o", "json", "-n", "1", capsys=capsys))[0]["id"] == newer
    assert told("rl", "list", "--status", "running", capsys=capsys) == "none of 2 runs is RUNNING\n"
    assert told("rl", "list", "-o", "table", capsys=capsys).count("\n") == 4, (
        "a header, two runs, and why one has failed"
    )
    folder = tmp_path / "run"
    saved(folder / "checkpoints" / "step_2")
    saved(folder / "checkpoints" / ".step_4.1.tmp")
    for word, steps in (("ready", [2]), ("INCOMPLETE", [4])):
        found = json.loads(told("rl", "checkpoints", run, "--status", word, "-o", "json", capsys=capsys))
        assert [one["step"] for one in found] == steps
    (tmp_path / "empty").mkdir()
    assert isinstance(json.loads(told("rl", "models", str(tmp_path / "empty"), "-o", "json", capsys=capsys)), list)


def test_what_a_run_is_cost_and_saved_as_json(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    summary = {"exit_code": 0, "wall_s": 7200.0, "start_s": 1.0, "run_s": 7000.0, "gpus": 2}
    summary |= {"processes": {"trainer": {"cpu_s": 3500.0}}, "launcher_cpu_s": 100.0}
    (folder / "run" / "summary.json").write_text(json.dumps(summary))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, "progress/num_tokens": 700}) + "\n")
    costs = {"wall_s": 7200.0, "sampled_tokens": 0, "trained_tokens": 700, "cpu_hours": 1.0, "gpu_hours": 4.0}
    assert json.loads(told("rl", "get", run, "--json", capsys=capsys))["cost"] == costs
    assert json.loads(told("rl", "list", "--json", capsys=capsys))[0]["cost"] == costs
    saved(folder / "checkpoints" / "step_2")
    saved(folder / "checkpoints" / "step_4")
    evaluated = {"environment": "held", "version": 2, "avg@1": 0.5, "avg@1/low": 0.25, "avg@1/high": 0.75}
    (folder / "evals.jsonl").write_text(json.dumps(evaluated) + "\n")
    found = json.loads(told("rl", "checkpoints", run, "--json", capsys=capsys))
    assert [one["scores"] for one in found] == [{"held": {"reward": {"mean": 0.5, "low": 0.25, "high": 0.75}}}, {}]
    assert "held 0.500" in told("rl", "checkpoints", run, capsys=capsys)
    logs = json.loads(told("rl", "components", run, "--json", capsys=capsys))
    assert [one["name"] for one in logs][-1] == "trainer"
    assert logs[-1]["bytes"] == (folder / "logs" / "trainer.log").stat().st_size


@pytest.mark.parametrize(
    "command",
    [
        *(f"run {word}" for word in ("list", "get", "components", "checkpoints", "metrics", "rollouts", "progress")),
        *("run distributions", "run models", "run compare", "env list", "env prune", "env secret list", "secret list"),
        *("store list", "deployments list", "buffer", "trace", "doctor", "template check", "models check"),
    ],
)
def test_what_lists_does_so_as_json_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    assert "--json" in capsys.readouterr().out


def test_a_table_of_scores_has_a_column_each() -> None:
    line = {"environment": "a", "metrics": {"exact": 0.5, "length": 3.0}, "reward": None}
    assert _columns(line) == {"environment": "a", "metrics/exact": 0.5, "metrics/length": 3.0, "reward": None}


def test_metrics_of_some_steps(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    def steps(*arguments: str) -> list[int]:
        return [line["step"] for line in json.loads(told("rl", "metrics", run, "--json", *arguments, capsys=capsys))]

    assert steps("--min-step", "5") == [5, 6, 7]
    assert steps("--min-step", "2", "--max-step", "3") == [2, 3]
    assert steps("--max-step", "5", "-n", "2") == [4, 5]
    assert "step 3" in told("rl", "metrics", run, "--max-step", "3", capsys=capsys)
    assert "trained none of these steps" in told("rl", "metrics", run, "--min-step", "9", code=2, capsys=capsys)


@pytest.mark.parametrize(
    "command",
    [
        *("run list -n", "run metrics ID --limit", "run rollouts ID --step 1 -n", "run rollouts ID --step 1 --page"),
        *("run compare ID ID --env e --example 0 -n", "run logs ID -n", "run logs ID --tail", "buffer . --steps"),
    ],
)
def test_none_of_what_is_listed_cannot_be_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "0"]) == 2
    assert "from 1 up" in capsys.readouterr().err


def test_nothing_is_asked_with_force(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("stop", "pause"):
        assert "is not running" in told("rl", word, run, "-f", capsys=capsys)
    assert "holds no run to resume" in told("rl", "restart", run, "-f", code=2, capsys=capsys)
    assert "say so with --yes" in told("rl", "delete", run, code=2, capsys=capsys)
    assert f"deleted {run}" in told("rl", "delete", run, "--force", capsys=capsys)


@pytest.mark.parametrize(
    ("word", "counterpart"),
    [
        ("request", "`primerl models check MODEL`"),
        ("gpus", "`primerl doctor`"),
        ("usage", "`primerl rl metrics ID`"),
        ("metric", "did you mean 'metrics'?"),
        ("hosted", "expected `@ FILE.toml`, or one of init, list"),
    ],
)
def test_a_word_that_is_none_is_told_with_its_counterpart(
    word: str, counterpart: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told("rl", word, "abc", code=2, capsys=capsys)
    assert f"primerl rl: unknown word {word!r}; " in said
    assert counterpart in said
    assert said.count("\n") == 1
    assert f"primerl run: unknown word {word!r}" in told("run", word, code=2, capsys=capsys)


def test_a_template_is_written_to_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote rl.toml" in told("rl", "init", "rl.toml", "--model", "m", "--env", "owner/e", capsys=capsys)
    RLConfig.model_validate(tomllib.loads(Path("rl.toml").read_text()))
    before = Path("rl.toml").read_text()
    assert "is there already; give another name, or --force" in told("rl", "init", "rl.toml", code=2, capsys=capsys)
    assert Path("rl.toml").read_text() == before
    assert "cannot be written" in told("rl", "init", "absent/rl.toml", code=2, capsys=capsys)
    given = ["--hosted", "--model", "m", "--env", "owner/e"]
    told("rl", "init", "rl.toml", "--force", *given, capsys=capsys)
    assert Path("rl.toml").read_text() == told("rl", "init", *given, capsys=capsys)
    plain = tomllib.loads(Path("rl.toml").read_text())
    assert plain["model"] == "m"
    # What is commented out is sound as well, but for a key that belongs to the tables before it.
    lines = Path("rl.toml").read_text().splitlines()
    keys = next(number for number, line in enumerate(lines) if line.startswith("model"))
    config = HostedConfig.model_validate(tomllib.loads("\n".join(line.removeprefix("# ") for line in lines[keys:])))
    full = RLConfig.model_validate(compile_hosted(config))
    assert (full.checkpoint_id, full.env_files, len(full.orchestrator.eval.env)) == ("RUN/step_20", ["secrets.env"], 2)


def test_an_evaluation() -> None:
    assert written_out(["run", "words", "-m", "gpt", "-n", "20", "-r", "1", "-b", "http://e/v1"]) == [
        *("--model", "gpt", "--num-examples", "20", "--rollouts-per-example", "1", "--base-url", "http://e/v1"),
        *("--env", '[{"id": "words"}]'),
    ]
    assert written_out(["run"])[-1] == '[{"id": "run"}]'
    assert written_out(["@", "eval.toml", "--api-key-var", "KEY"]) == ["@", "eval.toml", "--api-key-env", "KEY"]


def test_a_secret_is_created(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def create(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(VALUE.encode())))
        return told(*arguments, code=code, capsys=capsys)

    assert "set KEY" in create("secret", "create", "--name", "KEY")
    assert "replaced KEY" in create("secret", "update", "KEY")
    assert "set OTHER of owner/words" in create("env", "secret", "create", "owner/words", "-n", "OTHER")
    assert secrets.of_environment("owner/words") == {"KEY": VALUE, "OTHER": VALUE}
    said = create("secret", "create", "--name", "KEY", "--value", VALUE, code=2)
    assert "too much on the command line" in said
    assert VALUE not in said
    assert "is given twice" in create("secret", "create", "KEY", "--name", "KEY", code=2)


def test_deployments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no adapter is stored" in told("deployments", "list", capsys=capsys)
    store = open_store()
    for step in (1, 2):
        store.put(adapter(tmp_path / f"adapter_{step}"), "abcd1234", "adapter", step, "digest")
    store.put(saved(tmp_path / "weights"), "abcd1234", "weights", 2, "digest")
    told("deployments", "create", "abcd1234/step_1", "--mark-only", capsys=capsys)
    found = json.loads(told("deployments", "list", "-o", "json", capsys=capsys))
    assert [(one["adapter"], one["deployed"]) for one in found] == [
        ("abcd1234/adapter/step_1", True),
        ("abcd1234/adapter/step_2", False),
    ]
    assert "abcd1234/adapter/step_1  yes" in told("deployments", "list", capsys=capsys)
    told("deployments", "delete", "abcd1234/step_1", capsys=capsys)
    assert store.deployed() == set()
    assert "has no word 'show'; there are list, create" in told("deployments", "show", code=2, capsys=capsys)
