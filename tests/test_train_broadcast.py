"""Broadcasts beside training: what is published is a moment of the model, in order, and a failure is never lost."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.train.adapters.lora import AdapterPublisher, add_adapter
from primerl.train.loop.client import OrchestratorClient, OrchestratorError
from primerl.train.model.packed_model import load_model
from primerl.train.settings import LoraConfig
from primerl.train.weights import broadcast
from primerl.train.weights.broadcast import BroadcastError, Broadcasts
from primerl.train.weights.publish import WeightsPublisher
from safetensors.torch import load_file
from settings_helpers import TRAINER, filled, run_trainer, trainer_json
from test_train_rl import published, settings, timeless, whole_batch
from test_train_weights import small_models
from train_helpers import Answer, OrchestratorDouble, asks_again, gone, no_room, unreadable_manifest, waiting

pytestmark = pytest.mark.usefixtures("own_logging")


class Gate:
    """Holds the thread back before it writes, until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        write = WeightsPublisher.write

        def held(publisher: WeightsPublisher, version: int, files: Any) -> Path:
            self.reached.set()
            assert self.open.wait(60)
            return write(publisher, version, files)

        monkeypatch.setattr(WeightsPublisher, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def client(double: OrchestratorDouble) -> OrchestratorClient:
    return OrchestratorClient(double.url, 5.0)


def models() -> list[tuple[str, Any]]:
    named = list(zip(("untied", "tied", "experts"), small_models(), strict=True))
    return [*named, ("bfloat16", small_models()[0].to(torch.bfloat16))]


@pytest.mark.parametrize("index", range(4), ids=["untied", "tied", "experts", "bfloat16"])
def test_what_is_written_is_the_model_of_that_moment(tmp_path: Path, gate: Gate, index: int) -> None:
    """The weights change while the thread has not begun to write them, as the next step does."""
    model = models()[index][1]
    with OrchestratorDouble(whole_batch) as double:
        broadcasts = Broadcasts(WeightsPublisher(tmp_path, 2, True), client(double))
        for version in (0, 1):
            gate.open.clear()
            model.save_pretrained(tmp_path / f"saved_{version}")
            broadcasts.begin(model, version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-3.0)
            gate.open.set()
            took = broadcasts.finish()
            assert took is not None
            assert took > 0
        broadcasts.close()
    for version in (0, 1):
        saved = load_file(tmp_path / f"saved_{version}" / "model.safetensors")
        written = published(tmp_path, version)
        assert sorted(saved) == sorted(written)
        assert all(torch.equal(saved[name], written[name]) for name in saved)
    assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1]


def test_an_adapter_is_that_of_the_moment_too(folder: Path, tmp_path: Path, gate: Gate) -> None:
    model = load_model(folder)
    adapter = add_adapter(model, filled(LoraConfig, rank=4), folder, seed=1)
    expected = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    with OrchestratorDouble(whole_batch) as double:
        broadcasts = Broadcasts(AdapterPublisher(adapter, tmp_path, 2, True), client(double))
        broadcasts.begin(model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        gate.open.set()
        broadcasts.finish()
        broadcasts.close()
    written = load_file(tmp_path / "broadcasts" / "step_0" / "adapter_model.safetensors")
    assert all(torch.equal(expected[name], written[name]) for name in expected)


def test_the_step_does_not_wait_for_the_disk_and_the_next_one_does(folder: Path, tmp_path: Path, gate: Gate) -> None:
    model = load_model(folder)
    said: list[str | None] = []
    with OrchestratorDouble(whole_batch) as double:
        broadcasts = Broadcasts(WeightsPublisher(tmp_path, 2, True), client(double), said.append)
        broadcasts.begin(model, 0)
        assert gate.reached.wait(20)
        assert broadcasts.in_flight
        assert double.calls == []
        assert not (tmp_path / "broadcasts").exists()
        broadcasts.check()
        second = threading.Thread(target=broadcasts.begin, args=(model, 1))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "one is in flight at a time"
        gate.open.set()
        second.join(60)
        broadcasts.finish()
        broadcasts.close()
        assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1]
    parts = [(f"writing the weights of policy {version}", f"announcing policy {version}", None) for version in (0, 1)]
    assert said == [*parts[0], *parts[1]]


def test_a_write_that_does_not_end_is_named(
    folder: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "PATIENCE_S", 0.05)
    with OrchestratorDouble(whole_batch) as double:
        broadcasts = Broadcasts(WeightsPublisher(tmp_path, 2, True), client(double))
        broadcasts.begin(load_model(folder), 3)
        assert gate.reached.wait(20)
        with pytest.raises(BroadcastError) as caught:
            broadcasts.finish()
        gate.open.set()
        broadcasts.close()
    told = "policy 3 is not published within 0.05 s: still writing the weights of policy 3, to "
    assert str(caught.value) == f"{told}{tmp_path / 'broadcasts'}"


def limited(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """The trainer where no file may be longer than the model's config: the kernel refuses the rest of the weights."""
    return subprocess.run(
        [sys.executable, "-c", TRAINER, trainer_json(values)],
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )


@pytest.mark.processes
def test_a_disk_that_takes_no_more_ends_the_run_with_the_path(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        done = limited(settings(double.url, folder, tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"BroadcastError: the weights of policy 0 cannot be written to {tmp_path / 'broadcasts'}: " in done.stdout
    assert "File too large" in done.stdout
    assert list((tmp_path / "broadcasts").iterdir()) == []


def test_weights_that_are_lost_before_they_are_read_are_written_again(folder: Path, tmp_path: Path) -> None:
    found: list[bool] = []

    def read(fields: dict[str, Any]) -> Answer | None:
        manifest = Path(fields["manifest"])
        if fields["version"] == 1 and len(found) == 1:
            manifest.write_text("")
        whole = bool(manifest.read_text())
        found.append(whole)
        return None if whole else unreadable_manifest(f"{manifest} is no manifest")

    with OrchestratorDouble(whole_batch, before_weights=read) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 0
    assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1, 1, 2, 3]
    assert found == [True, False, True, True, True]
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path / "plain")) == 0
    written, expected = published(tmp_path, 1), published(tmp_path / "plain", 1)
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_weights_that_cannot_be_read_twice_end_the_run_with_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(whole_batch, before_weights=lambda _: unreadable_manifest("it is a pipe")) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 1
    assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 0]
    said = capsys.readouterr().out
    assert f"BroadcastError: the weights of policy 0 were written to {tmp_path / 'broadcasts'} twice" in said
    assert "it is a pipe" in said


@pytest.mark.parametrize("comes_back", [True, False])
def test_weights_that_no_engine_can_load_are_written_again_once(
    folder: Path, tmp_path: Path, comes_back: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer waits for a batch that waits for an engine, which waits for weights that are gone."""
    lost: list[int] = []

    def batch(step: int, rank: int) -> Answer:
        if step != 2 or (lost and comes_back):
            return whole_batch(step, rank)
        if not any(fields["version"] == 1 for fields in double.called("/trainer/weights")):
            return waiting("policy 1 to be published")
        lost.append(step)
        shutil.rmtree(tmp_path / "broadcasts" / "step_1")
        return asks_again(1, "the manifest is gone")

    with OrchestratorDouble(batch) as double:
        code = run_trainer(settings(double.url, folder, tmp_path))
    versions = [fields["version"] for fields in double.called("/trainer/weights")]
    said = capsys.readouterr().out
    assert "no engine can load policy 1, its weights are written again: the manifest is gone" in said
    if not comes_back:
        assert (code, versions) == (1, [0, 1, 1])
        assert (
            "BroadcastError: no engine can load policy 1, though its weights were written again: the manifest" in said
        )
        return
    assert (code, versions) == (0, [0, 1, 1, 2, 3])
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path / "plain")) == 0
    for version in (1, 3):
        written, expected = published(tmp_path, version), published(tmp_path / "plain", version)
        assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_what_engines_lack_of_another_version_is_not_the_trainers(folder: Path, tmp_path: Path) -> None:
    answers = [asks_again(0, "an older one"), asks_again(2, "a later one")]

    def batch(step: int, rank: int) -> Answer:
        return answers.pop() if step == 2 and answers else whole_batch(step, rank)

    with OrchestratorDouble(batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 0
    assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1, 2, 3]
    assert answers == []


def test_a_disk_without_room_is_named_before_it_is_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_room(monkeypatch, 1000)
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 1
    target = tmp_path / "broadcasts" / "step_0"
    pattern = (
        rf"BroadcastError: .*: the disk mounted at /\S* has 1000 bytes free, and {target} needs \d+ bytes: make room"
    )
    assert re.search(pattern, capsys.readouterr().out)
    assert not (tmp_path / "broadcasts").exists()


def test_a_failure_is_seen_while_the_trainer_waits_for_a_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `max_async_level` 0 the next batch waits for the very policy whose broadcast has failed."""
    write, failed = WeightsPublisher._write, threading.Event()

    def full_from_the_second_on(publisher: WeightsPublisher, target: Path, files: Any) -> None:
        if "step_1" in target.name:
            failed.set()
            raise OSError(28, "No space left on device", str(target / "model.safetensors"))
        write(publisher, target, files)

    monkeypatch.setattr(WeightsPublisher, "_write", full_from_the_second_on)

    def batch(step: int, rank: int) -> Answer:
        if step == 1:
            return whole_batch(step, rank)
        assert failed.wait(20)
        return waiting("policy 1 to be published")

    with OrchestratorDouble(batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 1
    output = capsys.readouterr().out
    assert "BroadcastError: the weights of policy 1 cannot be written to" in output
    assert "No space left on device" in output
    assert [fields["version"] for fields in double.called("/trainer/weights")] == [0]
    assert sorted(path.name for path in (tmp_path / "broadcasts").iterdir()) == ["LATEST", "step_0"]


def test_the_last_failure_ends_the_run_before_its_checkpoint_is_told_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Double(OrchestratorDouble):
        def answer(self, path: str, fields: dict[str, Any]) -> Answer:
            if path == "/trainer/weights" and fields["version"] == 2:
                return 409, json.dumps({"error": {"message": "version 2 is not due"}}).encode()
            return super().answer(path, fields)

    with Double(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, max_steps=2, ckpt={"interval": 1})) == 1
        assert double.called("/trainer/checkpoint") == [{"step": 1, "saved": 1}]
    assert "/trainer/weights refused (409): version 2 is not due" in capsys.readouterr().out


def test_a_checkpoint_is_told_of_when_its_weights_are(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, ckpt={"interval": 1})) == 0
    told: set[int] = set()
    for path, fields in double.calls:
        if path == "/trainer/weights":
            told.add(fields["version"])
        if path == "/trainer/checkpoint":
            assert fields["step"] in told
    assert double.called("/trainer/checkpoint")[-1] == {"step": 3, "saved": 3}


def test_an_orchestrator_that_is_gone_at_the_end_is_no_failure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was stopped: there are no more batches, and it does not listen any more when the weights are announced."""
    over = threading.Event()

    class Double(OrchestratorDouble):
        def answer(self, path: str, fields: dict[str, Any]) -> Answer:
            if path == "/trainer/weights" and fields["version"] == 1:
                assert over.wait(20)
                return 0, b""
            return super().answer(path, fields)

    def batch(step: int, rank: int) -> Answer:
        if step == 1:
            return whole_batch(step, rank)
        over.set()
        return gone("stopped by hand")

    with Double(batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, orchestrator_timeout_s=60)) == 0
    assert "the orchestrator could not be reached" in capsys.readouterr().out
    assert (tmp_path / "broadcasts" / "step_1" / "manifest.json").is_file()
    # The same of one that still answers, and says so.
    with OrchestratorDouble(whole_batch) as double:
        answer = double.answer
        double.answer = lambda path, fields: gone() if path == "/trainer/weights" else answer(path, fields)  # type: ignore[method-assign]
        broadcasts = Broadcasts(WeightsPublisher(tmp_path, 2, True), client(double))
        broadcasts.begin(load_model(folder), 2)
        assert broadcasts.finish() is not None
        broadcasts.close()


def test_a_silent_orchestrator_is_a_failure_while_training_goes_on(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        answer = double.answer
        double.answer = lambda path, fields: (0, b"") if path == "/trainer/weights" else answer(path, fields)  # type: ignore[method-assign]
        broadcasts = Broadcasts(WeightsPublisher(tmp_path, 2, True), OrchestratorClient(double.url, 0.3))
        broadcasts.begin(load_model(folder), 0)
        with pytest.raises(OrchestratorError, match=r"did not answer /trainer/weights for 0\.3 s"):
            broadcasts.finish()
        broadcasts.close()


KILLED = """
import json, os, signal, sys
from primerl.train.checkpoint import files
from primerl.train.loop import rl
from primerl.train.settings import TrainerConfig
from primerl.process.setting_checks import from_mapping
rename = files.Path.rename
def killed(self, target):
    if self.name.startswith(".step_2.") and os.path.basename(str(target)) == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
files.Path.rename = killed
sys.exit(rl.main(from_mapping(TrainerConfig, json.loads(sys.argv[1]))))
"""


@pytest.mark.processes
def test_a_trainer_killed_while_it_broadcasts_goes_on_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    """Killed when policy 2 is written under its temporary name; what it left goes, the same bytes come again."""
    whole, output = tmp_path / "whole", tmp_path / "run"
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, whole)) == 0
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, output, ckpt={"interval": 1})
        command = [sys.executable, "-c", KILLED, trainer_json(values), "step_2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1]
    broadcasts = output / "broadcasts"
    assert not (broadcasts / "step_2").exists()
    assert list(broadcasts.glob(".step_2.*")), "what was cut off"
    before = {version: os.stat(broadcasts / f"step_{version}" / "manifest.json") for version in (0, 1)}
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(values | {"orchestrator_url": double.url}) == 0
        versions = [fields["version"] for fields in double.called("/trainer/weights")]
        assert versions == list(range(versions[0], 4))
    assert sorted(path.name for path in broadcasts.iterdir()) == ["LATEST", "step_0", "step_1", "step_2", "step_3"]
    for version in (0, 1):
        assert (broadcasts / f"step_{version}" / "manifest.json").stat().st_ino == before[version].st_ino, "left alone"
    for version in range(4):
        one, other = published(whole, version), published(output, version)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert timeless(whole) == timeless(output)


def test_the_metrics_tell_the_step_from_the_thread(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["time/broadcast"] > 0
        assert line["time/wait_for_broadcast"] >= 0
    assert ["time/broadcast_thread" in line for line in lines] == [False, True, True], "of the policy before"
