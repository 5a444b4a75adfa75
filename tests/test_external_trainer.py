"""A run whose trainer is a script of the user's: what the launcher says of it, and runs that continue after kills."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import primerl as primerl_package
import pytest
import torch
from end_to_end import REPOSITORY, Started, arguments_of, launch, read_lines, steps_of, until
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import load_run
from primerl.launch import external_trainer
from primerl.launch.external_trainer import MARGIN_S, ExternalTrainer
from primerl.launch.preflight.output_folder import claimed
from primerl.launch.supervise.failures import RunFailedError
from primerl.models.tiny import TinyConfig, write_model
from primerl.own_trainer import connection
from primerl.own_trainer.checkpoints import ScriptCheckpoints
from primerl.runs.costs import cost
from primerl.runs.registry import Registry
from primerl.runs.standing import standing
from primerl.train.checkpoint.state import CheckpointError, Checkpoints
from primerl.train.loop import client
from transformers import AutoModelForCausalLM

FILE = str(REPOSITORY / "examples" / "reverse-text" / "rl-ci.toml")
SCRIPT = REPOSITORY / "examples" / "bring-your-own-trainer" / "connected.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is learnt does not matter here."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    return folder


# The keys


def test_a_word_is_short_for_the_key() -> None:
    for given in (["--trainer", "external"], ["--trainer.external"]):
        assert load_run(["@", FILE, *given], program="primerl rl").trainer.external
    assert not load_run(["@", FILE], program="primerl rl").trainer.external


@pytest.mark.parametrize(
    "key",
    [
        ("trainer.model.lora.rank", "4"),
        ("trainer.weights.transport", "collective"),
        ("checkpoint_id", "run/step_3"),
        ("slurm.partition", "gpu"),
    ],
)
def test_what_a_script_does_by_itself_is_refused_by_its_key(key: tuple[str, str]) -> None:
    name, value = key
    with pytest.raises(
        ConfigError, match=f"{name.removesuffix('.partition').removesuffix('.rank')} .*trainer.external"
    ):
        load_run(["@", FILE, "--trainer", "external", f"--{name}", value], program="primerl rl")


# What the launcher says


class Watched:
    """The script as the launcher sees it, of statuses that are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.told: list[tuple[float, str]] = []
        monkeypatch.setattr(external_trainer.time, "monotonic", lambda: 0.0)
        monkeypatch.setattr(
            external_trainer.orchestrator_status,
            "trainer_starts",
            lambda url, within_s, why: self.told.append((within_s, why)),
        )
        config = load_run(["@", FILE, "--trainer", "external", "--timeouts.join-s", "100"], program="primerl rl")
        self.external = ExternalTrainer(config, Path("/runs/a b"), ["2"], self.said.append)

    def waits(self, now: float, **trainer: Any) -> bool:
        status = {
            "run": {"max_steps": 5, "published_version": trainer.pop("published", 1)},
            "trainer": {"last_seen_s": 0.0, "process": {"pid": 7, "host": "here"}, **trainer},
        }
        return self.external.waits(status, "http://127.0.0.1:1", now)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_the_script_is_announced_with_the_gpus_that_are_left(watched: Watched) -> None:
    text = watched.external.announcement()
    assert "CUDA_VISIBLE_DEVICES=2 python SCRIPT" in text
    assert "primerl.connect('/runs/a b')" in text
    assert "timeouts.join_s = 100 s" in text


def test_a_script_that_does_not_come_ends_the_run(watched: Watched) -> None:
    assert watched.waits(99.0, last_seen_s=None)
    with pytest.raises(RunFailedError, match=r"the training script has not come, .*timeouts\.join_s = 100 s"):
        watched.waits(101.0, last_seen_s=None)


def test_a_script_that_falls_silent_is_named_and_waited_for(watched: Watched) -> None:
    assert not watched.waits(1.0, silent_s=0.5, doing="training")
    assert watched.said == ["the training script trains: process 7 on here"]
    assert not watched.waits(9.0, silent_s=8.0, doing="training")
    assert watched.waits(12.0, silent_s=11.0, doing="training")
    assert watched.told == [(100.0 + MARGIN_S, "has been silent for 11 s")]
    assert "process 7 on here) has been silent for 11 s; start it again" in watched.said[-1]
    # The orchestrator forgets the one that was silent.
    assert watched.waits(20.0, silent_s=None, doing="starting again")
    assert len(watched.told) == 1
    assert not watched.waits(30.0, silent_s=1.0, doing="preparing", process={"pid": 8, "host": "here"})
    assert watched.said[-1] == "the training script trains: process 8 on here"
    assert watched.waits(50.0, silent_s=11.0, doing="preparing")
    with pytest.raises(RunFailedError, match="has been silent for 11 s, and the run has waited"):
        watched.waits(151.0, silent_s=None, doing="starting again")


def test_a_script_that_leaves_early_is_named(watched: Watched) -> None:
    assert not watched.waits(1.0, silent_s=0.5, doing="training")
    # It has said goodbye, and the orchestrator knows of no process any more.
    assert watched.waits(2.0, silent_s=None, doing="finished", process=None)
    assert "the training script (process 7 on here) has left before the run was over, or has" in watched.said[-1]


def test_a_script_that_leaves_when_all_is_trained_is_not(watched: Watched) -> None:
    assert not watched.waits(1.0, silent_s=0.5, doing="training")
    assert not watched.waits(2.0, silent_s=None, doing="finished", published=5)
    assert len(watched.said) == 1


def test_an_orchestrator_that_was_started_again_hears_of_it_first(watched: Watched) -> None:
    assert not watched.waits(1.0, silent_s=0.5, doing="training")
    assert not watched.waits(5.0, last_seen_s=None, doing="")
    assert not watched.waits(7.0, silent_s=0.1, doing="training")
    assert not watched.waits(20.0, last_seen_s=None, doing="")
    assert watched.waits(31.0, last_seen_s=None, doing="")
    assert "has not come back since the orchestrator was started again" in watched.said[-1]


def test_one_without_heartbeats_is_not_called_by_the_process_before(watched: Watched) -> None:
    assert not watched.waits(1.0, silent_s=0.5, doing="training")
    assert watched.waits(2.0, silent_s=None, doing="finished", process=None)
    assert not watched.waits(3.0, silent_s=None, doing="", waiting=True, process=None)
    assert watched.said[-1] == "the training script trains: it sends no heartbeats"


def test_a_script_without_heartbeats_need_not_send_any(watched: Watched) -> None:
    assert watched.waits(1.0, last_seen_s=0.0, doing="", waiting=False)
    assert not watched.waits(2.0, last_seen_s=0.0, doing="", waiting=True)
    assert not watched.waits(500.0, last_seen_s=498.0, doing="", waiting=False)


# Checkpoints of a script


def test_checkpoints_are_kept_proved_and_told_apart(tmp_path: Path) -> None:
    checkpoints = ScriptCheckpoints(tmp_path, 2, 4)
    assert checkpoints.load("cpu") is None
    oldest = [checkpoints.save(step, {"step": step, "tensor": torch.full((2,), float(step))}) for step in range(3, 8)]
    assert oldest == [3, 3, 4, 5, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_4", "step_6", "step_7"]
    found = checkpoints.load("cpu")
    assert found is not None
    step, state = found
    assert (step, state["step"], state["tensor"].tolist()) == (7, 7, [7.0, 7.0])
    with pytest.raises(CheckpointError, match="saved by a training script"):
        Checkpoints(tmp_path, 2).newest()
    file = tmp_path / "checkpoints" / "step_7" / "script" / "state.pt"
    file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    with pytest.raises(
        CheckpointError, match=r"script/state\.pt; delete .*step_7 to resume from the checkpoint before"
    ):
        checkpoints.load("cpu")
    shutil.rmtree(tmp_path / "checkpoints" / "step_7")
    found = checkpoints.load("cpu")
    assert found is not None
    assert found[0] == 6
    (tmp_path / "checkpoints" / "step_9" / "trainer").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="step_9 was not saved by a training script"):
        checkpoints.load("cpu")


def test_what_cannot_be_pickled_safely_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoints = ScriptCheckpoints(tmp_path, 1, None)
    checkpoints.save(1, {"step": 1})
    with pytest.raises(Exception, match=r"lambda|pickle"):
        checkpoints.save(2, {"function": lambda: 0})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


# Without a run


def test_a_folder_in_which_no_run_listens_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"there is no folder .*nothing, after 0 s of waiting; start it with"):
        primerl_package.connect(tmp_path / "nothing", wait_s=0.0)


def test_a_run_that_is_over_and_a_folder_by_another_name_are_named_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "outputs" / "own"
    (folder / "run").mkdir(parents=True)

    def named(folder: Path) -> str:
        caplog.clear()
        with pytest.raises(RunFailedError) as raised:
            primerl_package.connect(folder, wait_s=0.01)
        (warning,) = caplog.messages
        assert warning.endswith(": waiting for it to be started, for at most 0 s")
        assert str(raised.value).startswith(warning.partition(": waiting")[0])
        return warning

    assert f"no run listens in {folder}:" in named(folder)
    assert f"there is no folder {tmp_path / 'outputs' / 'onw'} (did you mean {folder}?)" in named(
        tmp_path / "outputs" / "onw"
    )
    summary = folder / "run" / "summary.json"
    summary.write_text(json.dumps({"exit_code": 0, "reason": "finished"}))
    assert f"the run in {folder} has trained all its steps; it needs a larger --max-steps" in named(folder)
    summary.write_text(json.dumps({"exit_code": 1, "reason": "engine died\nthe end of its log:\n  no memory"}))
    assert f"the run in {folder} has ended (engine died)" in named(folder)
    with claimed(str(folder), clean=False, kind="rl"):
        assert f"the run in {folder} does not listen yet" in named(folder)
    # A session that another machine has begun since.
    (folder / "run" / "orchestrator.json").write_text("{}")
    os.utime(summary, (0, 0))
    assert f"no run listens in {folder}:" in named(folder)


def test_a_folder_whose_parent_is_closed_is_named_and_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Path] = []

    def closed(folder: Path) -> Any:
        asked.append(folder)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", closed)
    monkeypatch.setattr(connection, "POLL_S", 0.0)
    with pytest.raises(RunFailedError, match=rf"there is no folder {tmp_path / 'own'}, after 0.05 s of waiting"):
        primerl_package.connect(tmp_path / "own", wait_s=0.05)
    # With the reminder and the end, whatever the number of looks.
    assert asked == [tmp_path, tmp_path]
    assert len(caplog.messages) == 1
    look = Path.stat

    def shut(path: Path, **how: Any) -> os.stat_result:
        return closed(path) if path == tmp_path / "own" else look(path, **how)

    monkeypatch.setattr(Path, "stat", shut)
    with pytest.raises(RunFailedError, match=r"own cannot be looked at \(Permission denied\), after 0 s"):
        primerl_package.connect(tmp_path / "own", wait_s=0.0)


def test_an_error_of_the_input_shows_the_line_of_the_script_and_the_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import primerl\n\nprimerl.Run({"max_stepz": 3})\n')
    with pytest.raises(ConfigError) as raised:
        runpy.run_path(str(script))
    told = traceback.format_exception_only(raised.value)[0]
    assert told.startswith("primerl.ConfigError: ")
    assert "max_stepz: unknown key; did you mean 'max_steps'?" in told
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert len(files) - files.index(str(script)) == 2, files
    assert primerl_package.ConfigError is ConfigError
    assert primerl_package.RunFailedError is RunFailedError


def test_an_orchestrator_that_is_gone_is_named_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    orchestrator = client.OrchestratorClient("http://127.0.0.1:1", 100.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(orchestrator._leaving, "wait", lambda pause: now.__setitem__(0, now[0] + pause))
    with pytest.raises(client.OrchestratorError, match="did not answer /trainer/resume for 100 s"):
        orchestrator.resume(0)
    assert len(caplog.messages) == 4
    assert caplog.messages[0].endswith("trying again for 100 s")


# Whole runs

SMALL = ("--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "16", "--orchestrator.max-async-level", "1")
EXTERNAL = (*SMALL, "--trainer", "external", "--ckpt.interval", "2")


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_the_same_commands_resume_after_kills(
    model: Path, tmp_path: Path, runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output, steps = tmp_path / "run", 14

    def train() -> subprocess.Popen[str]:
        with (tmp_path / "script.log").open("a", encoding="utf-8") as log:
            runs.append(
                script := subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(output)], stdout=log, stderr=log, text=True
                )
            )
        return script

    def run() -> Started:
        runs.append(one := launch(model, output, *EXTERNAL, "--max-steps", str(steps)))
        one.note_mark()
        return one

    def reaches(one: Started, script: subprocess.Popen[str], step: int) -> None:
        def is_there() -> bool:
            assert one.launcher.poll() is None, one.ended(5)
            assert script.poll() is None, (tmp_path / "script.log").read_text(encoding="utf-8")
            return one.steps() >= step

        until(is_there, 120, f"step {step}")

    # The script first: it waits for the run.
    script, first = train(), run()
    reaches(first, script, 3)
    script.kill()
    script.wait()
    script = train()
    reaches(first, script, 5)
    orchestrator = first.pid_of("orchestrator")
    assert orchestrator is not None
    os.kill(orchestrator, signal.SIGKILL)
    reaches(first, script, 8)
    # All at once.
    first.launcher.kill()
    script.kill()
    script.wait()
    until(lambda: first.left() == [], 20, "all processes to end")

    def sampled() -> int:
        assert main(["trace", str(output), "--dropped", "--json"]) == 0
        return int(json.loads(capsys.readouterr().out)["sampled_tokens"])

    before_last = sampled()
    last = run()
    script = train()
    code, text = last.ended(240)
    assert code == 0, text
    assert script.wait(timeout=30) == 0, (tmp_path / "script.log").read_text(encoding="utf-8")
    for file in ("steps.jsonl", "metrics.jsonl"):
        assert [line["step"] for line in read_lines(output / file)] == list(range(1, steps + 1)), file
    assert all("optim/grad_norm" in line for line in read_lines(output / "metrics.jsonl"))
    assert main(["trace", str(output), "--check"]) == 0
    assert f"{steps} steps" in capsys.readouterr().out
    assert [path.name for path in (output / "checkpoints").iterdir()] == [f"step_{steps}"]
    trained = AutoModelForCausalLM.from_pretrained(output / "model").state_dict()
    found = ScriptCheckpoints(output, 1, None).load("cpu")
    assert found is not None
    assert all(torch.equal(tensor, trained[name]) for name, tensor in found[1]["model"].items())
    # What was sampled before the kills is counted, too, up to the launcher's last look at the run.
    summary = json.loads((output / "run" / "summary.json").read_text())
    assert summary["sampled_before"] >= before_last > 0
    assert before_last < cost(output)["sampled_tokens"] == summary["status"]["run"]["sampled_tokens"]


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_script_that_is_gone_is_named_and_then_missed(model: Path, tmp_path: Path, runs: list[Any]) -> None:
    output = tmp_path / "run"
    runs.append(run := launch(model, output, *EXTERNAL, "--max-steps", "100000", "--timeouts.join-s", "20"))
    run.note_mark()
    script = subprocess.Popen([sys.executable, str(SCRIPT), str(output)], stdout=subprocess.DEVNULL)
    runs.append(script)
    until(lambda: run.steps() >= 1 or run.launcher.poll() is not None, 120, "a step")
    assert run.launcher.poll() is None, run.ended(5)
    script.kill()
    script.wait()
    code, text = run.ended(90)
    assert code == 1, text
    assert f"the training script (process {script.pid} on " in text
    assert "the run has failed: the training script has been silent for" in text
    assert run.left() == []


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_run_with_a_trainer_takes_no_script(model: Path, tmp_path: Path, runs: list[Any]) -> None:
    output = tmp_path / "run"
    runs.append(run := launch(model, output, *SMALL, "--max-steps", "100000"))
    run.note_mark()
    with pytest.raises(RunFailedError, match="has a trainer of its own; start it with `--trainer external`"):
        primerl_package.connect(output, wait_s=120.0)


EXAMPLES = REPOSITORY / "examples" / "bring-your-own-trainer"


SKYRL = os.environ.get("PRIMERL_TEST_SKYRL")
"""A Python that has SkyRL and what primerl needs without its extras: the two pin different versions of transformers."""


def example(name: str, *arguments: str, python: str = sys.executable) -> None:
    """Trains two steps."""
    # Another virtualenv has no primerl of its own.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")} if python != sys.executable else None
    command = [python, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1", "2"]


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("with_accelerate.py", "loss/mean"),
        ("with_rl_trainer.py", "reward/all/mean"),
        ("with_rllm_stages.py", "optim/grad_norm"),
        ("with_skyrl.py", "clip_ratio"),
    ],
)
def test_examples_of_other_libraries_train_in_their_own_process(
    name: str, metric: str, model: Path, tmp_path: Path, runs: list[Any]
) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 80
    if name == "with_skyrl.py" and SKYRL is None:
        pytest.skip("PRIMERL_TEST_SKYRL names no Python with SkyRL")
    output = tmp_path / "connected"
    runs.append(run := launch(model, output, *SMALL, "--trainer", "external", "--max-steps", "2"))
    run.note_mark()
    example(name, str(output), python=(SKYRL or "") if name == "with_skyrl.py" else sys.executable)
    assert run.ended(60)[0] == 0
    assert all(metric in line for line in read_lines(output / "metrics.jsonl"))


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_examples_of_other_libraries_train_in_the_process_of_the_run(model: Path, tmp_path: Path) -> None:
    _, file, *overrides = arguments_of(model, tmp_path / "in-process", *SMALL, "--max-steps", "2")
    example("with_trl.py", file, *overrides)


IN_PROCESS = """
import sys
import primerl
from transformers import AutoModelForCausalLM

with primerl.Run(*sys.argv[1:]) as run:
    policy = AutoModelForCausalLM.from_pretrained(run.model_path)
    if (state := run.restore()) is not None:
        policy.load_state_dict(state["model"])
        print("resumed after", state["step"])
    run.publish(policy)
    for batch in run.batches():
        run.publish(policy, metrics={"optim/lr": 0.0})
        if run.checkpoint_due:
            run.save({"step": batch.step, "model": policy.state_dict()})
        print("step", batch.step)
"""


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_script_resumes_in_the_process_of_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`primerl.Run` has the same checkpoints."""
    output, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(IN_PROCESS, encoding="utf-8")
    _, file, *overrides = arguments_of(model, output, *SMALL, "--ckpt.interval", "2", "--ckpt.keep-last", "2")
    printed = []
    for most in ("3", "5"):
        command = [sys.executable, str(script), file, *overrides, "--max-steps", most]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        printed += done.stdout.splitlines()
    assert printed == ["step 1", "step 2", "step 3", "resumed after 3", "step 4", "step 5"]
    assert steps_of(output) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_4", "step_5"]
    assert any((output / "checkpoints" / "step_4" / "orchestrator").iterdir())
    # In the list as one run, which it alone can resume.
    with Registry(reading=True) as registry:
        (run,) = (run for run in registry.all() if run.output_dir == output)
    assert (standing(run).status, run.exit_code) == ("COMPLETED", 0)
    costs = cost(output)
    assert costs["wall_s"] is not None
    assert costs["wall_s"] > 0
    assert costs["trained_tokens"] == read_lines(output / "metrics.jsonl")[-1]["progress/num_tokens"]
    assert read_lines(output / "metrics.jsonl")[-1]["progress/num_samples"] == 80
    assert main(["run", "resume", run.id]) == 2
    assert "start that again" in " ".join(capsys.readouterr().err.split())
