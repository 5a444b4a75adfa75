"""The list of runs, and the words of `primerl run`: alone, and on a real run in the background."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from end_to_end import primerl, read_lines, steps_of, until
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import run_file
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from primerl.evals.preflight import same_evaluation
from primerl.launch.preflight import output_folder
from primerl.launch.registration import registered, stored_copy
from primerl.launch.resume.position import goes_on_from
from primerl.launch.supervise.lock import in_use
from primerl.models.tiny import write_model
from primerl.runs.registry import Registry, UnknownRunError, config_file
from primerl.runs.standing import standing
from primerl.runs.state import StateError, process_started
from run_helpers import CONFIG, begin, told, write_run

pytestmark = pytest.mark.usefixtures("state")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def test_a_start_is_kept_and_a_second_one_in_the_folder_goes_on_with_it(tmp_path: Path, state: Path) -> None:
    first = begin(tmp_path / "run")
    assert begin(tmp_path / "run") == first
    begin(tmp_path / "other")
    with Registry() as registry:
        assert [run.output_dir.name for run in registry.all()] == ["other", "run"]
        run = registry.find(first[:5])
        registry.end(first, 0)
        assert registry.find(first).exit_code == 0
    assert run.launcher_lives()
    assert run.config.read_text() == CONFIG
    assert (run.environments, run.folder, run.pid) == (["e"], Path.cwd(), os.getpid())
    assert state.stat().st_mode & 0o777 == 0o700
    assert (state / "runs.db").stat().st_mode & 0o777 == 0o600
    # The folder was emptied: what was there is no run any more.
    again = begin(tmp_path / "run", goes_on=False)
    assert again != first
    assert not run.config.parent.exists()
    with Registry() as registry, pytest.raises(UnknownRunError):
        registry.find(first)


def test_unknown_and_ambiguous_ids_name_the_near_ones(tmp_path: Path) -> None:
    with Registry() as registry, pytest.raises(UnknownRunError, match="no run has been started yet"):
        registry.find("abc")
    one, two = begin(tmp_path / "one", name="reverse"), begin(tmp_path / "two", name="reverse")
    with Registry() as registry:
        with pytest.raises(UnknownRunError, match=rf"{two} \(\S+/two\), {one} \(\S+/one\)"):
            registry.find("reverse")
        with pytest.raises(UnknownRunError, match=rf"did you mean .*{one} \(reverse\)"):
            registry.find(one[:-1] + ("0" if one[-1] != "0" else "1"))


def test_a_recycled_process_id_is_not_the_launcher(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with Registry() as registry:
        registry._connection.execute("UPDATE runs SET process_started = 'another boot:1'")
        (run,) = registry.all()
    assert not run.launcher_lives()
    assert process_started(2**22 + 1) is None


def test_status_follows_from_the_lock_and_the_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_id = begin(folder)

    def status() -> str:
        with Registry() as registry:
            return standing(registry.find(run_id)).status

    assert status() == "FAILED"  # it was killed: nobody holds the lock, and nobody said why
    with output_folder.claimed(str(folder), clean=False, kind="rl"):
        assert status() == "PENDING"
        (folder / "run" / "orchestrator.json").write_text("{}")
        assert status() == "RUNNING"
    summary = folder / "run" / "summary.json"
    for code, word in ((0, "COMPLETED"), (130, "STOPPED"), (1, "FAILED")):
        summary.write_text(json.dumps({"exit_code": code, "reason": "why"}))
        assert status() == word
    os.utime(summary, (1, 1))  # of an earlier launcher
    assert status() == "FAILED"
    with Registry() as registry:
        registry.end(run_id, 130)
    assert status() == "STOPPED"


def test_who_looks_does_not_keep_a_launcher_from_its_folder(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            in_use(tmp_path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(100):
            with output_folder.claimed(str(tmp_path), clean=False, kind="rl"):
                assert in_use(tmp_path)
    finally:
        over.set()
        thread.join()


WRITER = """
import sys
from pathlib import Path
from primerl.runs.registry import Registry
number = 0
while True:
    with Registry() as registry:
        folder = Path(sys.argv[1]) / str(number % 50)
        run = registry.begin(folder, "a = 1", goes_on=True, form="full", name="n", model="m", environments=[])
        registry.end(run, 0)
    number += 1
    print(number, flush=True)
"""


def test_a_list_of_the_version_before_is_taken_over(tmp_path: Path, state: Path) -> None:
    run_id = begin(tmp_path / "run")
    with sqlite3.connect(state / "runs.db") as connection:
        connection.execute("ALTER TABLE runs DROP COLUMN kind")
        connection.execute("PRAGMA user_version = 1")
    with Registry() as registry:
        assert [(run.id, run.kind) for run in registry.all()] == [(run_id, "rl")]


@pytest.mark.processes
def test_a_resumed_run_keeps_the_form_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stored copy is in the full form, whatever it was given in."""
    run_id = begin(tmp_path / "run")
    (tmp_path / "run" / "journal").mkdir()
    with Registry() as registry:
        registry._connection.execute("UPDATE runs SET form = 'hosted'")
    forms: list[str] = []
    monkeypatch.setattr("primerl.launch.run.run", lambda config, *, form: forms.append(form) or 0)
    assert main(["run", "resume", run_id, "--max-steps", "9"]) == 0
    assert forms == ["hosted"]


@pytest.mark.processes
def test_a_run_that_was_stopped_before_it_had_begun_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    run_id = begin(output)
    started: list[object] = []
    monkeypatch.setattr("primerl.launch.run.run", lambda config, *, form: started.append(config) or 0)
    for name in ("configs/rl.toml", "logs/orchestrator.log", "run/launcher.lock", "run/secret", "journal/.0.tmp"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    output_folder.check_output_dir(str(output), clean=False, kind="rl", goes_on=output_folder.holds_run)
    assert main(["run", "resume", run_id]) == 0
    assert len(started) == 1
    shutil.rmtree(output / "journal")
    (output / "broadcasts").mkdir()
    (output / "configs" / "eval.toml").touch()
    output_folder.check_output_dir(str(output), clean=False, kind="eval", goes_on=output_folder.holds_run)
    (output / "configs" / "eval.toml").unlink()
    assert main(["run", "resume", run_id]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not empty"):
        output_folder.check_output_dir(str(output), clean=False, kind="rl", goes_on=output_folder.holds_run)
    assert len(started) == 1


SFT = """
output_dir = "tuned"
max_steps = 2
threads = 1
[model.tiny]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
[data]
path = "rows.jsonl"
batch_size = 64
seq_len = 64
[ckpt]
interval = 1
"""


@linux
@pytest.mark.end_to_end
def test_a_fine_tuning_is_a_run_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.toml").write_text(SFT)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    primerl("sft", "@", "sft.toml")
    run = listed()
    assert (run["kind"], run["name"], run["status"], run["step"]) == ("sft", "tuned", "COMPLETED", 2)
    monkeypatch.chdir(tmp_path.parent)  # relative paths in its config begin where it was started
    resumed = primerl("run", "resume", run["id"], "-d", "--max-steps", "3").strip()
    assert resumed == run["id"]
    until(lambda: listed()["status"] == "COMPLETED", 120, "the end")
    assert (listed()["id"], listed()["step"]) == (run["id"], 3)
    last = told("run", "logs", "tuned", "-n", "1000", "--component", "trainer", capsys=capsys)
    assert "step 3" in last
    assert told("run", "metrics", "tuned", "--csv", capsys=capsys).count("\n") == 4
    assert "step_3" in told("run", "checkpoints", "tuned", capsys=capsys)
    assert "is COMPLETED at step 3" in told("run", "stop", "tuned", capsys=capsys)
    assert "deleted" in told("run", "delete", "tuned", "--with-files", "--yes", capsys=capsys)
    assert not (tmp_path / "tuned").exists()


def test_how_a_fine_tuning_stands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config = SFTConfig.model_validate(tomllib.loads(SFT))
    for code, word in ((0, "COMPLETED"), (143, "STOPPED"), (130, "STOPPED"), (1, "FAILED")):
        with (
            output_folder.claimed(str(folder), clean=False, kind="sft"),
            registered(config, folder, print, goes_on=True) as session,
        ):
            session.exit_code = code
            with Registry() as registry:
                (run,) = registry.all()
            assert standing(run).status == "RUNNING"
        with Registry() as registry:
            assert standing(registry.find(run.id)).status == word


def test_an_evaluation_is_a_run_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "measured"
    config = EvalConfig(model="served", base_url="http://e:1/v1", env=[{"id": "a"}], output_dir=str(folder))
    with (
        output_folder.claimed(str(folder), clean=False, kind="eval"),
        registered(config, folder, print, goes_on=False) as session,
    ):
        run_file.write(config)
        (folder / "journal").mkdir()
        (found,) = json.loads(told("run", "list", "--json", capsys=capsys))
        assert (found["kind"], found["status"], found["model"]) == ("eval", "PENDING", "served")
        session.exit_code = 130
    row = told("run", "list", capsys=capsys).splitlines()[-1].split()
    assert row[1:5] == ["measured", "eval", "STOPPED", "-"]
    assert "has measured no environment to its end yet" in told("run", "metrics", "measured", code=2, capsys=capsys)
    line = {"environment": "a", "version": 0, "avg@2": 0.25, "avg@2/low": 0.0, "avg@2/high": 0.5}
    (folder / "evals.jsonl").write_text(json.dumps(line) + "\n")
    assert json.loads(told("run", "metrics", "measured", "--json", capsys=capsys)) == [line]
    shown = told("run", "metrics", "measured", capsys=capsys)
    assert [row.split() for row in shown.splitlines()[-3:]] == [
        ["a/avg@2", "0.25"],
        ["a/avg@2/low", "0"],
        ["a/avg@2/high", "0.5"],
    ]
    part = {**line, "rollouts": 3, "expected": 8, "complete": False}
    (folder / "evals.jsonl").write_text(json.dumps(part) + "\n")
    shown = told("run", "metrics", "measured", capsys=capsys)
    assert shown.splitlines()[-3].startswith("a/avg@2 (3 of 8) ")
    assert "saves no checkpoints" in told("run", "checkpoints", "measured", code=2, capsys=capsys)
    assert told("run", "stop", "measured", capsys=capsys).endswith("is not running: it is STOPPED\n")
    assert goes_on_from(folder) == "with what is not measured yet"
    given: list[list[str]] = []
    monkeypatch.setattr("primerl.cli.evaluation.evaluate", lambda arguments: given.append(arguments) or 0)
    told("run", "resume", "measured", "--timeouts.start-s", "9", capsys=capsys)
    assert given == [["@", str(config_file(found["id"])), "--timeouts.start-s", "9"]]
    stored = EvalConfig.model_validate(tomllib.loads(config_file(found["id"]).read_text()))
    same_evaluation(stored)
    same_evaluation(stored.model_copy(update={"concurrency": 7}))
    with pytest.raises(ConfigError, match=r"^max_tokens is 7, but the evaluation in .* was begun with "):
        same_evaluation(stored.model_copy(update={"max_tokens": 7}))
    assert "deleted" in told("run", "delete", "measured", "--with-files", "--yes", capsys=capsys)


@pytest.mark.processes
def test_two_writers_at_once_one_of_them_killed(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / name)], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            while int(writer.stdout.readline()) < 20:
                pass
        writers[0].kill()
        writers[0].wait()
        assert writers[1].stdout is not None
        before = int(writers[1].stdout.readline())
        until(lambda: int(writers[1].stdout.readline()) > before + 20, 20, "the other to go on")  # type: ignore[union-attr]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    with Registry() as registry:
        runs = registry.all()
        assert registry._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert {run.output_dir.parent.name for run in runs} == {"a", "b"}
    assert all(run.config.read_text() == "a = 1" for run in runs)


def test_a_registry_that_cannot_be_used_warns_and_stops_nothing(tmp_path: Path, state: Path) -> None:
    config = RLConfig.model_validate(tomllib.loads(CONFIG))
    state.mkdir()
    (state / "runs.db").write_text("no database " * 100)
    said: list[str] = []
    with registered(config, tmp_path / "run", said.append, goes_on=False) as session:
        assert session.run_id is None
    assert len(said) == 1
    assert "not in the list of runs" in said[0]
    assert "runs.db" in said[0]
    assert main(["run", "list"]) == 2
    (state / "runs.db").unlink()
    with sqlite3.connect(state / "runs.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError, match="newer version"):
        Registry()


def test_a_start_that_is_refused_changes_nothing_of_what_is_noted(tmp_path: Path) -> None:
    """Else a plain `primerl run resume` would be refused from then on."""
    given = RLConfig.model_validate(tomllib.loads(CONFIG))
    changed = RLConfig.model_validate(tomllib.loads(CONFIG) | {"max_steps": 77})

    def start(config: RLConfig, code: int, *, goes_on: bool) -> None:
        with registered(config, tmp_path / "run", print, goes_on=goes_on) as session:
            session.exit_code = code

    def noted() -> tuple[Any, str]:
        with Registry() as registry:
            (run,) = registry.all()
        return run, run.config.read_text()

    start(given, 130, goes_on=False)
    before = noted()
    start(changed, 2, goes_on=True)
    assert noted() == before
    start(changed, 0, goes_on=True)
    assert "max_steps = 77" in noted()[1]
    assert noted()[0].exit_code == 0


def test_a_start_that_finds_the_run_over_keeps_its_config(tmp_path: Path) -> None:
    given = RLConfig.model_validate(tomllib.loads(CONFIG) | {"trainer": {"external": True}})
    changed = RLConfig.model_validate(tomllib.loads(CONFIG))
    begin(tmp_path / "run", config=stored_copy(given))  # its launcher was killed at the end
    with registered(changed, tmp_path / "run", print, goes_on=True) as session:
        session.exit_code, session.did_nothing = 0, True
    with Registry() as registry:
        (run,) = registry.all()
    assert "external = true" in run.config.read_text()
    assert (run.exit_code, run.ended is None) == (0, False)


def test_a_name_like_the_beginning_of_another_runs_id_is_not_guessed(tmp_path: Path) -> None:
    first = begin(tmp_path / "a")
    second = begin(tmp_path / "b", name=first[:3])
    with Registry() as registry:
        with pytest.raises(UnknownRunError, match="several runs"):
            registry.find(first[:3])
        assert registry.find(first).id == first
        assert registry.find(second).id == second


def test_the_stored_copy_takes_the_settings_of_checkpoints_once() -> None:
    """`primerl run resume ID --ckpt.interval 5` sets one of the two places, and both must not be given."""
    config = RLConfig.model_validate(tomllib.loads(CONFIG) | {"ckpt": {"interval": 3}})
    stored = tomllib.loads(stored_copy(config))
    assert stored["ckpt"] == {"interval": 3}
    assert RLConfig.model_validate(stored | {"ckpt": {"interval": 5}}).trainer.ckpt == config.ckpt.model_copy(
        update={"interval": 5}
    )


def test_the_stored_copy_is_the_config_that_was_given() -> None:
    expected = RLConfig.model_validate(tomllib.loads(CONFIG))
    of_one_start: list[dict[str, Any]] = [
        {"clean_output_dir": True},
        {"dry_run": True},
        {"ckpt": {"interval": 1, "resume_step": -1}},
    ]
    for more in of_one_start:
        config = RLConfig.model_validate(tomllib.loads(CONFIG) | more)
        again = RLConfig.model_validate(tomllib.loads(stored_copy(config)))
        assert again.model_dump() == expected.model_dump()
        assert RLConfig.model_validate(tomllib.loads(stored_copy(again))).model_dump() == expected.model_dump()


@pytest.mark.processes
def test_the_template_passes_once_model_and_environment_are_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "mine", seed=0)
    template = told("run", "init", capsys=capsys)
    filled = template.replace("path/to/model", "models/mine").replace("my-environment", "reverse-text")
    assert told("rl", "init", "--model", "models/mine", "--env", "reverse-text", capsys=capsys) == "".join(
        line for line in filled.splitlines(keepends=True) if not line.startswith("# Fill in")
    )
    (tmp_path / "rl.toml").write_text(filled)
    RLConfig.model_validate(tomllib.loads(filled))
    # What is commented out is sound as well.
    sections = [line.removeprefix("# ") for line in filled.splitlines()[2:] if not line.startswith("# Fill")]
    RLConfig.model_validate(tomllib.loads("\n".join(sections)))
    small = ["--seq-len", "128", "--orchestrator.sampling.max-tokens", "32"]
    assert "everything checked" in told("rl", "run", "rl.toml", "--dry-run", *small, capsys=capsys)
    assert "no runs" in told("run", "list", capsys=capsys)


def test_words_and_near_misses(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'list'?" in told("run", "lst", code=2, capsys=capsys)
    assert "checkpoints" in told("run", "--help", capsys=capsys)
    for word in ("logs", "stop", "resume", "delete", "checkpoints", "metrics"):
        assert "there is no run 'abc'" in told("run", word, "abc", code=2, capsys=capsys)
        assert "usage: primerl run" in told("rl", word, "--help", capsys=capsys)


def test_logs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path / "run")
    logs = tmp_path / "run" / "logs"
    worker = logs / "envs" / "train" / "e" / "env_worker_0.log"
    worker.parent.mkdir(parents=True)
    worker.write_text("working\n")
    (logs / "trainer.log").write_text("".join(f"step {number}\n" for number in range(9)))
    assert told("run", "logs", run, "-n", "2", "--component", "trainer", capsys=capsys) == "step 7\nstep 8\n"
    assert told("run", "logs", run, "--component", "env-worker", capsys=capsys) == "working\n"
    both = told("run", "logs", run, "-n", "1", capsys=capsys)
    assert both == "==> envs/train/e/env_worker_0 <==\nworking\n==> trainer <==\nstep 8\n"
    absent = told("run", "logs", run, "--component", "launcher", code=2, capsys=capsys)
    assert "only a run that was started with -d" in absent
    assert "trainer" in absent


@linux
@pytest.mark.end_to_end
def test_a_run_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path)
    broken = primerl("run", file.name, "-d", "--model.path", "nowhere", code=2)
    assert "model.path (on the command line): there is no folder" in broken
    assert primerl("rl", "list").startswith("no runs")
    assert not (tmp_path / "outputs").exists()
    # What looks after a run is quick, and there is much of it: in this process.
    command = [sys.executable, "-m", "primerl", "rl", "run", file.name, "-d", "--max-steps", "100000"]
    begun = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    run_id = begun.stdout.strip()
    assert "the run's page: http://127.0.0.1:" in begun.stderr
    output = tmp_path / "outputs" / "small"
    follower = subprocess.Popen(
        [sys.executable, "-m", "primerl", "run", "logs", run_id[:4], "-f", "--component", "launcher"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: listed()["status"] == "RUNNING" and read_lines(output / "metrics.jsonl"), 90, "a step")
        pid = listed()["pid"]
        assert os.getsid(pid) == pid
        assert main(["run", "delete", run_id, "--yes"]) == 2
        assert main(["run", "resume", run_id]) == 2
        assert main(["run", "resume", "--max-steps", run_id]) == 2
        assert primerl("run", "stop", run_id).startswith(f"stopped {run_id} after ")
        said, _ = follower.communicate(timeout=30)
    finally:
        follower.kill()
        follower.wait()
        if in_use(output):
            os.kill(listed()["pid"], signal.SIGKILL)
    assert "orchestrator at http://" in said
    *_, stopping, last = said.splitlines()
    assert stopping.startswith("stopping all processes")
    assert last.startswith("interrupted; the same command resumes from ")
    assert process_started(pid) is None
    stopped = listed()
    assert (stopped["status"], stopped["exit_code"]) == ("STOPPED", 130)
    # Beyond what may have been cut already.
    steps = str(stopped["step"] + 6)
    resumed = primerl("rl", "resume", run_id, "--max-steps", steps)
    assert "resuming the run" in resumed
    assert (listed()["status"], listed()["step"], listed()["id"]) == ("COMPLETED", int(steps), run_id)
    assert steps_of(output) == list(range(1, int(steps) + 1))
    saved = json.loads(primerl("run", "checkpoints", run_id, "--json"))
    assert {(entry["step"], entry["kind"], entry["ready"]) for entry in saved} == {
        (int(steps), "checkpoint", True),
        (int(steps), "weights", True),
    }
    header, *rows = primerl("run", "metrics", run_id, "--csv").splitlines()
    assert header.startswith("step,")
    assert len(rows) == int(steps)
    assert primerl("run", "delete", run_id, "--yes", "--with-files").startswith(f"deleted {run_id}")
    assert not output.exists()


def listed() -> dict[str, Any]:
    """The one run, as `primerl run list --json` has it."""
    (run,) = json.loads(primerl("run", "list", "--json"))
    assert isinstance(run, dict)
    assert run["started"] <= time.time()
    return run
