"""Checkpoints of supervised fine-tuning: whole or absent, and a run that was killed goes on as if it never was."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from end_to_end import until
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.checkpoint import state
from primerl.train.checkpoint.state import CheckpointError, Checkpoints, TrainerState
from primerl.train.checkpoint.step_folders import SavingError, keep_newest, remove_unfinished, set_aside_after
from primerl.train.loop.metrics import MetricsWriter
from primerl.train.optim import Optimizer
from primerl.train.settings import OptimConfig
from settings_helpers import filled, run_sft
from sft_helpers import metrics, settings, write_rows
from train_helpers import no_file_above, no_room

pytestmark = pytest.mark.usefixtures("own_logging")

INTERVAL = 3
STEPS = 17


def write_data(folder: Path) -> None:
    generator = random.Random(1)
    for name, count in (("a", 23), ("b", 9)):
        words = ["x" * generator.randint(1, 12) for _ in range(count)]
        write_rows(folder / f"{name}.jsonl", *({"prompt": name, "completion": word} for word in words))


def values(folder: Path, output: str, **ckpt: Any) -> dict[str, Any]:
    """Two shuffled datasets, mixed by ratio, over several epochs of either; with validation."""
    subsets = [{"path": str(folder / f"{name}.jsonl"), "ratio": ratio} for name, ratio in (("a", 2), ("b", 1))]
    return settings(
        folder,
        output_dir=str(folder / output),
        max_steps=STEPS,
        data={"subsets": subsets, "batch_size": 150, "seq_len": 100},
        val={"interval": 5, "data": {"path": str(folder / "b.jsonl")}},
        ckpt={"interval": INTERVAL, **ckpt},
    )


def command(folder: Path, output: str, *arguments: str) -> list[str]:
    config = folder / f"{output}.toml"
    config.write_text(tomli_w.dumps(values(folder, output)))
    return [sys.executable, "-m", "primerl", "sft", "@", str(config), *arguments]


def curve(output: Path) -> list[dict[str, Any]]:
    """Everything of `metrics.jsonl` but the times."""
    untimed = ("time/", "perf/", "timestamp")
    return [{name: value for name, value in line.items() if not name.startswith(untimed)} for line in metrics(output)]


def final_weights(output: Path, step: int = STEPS) -> bytes:
    return (output / "weights" / f"step_{step}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_data(folder)
    done = subprocess.run(command(folder, "run"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def killed_after(lines: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """SIGKILL once so many lines of metrics are written: at a moment of the run, not of the clock."""
    file = output / "metrics.jsonl"

    def is_far_enough() -> bool:
        assert process.poll() is None, f"ended with {process.returncode} before it could be killed"
        return file.exists() and file.read_bytes().count(b"\n") >= lines

    until(is_far_enough, 200, f"{lines} lines of metrics")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.timeout(600)  # starts four times what imports torch
@pytest.mark.parametrize("seed", [int(os.environ.get("PRIMERL_TEST_SEED", "1"))])
def test_a_run_killed_at_random_steps_goes_on_bit_by_bit(uninterrupted: Path, tmp_path: Path, seed: int) -> None:
    """Loss curve, validation, mixture and final weights are those of the run that was never stopped."""
    write_data(tmp_path)
    generator = random.Random(seed)
    arguments = ("--ckpt.resume-step", "-1")
    for kill in range(2):
        # The second time it is killed again, after it went on.
        lines = generator.randint(1 + 7 * kill, 7 + 7 * kill)
        process = subprocess.Popen(command(tmp_path, "run", *arguments), stdout=subprocess.DEVNULL)
        killed_after(lines, process, tmp_path / "run")
    done = subprocess.run(command(tmp_path, "run", *arguments), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from the checkpoint of step" in done.stdout
    assert curve(tmp_path / "run") == curve(uninterrupted)
    assert final_weights(tmp_path / "run") == final_weights(uninterrupted)


SLOW_SAVE = """
import os, sys, threading
from pathlib import Path
import torch
from torch.distributed.checkpoint import FileSystemWriter
from primerl.train.checkpoint.state import Checkpoints, TrainerState
from primerl.config.process_files.files import resolved
from primerl.config.schema import trainer as schema
from primerl.process.setting_checks import from_mapping
from primerl.train.settings import OptimConfig
from primerl.train.optim import Optimizer
checkpoints = Checkpoints(Path(sys.argv[1]), None)
model = torch.nn.Linear(1000, 1)
optimizer = Optimizer(model.named_parameters(), from_mapping(OptimConfig, resolved(schema.Optimizer, {})), 9)
checkpoints.save(TrainerState(1, 0, 0, "adamw"), model, optimizer)
assert checkpoints.finish() == 1
finish = FileSystemWriter.finish
def half(self, **given):
    finish(self, **given)
    (written,) = Path(self.path).glob("*.distcp")
    os.truncate(written, written.stat().st_size // 2)
    print("half", flush=True)
    threading.Event().wait()
FileSystemWriter.finish = half
checkpoints.save(TrainerState(2, 0, 0, "adamw"), model, optimizer)
checkpoints.finish()
"""


@pytest.mark.processes
def test_a_checkpoint_cut_off_by_a_kill_is_never_picked(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW_SAVE, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = tmp_path / "checkpoints"
    (cut_off,) = [path for path in folder.iterdir() if path.name != "step_1"]
    assert (cut_off / "trainer" / "state.pt").stat().st_size > 0
    assert (cut_off / "trainer" / ".metadata").exists(), "what torch takes for whole"
    checkpoints = Checkpoints(tmp_path, None)
    assert checkpoints.steps() == [1]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 in .*; steps there: 1"):
        checkpoints.load(2)
    # The next one that is saved takes the remains away.
    model = torch.nn.Linear(2, 1)
    checkpoints.save(TrainerState(3, 0, 0), model, Optimizer(model.named_parameters(), filled(OptimConfig), 9))
    assert checkpoints.finish() == 3
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_3"]


@pytest.mark.processes
def test_a_run_killed_while_it_saves_goes_on_from_the_save_before(uninterrupted: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    process = subprocess.Popen(command(tmp_path, "run"), stdout=subprocess.DEVNULL)
    checkpoints, weights = tmp_path / "run" / "checkpoints", tmp_path / "run" / "weights"

    def is_saving_the_second() -> bool:
        assert process.poll() is None
        return any(weights.glob(f".step_{2 * INTERVAL}.*")) or (weights / f"step_{2 * INTERVAL}").exists()

    until(lambda: (checkpoints / f"step_{INTERVAL}").exists() or process.poll() is not None, 200, "a save")
    while not is_saving_the_second():
        pass  # a pause would miss what is being written
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Whatever the kill left of the second save, it is a whole checkpoint or none.
    assert Checkpoints(tmp_path / "run", None).newest() is not None
    done = subprocess.run(
        command(tmp_path, "run", "--ckpt.resume-step", "-1"), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert final_weights(tmp_path / "run") == final_weights(uninterrupted)
    assert not [path for folder in (checkpoints, weights) for path in folder.glob(".*")]


def test_what_is_kept(tmp_path: Path) -> None:
    write_data(tmp_path)
    assert run_sft(values(tmp_path, "run", interval=2, keep_last=2, keep_interval=6)) == 0
    kept = ["step_12", "step_16", "step_17", "step_6"]
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == kept
    assert sorted(os.listdir(tmp_path / "run" / "weights")) == ["step_0", *kept]
    assert (tmp_path / "run" / "checkpoints" / "step_6" / "trainer" / "state.pt").is_file()
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    assert [line["step"] for line in lines if line["time/save_ckpt"] > 0] == [*range(2, STEPS, 2), STEPS]
    assert [line["step"] for line in lines if line["time/wait_for_ckpt"] > 0] == [*range(2, STEPS, 2), STEPS]


def test_weights_only_and_the_end_only(tmp_path: Path) -> None:
    write_data(tmp_path)
    assert run_sft(values(tmp_path, "weights", interval=8, weights_only=True)) == 0
    assert sorted(os.listdir(tmp_path / "weights" / "weights")) == ["step_0", "step_16", "step_17", "step_8"]
    assert not (tmp_path / "weights" / "checkpoints").exists()
    assert run_sft(values(tmp_path, "end", interval=None)) == 0
    assert os.listdir(tmp_path / "end" / "checkpoints") == ["step_17"]
    assert run_sft(values(tmp_path, "last", interval=8, weights={"only_last": True})) == 0
    assert sorted(os.listdir(tmp_path / "last" / "checkpoints")) == ["step_16", "step_17", "step_8"]
    assert sorted(os.listdir(tmp_path / "last" / "weights")) == ["step_0", "step_17"]


@pytest.mark.processes
def test_going_on_from_a_chosen_step_sets_the_later_ones_aside(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path)
    assert run_sft(values(tmp_path, "run")) == 0
    assert run_sft(values(tmp_path, "run", resume_step=6)) == 0
    assert "resuming from the checkpoint of step 6" in capsys.readouterr().out
    assert curve(tmp_path / "run") == curve(uninterrupted)
    assert final_weights(tmp_path / "run") == final_weights(uninterrupted)
    assert (tmp_path / "run" / "checkpoints" / "replaced_step_9").is_dir()
    # All is trained: nothing happens any more.
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert run_sft(values(tmp_path, "run", resume_step=-1)) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert "all 17 steps are trained" in capsys.readouterr().out


@pytest.mark.processes
def test_more_steps_than_before(uninterrupted: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    # The schedule is of all steps, so it would be another one.
    constant = {"lr": 1e-2, "schedule": "constant", "warmup_steps": 0}
    assert run_sft({**values(tmp_path, "once"), "optim": constant}) == 0
    assert run_sft({**values(tmp_path, "twice"), "optim": constant, "max_steps": 8}) == 0
    assert run_sft({**values(tmp_path, "twice", resume_step=-1), "optim": constant}) == 0
    assert final_weights(tmp_path / "twice") == final_weights(tmp_path / "once")


def test_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    assert run_sft({**values(tmp_path, "run"), "max_steps": 4}) == 0
    for change, message in [
        ({"seed": 5}, "data's seed (0, and now 5)"),
        ({"shuffle": False}, "data's shuffle (True, and now False)"),
    ]:
        given = values(tmp_path, "run", resume_step=-1)
        assert run_sft({**given, "data": {**given["data"], **change}}) == 2
        assert message in capsys.readouterr().out
    write_rows(tmp_path / "b.jsonl", {"prompt": "b", "completion": "another"})
    assert run_sft(values(tmp_path, "run", resume_step=-1)) == 2
    assert "the rows are not those of the checkpoint of step 4" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(5))


def test_an_unreadable_or_missing_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    assert run_sft({**values(tmp_path, "run"), "max_steps": 4}) == 0
    assert run_sft(values(tmp_path, "run", resume_step=2)) == 2
    assert "no checkpoint of step 2" in capsys.readouterr().out
    folder = tmp_path / "run" / "checkpoints" / "step_4" / "trainer"
    for name in ("__0_0.distcp", ".metadata", "state.pt"):
        (folder / name).write_bytes((folder / name).read_bytes()[:100])
        assert run_sft(values(tmp_path, "run", resume_step=-1)) == 2
        assert "step_4 to resume from the checkpoint before it" in capsys.readouterr().out
    assert run_sft(values(tmp_path, "run", resume_step=3)) == 0


@pytest.mark.parametrize("place", ["state.pt", "trainer/state.pt"])
def test_a_checkpoint_of_an_earlier_version_is_named(tmp_path: Path, place: str) -> None:
    path = tmp_path / "checkpoints" / "step_5" / place
    path.parent.mkdir(parents=True)
    torch.save({"step": 5, "model": {}, "optimizer": {}, "tokens_seen": 7, "samples_seen": 3}, path)
    with pytest.raises(CheckpointError, match="step_5 is of an earlier version of primerl"):
        Checkpoints(tmp_path, 1).newest()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_random_numbers_that_an_earlier_version_has_kept_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    """Where they matter, the checkpoint is refused."""

    def state_of(seed: int) -> tuple[torch.nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(dropout))
        return model, Optimizer(model.named_parameters(), filled(OptimConfig), 9)

    checkpoints, (saved, optimizer) = Checkpoints(tmp_path, None), state_of(1)
    with monkeypatch.context() as formerly:
        formerly.setattr(state, "random_states", lambda rank: {})
        checkpoints.save(TrainerState(5, 0, 0, "adamw"), saved, optimizer)
        checkpoints.finish()
    file = tmp_path / "checkpoints" / "step_5" / "trainer" / "state.pt"
    torch.save({**torch.load(file, weights_only=True), "rng": {"cpu": torch.get_rng_state(), "cuda": []}}, file)
    (tmp_path / "checkpoints" / "step_5" / "sums.json").unlink()
    model, optimizer = state_of(2)
    found = checkpoints.newest()
    assert found is not None
    if dropout:
        with pytest.raises(CheckpointError, match="step_5 is of an earlier version of primerl"):
            checkpoints.restore(found, model, optimizer)
    else:
        checkpoints.restore(found, model, optimizer)
        assert torch.equal(model[0].weight, saved[0].weight)


def test_a_flipped_bit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    assert run_sft({**values(tmp_path, "run"), "max_steps": 2}) == 0
    (written,) = (tmp_path / "run" / "checkpoints" / "step_2" / "trainer").glob("*.distcp")
    content = bytearray(written.read_bytes())
    content[len(content) // 2] ^= 1
    written.write_bytes(content)
    assert run_sft(values(tmp_path, "run", resume_step=-1)) == 2
    assert f"step_2 is not what was written: trainer/{written.name}; delete step_2" in capsys.readouterr().out


def test_the_same_weights_in_another_architecture_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path)
    given = values(tmp_path, "run")
    tiny = given["model"]["tiny"]
    assert run_sft({**given, "max_steps": 2}) == 0
    goes_on = values(tmp_path, "run", resume_step=-1)
    assert run_sft({**goes_on, "model": {"tiny": {**tiny, "rope_theta": 5e5}}}) == 2
    said = capsys.readouterr().out
    assert "model.tiny is not what the run in " in said
    assert "rope_theta is 500000.0, and there 10000.0" in said
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run" / "weights" / "step_0", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert run_sft({**goes_on, "model": {"path": str(other)}}) == 2
    assert "the checkpoint of step 2 is of another model: rms_norm_eps is 0.001, and there 1e-06" in (
        capsys.readouterr().out
    )


def test_a_checkpoint_of_the_policy_trainer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    model, checkpoints = torch.nn.Linear(2, 1), Checkpoints(tmp_path / "run", None)
    checkpoints.save(TrainerState(5, 0, 0), model, Optimizer(model.named_parameters(), filled(OptimConfig), 9))
    assert checkpoints.finish() == 5
    assert run_sft(values(tmp_path, "run", resume_step=-1)) == 2
    assert "the checkpoint of step 5 is not of a supervised fine-tuning" in capsys.readouterr().out


def test_another_model_or_optimizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    assert run_sft({**values(tmp_path, "run"), "max_steps": 2}) == 0
    given = values(tmp_path, "run", resume_step=-1)
    assert run_sft({**given, "optim": {"type": "sgd"}}) == 2
    assert "the checkpoint of step 2 is of the optimizer 'adamw', and optim.type is 'sgd'" in capsys.readouterr().out
    other = tmp_path / "other"
    write_model(other, TinyConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=1), seed=0)
    assert run_sft({**given, "model": {"path": str(other)}}) == 2
    assert re.search(r"step 2 is of another model: hidden_size is 48, and there 32", capsys.readouterr().out)


@pytest.mark.parametrize("what", ["weights", "checkpoints", "metrics.jsonl"])
def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path)
    given = values(tmp_path, "run", interval=1)
    assert run_sft({**given, "max_steps": 2}) == 0
    weights = (tmp_path / "run" / "weights" / "step_2" / "model.safetensors").stat().st_size
    checkpoint = (tmp_path / "run" / "checkpoints" / "step_2" / "trainer" / "__0_0.distcp").stat().st_size
    lines = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert lines + 100 < weights < checkpoint
    # A line comes after what is saved in its step.
    again = values(tmp_path, "run", interval=5 if what == "metrics.jsonl" else 1, resume_step=-1)
    with no_file_above({"weights": weights - 1, "checkpoints": checkpoint - 1, "metrics.jsonl": lines + 100}[what]):
        assert run_sft(again) == 1
    said = capsys.readouterr().out
    assert re.search(rf"{tmp_path}/run/{what}\b.*Make room there, .*; with --ckpt.resume-step -1 the command", said)
    assert "Traceback" not in said
    # Half of what was written would keep the disk full.
    assert not list((tmp_path / "run").rglob(".step_*"))
    assert run_sft({**again, "max_steps": 5}) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(6))


def test_a_checkpoint_is_complete_once_its_line_of_metrics_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the line cannot be, all that was begun of the checkpoint goes."""
    write_data(tmp_path)
    folder, write = tmp_path / "run" / "checkpoints", MetricsWriter.write
    seen: list[tuple[int, list[str]]] = []

    def watched(self: MetricsWriter, step: int, line: dict[str, float]) -> None:
        if step in (3, 6):
            (begun,) = folder.glob(".*")
            # The thread that renames it is given time to, should it not wait for the line.
            until((begun / "trainer" / ".metadata").exists, 60, "the checkpoint's files")
            time.sleep(0.2)
            seen.append((step, sorted(os.listdir(folder))))
        if step == 6:
            raise SavingError("no room for the line")
        write(self, step, line)

    with monkeypatch.context() as patched:
        patched.setattr(MetricsWriter, "write", watched)
        assert run_sft(values(tmp_path, "run")) == 1
    assert seen == [(3, [".step_3.writing"]), (6, [".step_6.writing", "step_3"])]
    assert os.listdir(folder) == ["step_3"]
    assert run_sft(values(tmp_path, "run", resume_step=-1)) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(STEPS + 1))


def test_a_disk_without_room_for_the_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    with no_file_above(1000):
        assert run_sft(values(tmp_path, "run")) == 1
    assert re.search(rf"{tmp_path}/run/weights/step_0 cannot be written: .*Make room there", capsys.readouterr().out)
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.parametrize(("on", "what"), [("weights", "weights/step_3"), ("checkpoints", "checkpoints/step_3")])
def test_room_is_looked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on: str, what: str
) -> None:
    write_data(tmp_path)
    with monkeypatch.context() as patched:
        no_room(patched, 2000, on=on)
        assert run_sft(values(tmp_path, "run")) == 1
    pattern = (
        rf"the disk mounted at /\S* has 2000 bytes free, and {tmp_path}/run/{what} needs \d+ bytes: make room on it"
    )
    assert re.search(pattern, capsys.readouterr().out)
    assert not list((tmp_path / "run").rglob(".step_*"))


def test_entries_and_sums_of_another_version_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path)
    assert run_sft({**values(tmp_path, "run"), "max_steps": 2}) == 0
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    # No checkpoints, though they are called so.
    (tmp_path / "run" / "checkpoints" / "step_9").write_text("a file")
    (tmp_path / "run" / "checkpoints" / "step_007").mkdir()
    sums = (folder / "sums.json").read_text()
    for wrong in ("[]", "{}"):
        (folder / "sums.json").write_text(wrong)
        assert run_sft(values(tmp_path, "run", resume_step=-1)) == 2
        assert "sums.json has no sums; delete step_2 to resume" in capsys.readouterr().out
    (folder / "sums.json").write_text(sums)
    state = folder / "trainer" / "state.pt"
    torch.save({**torch.load(state, weights_only=True), "later": 1}, state)
    assert run_sft(values(tmp_path, "run", resume_step=-1)) == 2
    assert "state.pt has other entries than this version of primerl writes" in capsys.readouterr().out


def test_what_is_no_text_in_the_metrics_is_left_out(tmp_path: Path) -> None:
    write_data(tmp_path)
    assert run_sft({**values(tmp_path, "run"), "max_steps": 2}) == 0
    before = curve(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\x00{"step\xc3')
    (tmp_path / "run" / ".metrics.jsonl.4711.tmp").write_text("of a process that was killed")
    assert run_sft({**values(tmp_path, "run", resume_step=-1), "max_steps": 3}) == 0
    assert curve(tmp_path / "run")[:-1] == before
    assert not list((tmp_path / "run").glob(".metrics.jsonl.*"))


def test_removal_keeps_the_start_and_the_interval(tmp_path: Path) -> None:
    for step in (0, 2, 4, 5, 8, 9):
        (tmp_path / f"step_{step}").mkdir()
    keep_newest(tmp_path, 1, 4)
    assert sorted(os.listdir(tmp_path)) == ["step_0", "step_4", "step_8", "step_9"]


def test_what_was_set_aside_is_removed_as_the_rest(tmp_path: Path) -> None:
    """A run that is killed again and again between weights and checkpoint leaves weights to set aside each time."""
    for step in (3, 4, 5, 9):
        (tmp_path / f"step_{step}").mkdir()
        set_aside_after(tmp_path, 2)
    keep_newest(tmp_path, None, None)
    assert len(os.listdir(tmp_path)) == 4
    keep_newest(tmp_path, 2, 4)
    assert sorted(os.listdir(tmp_path)) == ["replaced_step_4", "replaced_step_5", "replaced_step_9"]


def test_a_file_among_unfinished_folders_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_x").write_text("no folder")
    (tmp_path / ".step_4.writing" / "trainer").mkdir(parents=True)
    (tmp_path / "step_3").mkdir()
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["step_3"]


@pytest.mark.processes
def test_the_command_refuses_what_contradicts_itself(tmp_path: Path) -> None:
    write_data(tmp_path)
    done = subprocess.run(
        command(tmp_path, "run", "--ckpt.resume-step", "-1", "--clean-output-dir"), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "ckpt.resume_step resumes the run that clean_output_dir deletes" in done.stderr
    assert not (tmp_path / "run").exists()
