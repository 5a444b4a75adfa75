"""The launcher's part in monitors, without processes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from primerl.config.process_files.files import ProcessConfig, write_text
from primerl.config.schema.monitors import MonitorConfig, MonitorEntry
from primerl.launch.monitors import MonitorWatch
from primerl.launch.placement.local import LocalPlacement
from primerl.monitors.collect import Collector
from primerl.monitors.extras import path_of
from primerl.monitors.process import END_FILE, RECORDS_FILE, MonitorProcess, main
from primerl.monitors.records import BusyError, Records

WATCHED = ("metrics.jsonl", "distributions.jsonl")


class Launched:
    """A run of five steps, all of them told to its monitors, with a checkpoint of the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "checkpoints" / "step_2").mkdir(parents=True)
        for name in WATCHED:
            (folder / name).write_text("".join(json.dumps({"step": step, "a": 1.0}) + "\n" for step in range(1, 6)))
        self.config = MonitorConfig(output_dir=str(folder), kind="sft", model="m", monitors=[])
        self.told()
        file, log = folder / "configs" / "monitor.toml", folder / "logs" / "monitor.log"
        described = ProcessConfig(kind="monitor", name="monitor", config=self.config, file=file, log=log, threads=1)
        self.said: list[str] = []
        self.watch = MonitorWatch(described, folder, 1, self.said.append)

    def told(self) -> list[int]:
        """Steps in the records, once all is taken in that is there."""
        records = Records(self.folder / RECORDS_FILE)
        Collector(self.config, records).collect()
        steps = [record.step for record in records]
        records.close()
        return steps


def test_a_run_that_goes_back_is_not_told_of_the_steps_that_are_given_up(tmp_path: Path) -> None:
    run = Launched(tmp_path)
    assert run.told() == [1, 2, 3, 4, 5]
    run.watch.go_back(2)
    assert run.told() == [1, 2]
    assert (tmp_path / "monitor.former_1" / "records.jsonl").is_file()
    assert "they get a new run" in run.said[0]
    for name in WATCHED:
        assert len((tmp_path / name).read_text().splitlines()) == 2


@pytest.mark.parametrize("step", [3, 9])
def test_going_back_to_a_step_without_a_checkpoint_changes_nothing(step: int, tmp_path: Path) -> None:
    run = Launched(tmp_path)
    run.watch.go_back(step)
    assert run.told() == [1, 2, 3, 4, 5]
    assert not run.said


def test_one_process_alone_is_at_the_monitors_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Launched(tmp_path)
    first = MonitorProcess(run.config)
    assert main(run.config.model_dump()) == 2
    assert f"error: another process sends what is in {tmp_path / 'monitor'}" in capsys.readouterr().err
    with pytest.raises(BusyError):
        run.watch.go_back(2)
    assert (tmp_path / "monitor" / "records.jsonl").is_file()
    first.close()
    MonitorProcess(run.config).close()


def test_the_launchers_waits_for_the_one_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Launched(tmp_path)
    first = MonitorProcess(run.config)
    with caplog.at_level("INFO"):
        waiting = threading.Thread(target=lambda: MonitorProcess(run.config, 30.0).close())
        waiting.start()
        deadline = time.monotonic() + 20
        while "waiting up to 30 s" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert waiting.is_alive()
        first.close()
        waiting.join(20)
    assert not waiting.is_alive()
    MonitorProcess(run.config).close()


@pytest.mark.processes
def test_monitors_that_cannot_be_started_fail_nothing(tmp_path: Path) -> None:
    run = Launched(tmp_path)
    (tmp_path / "configs").write_text("a file where a folder has to be")
    with LocalPlacement() as placement:
        run.watch.start(placement)
        assert placement.by_name == {}
        run.watch.look(placement)
        run.watch.end(placement, 0, "finished")
    assert "the monitors cannot be started, and training continues without them" in run.said[0]
    assert "the monitors have failed" in run.said[1]
    assert json.loads((tmp_path / END_FILE).read_text())["status"] == "finished"


def test_a_journal_that_takes_too_long_to_read_does_not_keep_the_end_from_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launched(tmp_path)
    entry = MonitorEntry(name="own", path="test_monitors:Noting", args={"file": str(tmp_path / "noted")})
    process = MonitorProcess(run.config.model_copy(update={"monitors": [entry], "finish_s": 4.0}))
    read = threading.Event()
    monkeypatch.setattr(process.collector, "collect", lambda hurry: read.wait(30))
    for sender in process.senders:
        sender.start()
    assert process._end() == 1
    read.set()
    noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
    assert [line[1] for line in noted[:-1]] == [1, 2, 3, 4, 5]
    assert noted[-1] == ["crashed", "the launcher was killed"]
    process.close()


def test_samples_that_every_monitor_has_are_removed(tmp_path: Path) -> None:
    run = Launched(tmp_path)
    entry = MonitorEntry(name="own", path="test_monitors:Noting", args={"file": str(tmp_path / "noted")})
    other = entry.model_copy(update={"name": "other"})
    process = MonitorProcess(run.config.model_copy(update={"monitors": [entry, other]}))
    for step in (2, 4):
        write_text(path_of(tmp_path, step), json.dumps({"samples": [], "of_trainer": {}}))
        process.records.append("extras", step, {})
    one, two = process.senders
    one.passed = 7
    process._sweep()
    assert path_of(tmp_path, 2).is_file()
    two.passed = 6
    process._sweep()
    assert not path_of(tmp_path, 2).exists()
    assert path_of(tmp_path, 4).is_file()
    for sender in process.senders:
        sender.start()
    assert process._end() == 0  # though one file is missing
    assert not path_of(tmp_path, 4).exists()
    process.close()
