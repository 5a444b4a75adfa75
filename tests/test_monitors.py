"""Monitors: what a run writes reaches services once, in order, whatever dies on the way. Services are local servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import outside
import pytest
import tomli_w
from monitor_servers import PrimeServer, WandbServer
from primerl.config.process_files import files
from primerl.config.schema.monitors import MonitorConfig
from primerl.monitors import Monitor, Sample, load
from primerl.monitors.collect import Collector, evaluation_metrics
from primerl.monitors.records import Records, Tail
from primerl.monitors.services.weights_and_biases import written

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reverse-text" / "rl-ci.toml"
PRIME = "prime"
WANDB = "primerl.monitors.weights_and_biases:WandbMonitor"  # as earlier versions have written it
SFT = {"output_dir": "out", "max_steps": 1, "model": {"tiny": {}}, "data": {"path": "data.jsonl"}}
END = Path("monitor") / "end.json"


class Noting(Monitor):
    """Of the user's own: what it is told, a line each."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.note(self.number, step, metrics)

    def samples(self, step: int, samples: list[Sample]) -> None:
        with Path(f"{self.file}.samples").open("a") as file:
            file.write(json.dumps([step, *(sample.prompt for sample in samples)]) + "\n")

    def finish(self, status: str, reason: str) -> None:
        self.note(status, reason)

    def note(self, *what: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")


def until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.02)
    return result


class Folder:
    """The folder of a run, written by the test in place of a trainer."""

    def __init__(self, folder: Path, *entries: dict[str, Any], **settings: Any) -> None:
        self.folder = folder
        self.file = folder / "configs" / "monitor.toml"
        self.file.parent.mkdir(parents=True)
        config = {"output_dir": str(folder), "kind": "sft", "model": "m", "retry_s": 0.5, "monitors": list(entries)}
        self.file.write_text(tomli_w.dumps({**config, **settings}))

    def train(self, first: int, last: int) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            for step in range(first, last + 1):
                file.write(json.dumps({"step": step, "timestamp": 1.0, "loss/mean": 1 / step, "none": None}) + "\n")

    def end(self, status: str = "finished") -> None:
        files.write_text(self.folder / END, json.dumps({"status": status, "reason": "all is done"}))

    @contextmanager
    def monitor(self, **variables: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "primerl", "monitor", "@", str(self.file)]
        tests = str(Path(__file__).parent)
        found = {**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}", **variables}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=found, text=True, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            # With the service that W&B starts beside it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def status(self, name: str) -> dict[str, Any]:
        found = json.loads((self.folder / "monitor" / "status.json").read_text())
        return dict(found["monitors"][name])


def test_half_a_record_does_not_count_and_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    records.append("metrics", 1, {"a": 1.0})
    records.close()
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "st')
    again = Records(tmp_path / "records.jsonl")
    again.append("metrics", 2, {"a": 2.0})
    assert [(record.number, record.step) for record in again] == [(0, 1), (1, 2)]
    again.close()

    tail = Tail(tmp_path / "lines")
    assert tail.lines() == []
    (tmp_path / "lines").write_text('{"n": 1}\n{"n": 2')
    assert tail.lines() == [{"n": 1}]
    with (tmp_path / "lines").open("a") as file:
        file.write("}\n")
    assert tail.lines() == [{"n": 2}]
    files.write_text(tmp_path / "lines", '{"n": 3}\n')
    assert tail.lines() == [{"n": 3}]


def test_a_monitor_of_another_package_is_found_by_its_name(tmp_path: Path) -> None:
    source = "from test_monitors import Noting\n"
    installed = outside.install(tmp_path, "acme_monitor", source, {load.GROUP: "acme = acme_monitor:Noting"})
    told = tmp_path / "told"
    folder = Folder(tmp_path / "run", {"name": "acme", "path": "acme", "args": {"file": str(told)}})
    folder.train(1, 2)
    folder.end()
    tests = str(Path(__file__).parent)
    with folder.monitor(PYTHONPATH=f"{tests}:{installed}") as process:
        assert process.wait(120) == 0
    assert [json.loads(line) for line in told.read_text().splitlines()] == [
        [0, 1, {"timestamp": 1.0, "loss/mean": 1.0}],
        [1, 2, {"timestamp": 1.0, "loss/mean": 0.5}],
        ["finished", "all is done"],
    ]


def test_a_step_that_is_trained_again_is_told_once(tmp_path: Path) -> None:
    run = Folder(tmp_path / "run")
    config = MonitorConfig(output_dir=str(run.folder), kind="sft", model="m", monitors=[])
    records = Records(run.folder / "monitor" / "records.jsonl")
    collector = Collector(config, records)
    evaluation = {
        "environment": "e",
        "version": 2,
        "mean_reward": 0.5,
        "metrics": {"exact": 0.25, "avg@4": {"a": 1}},
    }
    run.train(1, 3)
    (run.folder / "evals.jsonl").write_text(json.dumps(evaluation) + "\n")
    collector.collect()
    # As the trainer does that goes on from the checkpoint of step 1.
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    files.write_text(run.folder / "metrics.jsonl", lines[0] + "\n")
    run.train(2, 5)
    collector.collect()
    # And as a monitor that is started again, which reads everything anew.
    records.close()
    records = Records(run.folder / "monitor" / "records.jsonl")
    Collector(config, records).collect()
    assert [record.step for record in records if record.kind == "metrics"] == [1, 2, 3, 4, 5]
    assert records[0].values == {"timestamp": 1.0, "loss/mean": 1.0}
    (told,) = [record for record in records if record.kind == "evaluation"]
    named = {"eval/e/mean_reward": 0.5, "eval/e/exact": 0.25, "eval/e/avg@4/a": 1.0}
    assert told.step == 2
    assert told.values["metrics"] == named == evaluation_metrics("e", evaluation)
    records.close()


def test_prime_gets_every_step_once_though_the_monitor_is_killed(tmp_path: Path) -> None:
    server = PrimeServer()
    run = Folder(tmp_path / "run", {"name": "prime", "path": PRIME, "args": {"base_url": f"{server.url}/rft"}})
    with server.serving():
        for last in (30, 60):
            run.train(last - 29, last)
            with run.monitor(PRIME_API_KEY=server.key) as process:
                until(lambda last=last: len(server.bodies("/metrics")) >= last - 20, "metrics")
                process.kill()
        run.end()
        with run.monitor(PRIME_API_KEY=server.key) as process:
            assert process.wait(timeout=120) == 0
        sent = [(call[2]["Idempotency-Key"], call[3]) for call in server.calls if call[1] == "/rft/metrics"]
    by_key = dict(sent)
    # What was answered as the process died comes again, the same under the same key.
    assert len(set(sent)) == len(by_key)
    assert [json.loads(body)["metrics"]["step"] for body in by_key.values()] == list(range(1, 61))
    assert len(sent) - len(by_key) <= 2
    assert [body["exit_code"] for body in server.bodies("/finalize")] == [0]
    assert len(server.bodies("/external-runs")) == 1


def test_wandb_has_every_row_once_though_the_monitor_is_killed(tmp_path: Path) -> None:
    server = WandbServer()
    variables = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.key, "HOME": str(tmp_path)}
    run = Folder(tmp_path / "run", {"name": "wandb", "path": WANDB, "args": {"project": "p", "name": "called"}})
    run.train(1, 20)
    with server.serving():
        with run.monitor(**variables) as process:
            until(lambda: json.loads(_read(run.folder / "monitor" / "wandb.json")).get("next") == 20, "the cursor")
            process.kill()
        run.train(21, 40)
        run.end()
        with run.monitor(**variables) as process:
            assert process.wait(timeout=120) == 0, process.stdout and process.stdout.read()
        (found,) = server.runs.values()
        rows = server.history()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["_step"] for row in rows] == list(range(40))
    assert (found["displayName"], found["exit_code"]) == ("called", 0)
    assert run.status("wandb")["is_done"]
    assert not holding(tmp_path, server.key)


def test_wandb_offline_goes_on_where_its_files_end_and_can_be_synced(tmp_path: Path) -> None:
    run = Folder(tmp_path / "run", {"name": "wandb", "path": WANDB, "args": {"project": "p", "offline": True}})
    run.train(1, 20)
    variables = {"WANDB_API_KEY": "", "HOME": str(tmp_path)}
    with run.monitor(**variables) as process:
        until(lambda: json.loads(_read(run.folder / "monitor" / "wandb.json")).get("next") == 20, "the cursor")
        process.kill()
    for last, status in ((30, "interrupted"), (40, "finished")):
        (run.folder / END).unlink(missing_ok=True)
        run.train(21 if last == 30 else 31, last)
        run.end(status)
        with run.monitor(**variables) as process:
            assert process.wait(timeout=120) == 0
    folders = sorted((run.folder / "wandb").glob("offline-run-*"))
    run_id = json.loads(_read(run.folder / "monitor" / "wandb.json"))["state"]["id"]
    assert written(run.folder / "wandb", run_id) == 40
    # Half a record, as a kill may leave it, goes; what is whole stays.
    (file,) = folders[-1].glob("*.wandb")
    whole = file.read_bytes()
    file.write_bytes(whole + bytes([0, 0, 0, 0, 100, 0, 1]) + b"half")
    assert written(run.folder / "wandb", run_id) == 40
    assert file.read_bytes() == whole
    server = WandbServer()
    with server.serving():
        found = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.key, "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, folders)]
        done = subprocess.run(command, env=found, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = server.history()
    assert [row["step"] for row in rows] == list(range(1, 41))


def test_a_server_that_is_down_costs_nothing_and_a_bad_key_only_its_own_monitor(tmp_path: Path) -> None:
    server, other = PrimeServer(), PrimeServer()
    other.key = "another"
    run = Folder(
        tmp_path / "run",
        {"name": "good", "path": PRIME, "args": {"base_url": f"{server.url}/rft"}},
        {"name": "bad", "path": PRIME, "args": {"base_url": f"{other.url}/rft"}},
    )
    server.is_down = True
    run.train(1, 5)
    with server.serving(), other.serving(), run.monitor(PRIME_API_KEY=server.key) as process:
        until(lambda: (run.folder / "monitor" / "status.json").exists(), "the status")
        until(lambda: "503" in (run.status("good")["error"] or ""), "the error")
        assert run.status("good")["sent"] == 0
        server.is_down = False
        until(lambda: len(server.bodies("/metrics")) == 5, "metrics")
        until(lambda: run.status("bad")["is_given_up"], "giving up")
        run.end()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "monitor good has everything, 5 records" in output
    assert "monitor bad is given up" in output
    assert "401" in output
    assert other.bodies("/metrics") == []
    assert not holding(run.folder, server.key)
    assert server.key not in output


def test_what_could_not_be_sent_is_sent_by_the_command_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "noted"
    entry = {"name": "own", "path": "test_monitors:Noting", "args": {"file": str(file / "x")}}
    run = Folder(tmp_path / "run", entry, finish_s=0.5)
    run.train(1, 3)
    run.end()
    with run.monitor() as process:  # its folder is missing
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "monitor own: 3 of 3 records were not sent: FileNotFoundError" in output
    file.mkdir()
    with run.monitor() as process:
        assert process.wait(timeout=120) == 0
    noted = [json.loads(line) for line in (file / "x").read_text().splitlines()]
    assert [line[:2] for line in noted] == [[0, 1], [1, 2], [2, 3], ["finished", "all is done"]]
    with run.monitor() as process:  # nothing is sent twice
        assert process.wait(timeout=120) == 0
    assert len((file / "x").read_text().splitlines()) == len(noted)


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else "{}"


def holding(folder: Path, secret: str) -> list[Path]:
    """Files in which it can be read."""
    return [file for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]
