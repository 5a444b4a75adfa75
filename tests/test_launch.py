"""The guard and the launcher's watch: whatever dies, nothing is left behind and the cause is named."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from end_to_end import until
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.trainer import Checkpoints
from primerl.forking.servers import Servers
from primerl.launch import recovery
from primerl.launch import run as launch_run
from primerl.launch.placement import commands
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Command, Listener, PlacementError, Process, Role
from primerl.launch.preflight import model_folder, output_folder, training
from primerl.launch.registration import registered
from primerl.launch.report import summary
from primerl.launch.report.console import Console, failures, line
from primerl.launch.report.logs import last_exception, tail
from primerl.launch.report.status import Progress, longest_wait, missing, waits
from primerl.launch.resume import position
from primerl.launch.run import Launcher
from primerl.launch.slurm import within
from primerl.launch.supervise import trees
from primerl.launch.supervise.failures import RefusedError, RunFailedError
from primerl.launch.supervise.lock import LOCK
from primerl.launch.supervise.orchestrator import sign_off_earlier, wait_for_orchestrator
from primerl.launch.supervise.processes import Processes
from primerl.launch.supervise.trees import MARK, marked
from primerl.launch.supervise.watching import Interrupted
from primerl.models.tiny import write_model
from primerl.net.requests import UnansweredError
from primerl.train.loop.progress import Remaining
from safetensors.torch import load_file, save_file

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
claimed = functools.partial(output_folder.claimed, kind="rl")
# Ignores SIGTERM, and has a child outside its process group: the hardest process to end.
STUBBORN = textwrap.dedent(
    """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("ready", flush=True)
    time.sleep(600)
    """
)


Start = Callable[[Processes, str, str, Path], Process]


@pytest.fixture(scope="module")
def bare() -> Iterator[str]:
    """The socket of a fork server that has imported nothing."""
    with closing(Servers(Path(tempfile.mkdtemp()), own=True)) as server:
        server.start("bare")
        yield str(server.address("bare"))


@pytest.fixture(params=["plain", pytest.param("forked", marks=linux)])
def fork(request: pytest.FixtureRequest) -> str | None:
    return str(request.getfixturevalue("bare")) if request.param == "forked" else None


@pytest.fixture
def python(fork: str | None) -> Start:
    """Starts a script, either way: whatever dies, the same is to be seen."""

    def start(processes: Processes, name: str, code: str, folder: Path) -> Process:
        command = [sys.executable, "-c", code]
        log = folder / f"{name}.log"
        return processes.start(name, command, log=log, environment=dict(os.environ), fork=fork)

    return start


def wait_ended(processes: Processes, process: Process) -> None:
    until(lambda: processes.poll(0.1) is not None and process.ended)


@pytest.mark.processes
def test_exit_code_signal_and_output_are_reported(python: Start, tmp_path: Path) -> None:
    with Processes() as processes:
        plain = python(processes, "plain", "print('hello'); raise SystemExit(3)", tmp_path)
        killed = python(processes, "killed", "import os; os.kill(os.getpid(), 9)", tmp_path)
        absent = processes.start("absent", ["/no/such/program"], log=tmp_path / "absent.log", environment={})
        for process in (plain, killed, absent):
            wait_ended(processes, process)
    assert (plain.code, killed.code) == (3, -9)
    assert plain.describe_end() == "exited with code 3"
    assert killed.describe_end() == "was killed by SIGKILL"
    assert "could not be started: /no/such/program" in absent.describe_end()
    assert plain.cpu_s > 0
    assert tail(tmp_path / "plain.log") == "  hello"


TELLS = """
import os, subprocess, sys, time
print("plain")
os.write(1, b"half of sec"); time.sleep(0.1); os.write(1, b"ret-1 and secret-1-more\\n")
subprocess.run(["sh", "-c", "echo by a child: secret-1 >&2"])
os.write(2, b"x" * 100_000 + b"secret-1" * 3)  # a line that does not end
os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
def test_what_is_to_be_hidden_is_not_in_the_log_whoever_writes_it(tmp_path: Path, fork: str | None) -> None:
    log = tmp_path / "log"
    with Processes() as processes:
        for _ in range(2):  # what was there stays
            process = processes.start(
                "tells",
                [sys.executable, "-c", TELLS],
                log=log,
                environment=dict(os.environ),
                hide=["secret-1-more", "secret-1"],
                fork=fork,
            )
            wait_ended(processes, process)
            # Whole as soon as the end is told, which quotes it.
            assert log.read_text().endswith("x<secret><secret><secret>")
    lines = log.read_text().splitlines()
    assert lines[:3] == ["plain", "half of <secret> and <secret>", "by a child: <secret>"]
    assert process.code == -signal.SIGKILL
    assert len(lines[3]) == 100_000 + 3 * len("<secret>") + len("plain")


@pytest.mark.processes
@linux
def test_a_stray_that_holds_a_log_open_holds_up_no_end(tmp_path: Path, fork: str | None) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(600)"
    code = (
        f"import subprocess, sys; stray = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stderr=2, "
        "stdout=subprocess.PIPE, start_new_session=True); stray.stdout.read(1); print('value-1')"
    )
    with Processes() as processes:
        process = processes.start(
            "tells",
            [sys.executable, "-c", code],
            log=tmp_path / "log",
            environment=dict(os.environ),
            hide=["value-1"],
            fork=fork,
        )
        began = time.monotonic()
        wait_ended(processes, process)
        assert time.monotonic() - began < 20
        assert process.code == 0
        assert (tmp_path / "log").read_text() == "<secret>\n"
        # Killed while the run goes on, once it has had time to end.
        until(lambda: marked(processes.mark) == [])


LEAVES = """
import os, subprocess, sys, time
code = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
if len(sys.argv) > 1:
    time.sleep(600)
"""


@pytest.mark.processes
@linux
def test_what_a_process_leaves_in_other_sessions_ends_with_it(fork: str | None, tmp_path: Path) -> None:
    with Processes() as processes:

        def leave(name: str, *stays: str) -> Process:
            command = [sys.executable, "-c", LEAVES, *stays]
            return processes.start(name, command, log=tmp_path / name, environment=dict(os.environ), fork=fork)

        other = leave("other", "stays")
        until(lambda: processes.poll(0.1) is not None and len(marked(processes.mark)) == 2)
        others = marked(processes.mark)
        wait_ended(processes, leave("one"))
        until(lambda: marked(processes.mark) == others)
        assert not other.ended
        processes.stop(grace_s=5, names=["other"])
        until(lambda: marked(processes.mark) == [])


def running_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.processes
@linux
def test_what_has_lost_its_mark_ends_with_the_run(tmp_path: Path) -> None:
    """Orphans become children of the guard; where control groups can be had, they end with their process."""
    word = f"{tmp_path}/far"
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', "
        f"{word!r}], env={{}}, start_new_session=True)"
    )
    with Processes() as processes:
        process = processes.start("one", [sys.executable, "-c", code], log=tmp_path / "log", environment={})
        wait_ended(processes, process)
        assert marked(processes.mark) == []
    until(lambda: running_with(word) == [])


@pytest.mark.processes
@linux
def test_a_control_group_holds_what_its_process_has_started(tmp_path: Path) -> None:
    groups = trees.Groups("0" * 32)
    tree = trees.Tree(groups, 1)
    if tree._group is None:
        pytest.skip("no control group can be made here")
    word = f"{tmp_path}/far"
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)', {word!r}], "
        "env={}, start_new_session=True, stdout=subprocess.PIPE).stdout.read(1)"
    )
    try:
        with forks.plain():
            subprocess.run([sys.executable, "-c", code], check=True, preexec_fn=lambda: tree.take(0))
        assert tree.left() == running_with(word) != []
        with open(f"/proc/{tree.left()[0]}/cgroup") as file:
            assert trees.without_own_group(file.read()) == Path("/proc/self/cgroup").read_text()
        assert tree.terminate()
        assert tree.left() != []
        tree.kill()
        assert tree.left() == []
    finally:
        groups.kill()
    assert not Path(tree._group).exists()
    assert not Path(tree._group).parent.exists()


@pytest.mark.processes
@linux
def test_who_is_told_of_the_end_by_itself_gets_no_second_signal(tmp_path: Path) -> None:
    """As the daemon of a tailnet, which logs its node out: in the control group, but with the run's mark alone."""
    groups = trees.Groups("1" * 32)
    tree = trees.Tree(groups, 1)
    if tree._group is None:
        pytest.skip("no control group can be made here")
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
    started = []
    try:
        with forks.plain():
            for marks in ({MARK: groups.mark}, {MARK: groups.mark, trees.PART: tree.mark}, {}):
                options: dict[str, Any] = {"env": marks, "stdout": subprocess.PIPE, "start_new_session": True}
                started.append(subprocess.Popen(command, preexec_fn=lambda: tree.take(0), **options))
                assert started[-1].stdout is not None
                started[-1].stdout.readline()
        assert tree.terminate()
        assert [one.wait(30) for one in started[1:]] == [-signal.SIGTERM, -signal.SIGTERM]
        assert started[0].poll() is None
        tree.kill()
        assert started[0].wait(30) == -signal.SIGKILL
    finally:
        groups.kill()
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.processes
@linux
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_guard_and_owner_gone_at_once_leaves_nothing(tmp_path: Path, number: signal.Signals, fork: str | None) -> None:
    owner = f"""
import os
from pathlib import Path
from primerl.launch.supervise.processes import Processes
processes = Processes()
folder = Path({os.fspath(tmp_path)!r})
command = [{sys.executable!r}, "-c", {STUBBORN!r}]
processes.start("stubborn", command, log=folder / "log", environment=dict(os.environ), fork={fork!r})
(folder / "told.new").write_text(f"{{processes.mark}} {{processes.guard_pid}}")
(folder / "told.new").rename(folder / "told")
while True:
    processes.poll(1)
"""
    with forks.plain():
        child = subprocess.Popen([sys.executable, "-c", owner], start_new_session=True)
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "ready\n")
    until((tmp_path / "told").exists)
    mark, guard_pid = (tmp_path / "told").read_text().split()
    assert len(marked(mark)) == 2
    os.kill(int(guard_pid), number)
    child.kill()
    child.wait(10)
    until(lambda: marked(mark) == [])
    until(lambda: running_with(mark) == [])


@pytest.mark.processes
@linux
def test_stop_kills_what_ignores_sigterm_and_what_left_its_group(python: Start, tmp_path: Path) -> None:
    with Processes() as processes:
        stubborn = python(processes, "stubborn", STUBBORN, tmp_path)
        log = tmp_path / "stubborn.log"
        until(lambda: processes.poll(0.1) is not None and log.exists() and log.read_text() == "ready\n")
        assert len(marked(processes.mark)) == 2
        began = time.monotonic()
        processes.stop(grace_s=0.3)
        assert time.monotonic() - began < 30
        assert stubborn.code == -signal.SIGKILL
        assert marked(processes.mark) == []


@pytest.mark.processes
@linux
def test_stop_of_one_leaves_the_others(python: Start, tmp_path: Path) -> None:
    with Processes() as processes:
        one = python(processes, "one", "import time; time.sleep(600)", tmp_path)
        other = python(processes, "other", "import time; time.sleep(600)", tmp_path)
        until(lambda: processes.poll(0.1) is not None and other.pid is not None)
        processes.stop(grace_s=5, names=["one"])
        assert one.code == -signal.SIGTERM
        assert not other.ended
        assert marked(processes.mark) == [other.pid]


@pytest.mark.processes
@linux
def test_guard_killed_leaves_nothing(python: Start, tmp_path: Path) -> None:
    with Processes() as processes:
        python(processes, "stubborn", STUBBORN, tmp_path)
        until(lambda: processes.poll(0.1) is not None and (tmp_path / "stubborn.log").exists())
        until(lambda: len(marked(processes.mark)) == 2)
        os.kill(processes.guard_pid, signal.SIGKILL)
        until(lambda: processes.poll(0.1) == [] and processes.guard_end == "was killed")
        until(lambda: marked(processes.mark) == [])


@pytest.mark.processes
@linux
def test_a_guard_that_hangs_is_killed_and_leaves_nothing(
    python: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl.launch.supervise.processes.PING_EVERY_S", 0.05)
    with Processes() as processes:
        python(processes, "stubborn", STUBBORN, tmp_path)
        until(lambda: len(marked(processes.mark)) == 2)
        heard = processes.guard_heard
        until(lambda: processes.poll(0.1) == [] and processes.guard_heard > heard)
        assert processes.guard_end is None
        monkeypatch.setattr("primerl.launch.supervise.processes.GUARD_SILENT_S", 0.5)
        os.kill(processes.guard_pid, signal.SIGSTOP)
        until(lambda: processes.poll(0.1) == [] and processes.guard_end is not None)
        assert "did not answer" in str(processes.guard_end)
        until(lambda: marked(processes.mark) == [])


@pytest.mark.processes
@linux
def test_guard_killed_while_the_orchestrator_starts_is_named(python: Start, tmp_path: Path) -> None:
    with LocalPlacement() as placement:
        orchestrator = python(placement._processes, "orchestrator", STUBBORN, tmp_path)
        os.kill(placement._processes.guard_pid, signal.SIGKILL)
        with pytest.raises(RunFailedError, match="guard of the processes was killed"):
            wait_for_orchestrator(placement, orchestrator, tmp_path)


@pytest.mark.processes
@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_owner_killed_leaves_nothing(tmp_path: Path, number: signal.Signals, fork: str | None) -> None:
    owner = f"""
import os, sys, time
from pathlib import Path
from primerl.launch.supervise.processes import Processes
processes = Processes()
folder = Path({os.fspath(tmp_path)!r})
command = [sys.executable, "-c", {STUBBORN!r}]
processes.start("stubborn", command, log=folder / "log", environment=dict(os.environ), fork={fork!r})
(folder / "mark.new").write_text(processes.mark)
(folder / "mark.new").rename(folder / "mark")
# A fork of the owner's keeps its descriptors open; its death has to be noticed all the same.
if os.fork() == 0:
    time.sleep(30)
while True:
    processes.poll(1)
"""
    child = subprocess.Popen([sys.executable, "-c", owner], start_new_session=True)
    try:
        until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "ready\n")
        until((tmp_path / "mark").exists)
        mark = (tmp_path / "mark").read_text()
        assert len(marked(mark)) == 2
        child.send_signal(number)
        child.wait(10)
        until(lambda: marked(mark) == [])
    finally:
        os.killpg(child.pid, signal.SIGKILL)


def test_mark_is_not_inherited_by_the_owner() -> None:
    assert MARK not in os.environ


def test_tail_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(log, 2) == "  line 99998\n  line 99999"
    assert tail(tmp_path / "absent") == "  (no log)"


STATUS: dict[str, Any] = {
    "run": {"step": 12, "max_steps": 60, "policy_version": 11, "finished": None},
    "rollouts": {"in_flight": 64, "trained": 700, "failed": 0},
    "tokens": {"sampled": 9000, "per_second": 3412.3},
    "last_step": {"reward/all/mean": 0.5312, "staleness/mean": 1.25},
    "engines": [{"version": 11}],
    "workers": [{"environment": "reverse-text"}],
    "trainer": {"last_seen_s": 0.2},
    "waits": [
        {"who": "trainer", "for": "step 13: 2 of 8 groups ready", "since_s": 3.6, "deadline_s": 6.4},
        {"who": "worker env_reverse_0", "for": "a lease", "since_s": 5.2, "deadline_s": 4.8, "usual": True},
    ],
}


def test_console_line_says_what_is_waited_for() -> None:
    expected = (
        "step 12/60  reward 0.531  3,412 tokens/s  in flight 64  staleness 1.2  "
        "trainer waits for step 13: 2 of 8 groups ready (4 s)"
    )
    assert line(STATUS) == expected


def test_console_line_of_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "step 12/60  [====                ]  20 %  eta 3:07  reward 0.531  3,412 tokens/s  in flight 64"
    assert line(STATUS, left_s=187.2, live=True).startswith(expected)
    assert "staleness 1.2  eta 3:07  trainer waits" in line(STATUS, left_s=187.2)
    assert line({"run": {"step": 0}}, live=True).startswith("step 0/?  0 tokens/s")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("primerl.launch.report.console.terminal_width", lambda: 80)
    console = Console(Terminal())
    moment = iter([100.0, 110.0, 114.0])
    console._remaining = Remaining(lambda: next(moment))
    for step in (12, 13, 14):
        console.update({**STATUS, "run": {**STATUS["run"], "step": step}})
    written = [text for text in console.output.getvalue().split("\r\x1b[2K") if text]
    assert [text[: text.find(" tokens")] for text in written] == [
        "step 12/60  [====                ]  20 %  reward 0.531  3,412",
        "step 13/60  [====                ]  22 %  eta 7:50  reward 0.531  3,412",
        "step 14/60  [====                ]  23 %  eta 3:04  reward 0.531  3,412",
    ]


def test_plain_console_prints_a_line_a_step(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as output:
        console = Console(output)
        console.update(STATUS)
        console.update(STATUS)
        console.update({**STATUS, "run": {**STATUS["run"], "step": 13}})
        output.seek(0)
        assert [text.split("  ")[0] for text in output.read().splitlines()] == ["step 12/60", "step 13/60"]


def test_the_last_step_is_told_once() -> None:
    output = io.StringIO()
    console = Console(output)
    console.update(STATUS)
    for _ in range(2):
        console.end({"step": 60, "reward/all/mean": 0.75}, 60)
    assert output.getvalue().splitlines()[1:] == ["step 60/60  reward 0.750"]


def test_a_summary_that_cannot_be_written_does_not_hide_why_the_run_ended(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    sources = {"train": {"env": [{"id": "reverse-text"}]}}
    config = RLConfig.model_validate({"max_steps": 1, "model": {"path": "model"}, "orchestrator": sources})
    with (tmp_path / "out").open("w+") as output:
        Launcher(config, tmp_path, Console(output), {})._write_summary(1, "the disk is full")
        output.seek(0)
        assert f"{tmp_path / 'run' / 'summary.json'} was not written: " in output.read()


def test_a_start_in_which_nothing_ran_leaves_the_summary_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = launcher_of_three(tmp_path, monkeypatch)
    file = tmp_path / "run" / "summary.json"

    def reason_after(code: int, reason: str) -> Any:
        launcher._write_summary(code, reason)
        return json.loads(file.read_text())["reason"]

    assert reason_after(1, "no engine") == "no engine"
    launcher.training_began = launcher.began
    assert reason_after(0, "trained") == "trained"
    launcher.training_began = None
    assert reason_after(1, "refused") == "trained"
    assert reason_after(0, "finished at once") == "finished at once"
    launcher.orchestrator.url = ""
    assert reason_after(0, "nothing left to do") == "finished at once"


def test_a_summary_sums_up_the_sessions_before(tmp_path: Path) -> None:
    def session(scale: int) -> dict[str, Any]:
        processes = {"orchestrator": {"cpu_s": 1.0 * scale}, "trainer": {"cpu_s": 8.0 * scale}}
        times = {"wall_s": 10.0 * scale, "start_s": 2.0 * scale, "run_s": 8.0 * scale, "launcher_cpu_s": 1.0 * scale}
        return {**times, "processes": processes, "status": {"tokens": {"sampled": 100 * scale}}}

    file = tmp_path / summary.FILE
    file.parent.mkdir()
    file.write_text("half a summ")
    summary.write(tmp_path, session(1), has_run=True)
    assert summary.BEFORE not in json.loads(file.read_text())
    summary.write(tmp_path, session(10), has_run=True)
    summary.write(tmp_path, session(100), has_run=True)
    written = json.loads(file.read_text())
    assert (written["wall_s"], written["before"]["sessions"], written["before"]["wall_s"]) == (1000.0, 2, 110.0)
    sums = summary.sums(written)
    assert sums == {
        "sessions": 3,
        "wall_s": 1110.0,
        "start_s": 222.0,
        "run_s": 888.0,
        "sampled_tokens": 11100,
        "sampled_in_sessions": 11100,
        "orchestrator_cpu_s": 111.0,
        "cpu_s": 1110.0,
        "gpu_s": 0.0,
    }


def test_sampled_tokens_are_counted_across_kills_and_steps_back(tmp_path: Path) -> None:
    def after(counted: int, began: int | None, tokens: int = 0) -> float:
        status = {"run": {"sampled_tokens": counted}, "tokens": {"sampled": tokens}}
        noted = summary.sampled_before({} if began is None else {"run": {"sampled_tokens": began}})
        session = {"wall_s": 1.0, "start_s": 0.0, "run_s": 1.0, "status": status, **noted}
        summary.write(tmp_path, session, has_run=True)
        return summary.sums(json.loads((tmp_path / summary.FILE).read_text()))["sampled_tokens"]

    (tmp_path / summary.FILE).parent.mkdir()
    assert after(100, 40, tokens=7) == 100  # the launcher was killed after 40, and the orchestrator after 93
    assert after(150, 120) == 150  # another launcher was killed after 120
    assert after(150, None) == 150  # nothing was heard of it at the start
    assert after(110, 90) == 170  # went back to a checkpoint, after 90
    assert after(130, 110) == 190
    # A rate is of the sessions whose times are known.
    sums = summary.sums(json.loads((tmp_path / summary.FILE).read_text()))
    assert sums["sampled_in_sessions"] == 60 + 30 + 0 + 20 + 20


def test_sampled_tokens_of_earlier_versions_are_kept(tmp_path: Path) -> None:
    (tmp_path / summary.FILE).parent.mkdir()
    times = {"wall_s": 1.0, "start_s": 0.0, "run_s": 1.0}
    summary.write(tmp_path, {**times, "status": {"tokens": {"sampled": 500}}}, has_run=True)
    # What it counts of such a run begins at a snapshot of the earlier version.
    status = {"run": {"sampled_tokens": 90}}
    summary.write(tmp_path, {**times, "status": status, summary.SAMPLED_BEFORE: 20}, has_run=True)
    assert summary.sums(json.loads((tmp_path / summary.FILE).read_text()))["sampled_tokens"] == 570


def launched(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and output of a start whose processes run this program of Python."""
    monkeypatch.setattr(
        commands, "command_of", lambda process: Command([sys.executable, "-c", program], os.environ, process.log)
    )
    values = {"output_dir": str(folder), "max_steps": 1, "model": {"path": "m"}}
    config = RLConfig.model_validate({**values, "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}})
    output = io.StringIO()
    with registered(config, folder, print, goes_on=True) as session:
        launcher = Launcher(config, folder, Console(output), {})
        session.exit_code = launcher.run()
        session.did_nothing, session.has_begun = launcher.did_nothing, launcher.has_begun
    return session.exit_code, output.getvalue()


@pytest.mark.processes
def test_a_refusal_of_the_orchestrator_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("journal/0.snapshot", "configs/orchestrator.toml", "logs/orchestrator.log", "run/summary.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("the session before\n")
    says = "import sys; sys.exit(print('error: batch_size = 32, and now batch_size = 64') or 2)"
    code, output = launched(tmp_path, says, monkeypatch)
    assert code == 2
    assert output.splitlines() == [
        f"resuming the run in {tmp_path}",
        "the orchestrator refuses the run: batch_size = 32, and now batch_size = 64",
    ]
    for name in ("configs/orchestrator.toml", "run/summary.json"):
        assert (tmp_path / name).read_text() == "the session before\n"


@pytest.mark.processes
def test_a_refusal_after_all_has_begun_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that is started again finds its journal damaged, say; by 2, nothing would have been trained."""

    def begun(launcher: Launcher) -> bool:
        launcher.has_begun = True
        return True

    def refused(_: Launcher) -> None:
        raise RefusedError("the orchestrator refuses the run: the journal is damaged")

    monkeypatch.setattr(Launcher, "_start", begun)
    monkeypatch.setattr(Launcher, "_watch", refused)
    code, output = launched(tmp_path, "", monkeypatch)
    assert (code, output) == (1, "the orchestrator refuses the run: the journal is damaged\n")


def test_a_session_that_ran_nothing_tells_of_itself_until_one_has_run(tmp_path: Path) -> None:
    def ended(code: int, reason: str, run_s: float, *, has_run: bool) -> str:
        content = {"exit_code": code, "reason": reason, "wall_s": 9.0, "start_s": 9.0 - run_s, "run_s": run_s}
        summary.write(tmp_path, {**content, "gpus": 0}, has_run=has_run)
        return str(json.loads((tmp_path / "run" / "summary.json").read_text())["reason"])

    (tmp_path / "run").mkdir()
    assert ended(1, "no port", 0.0, has_run=False) == "no port"
    assert ended(1, "no model", 0.0, has_run=False) == "no model"
    assert ended(1, "no memory", 4.0, has_run=True) == "no memory"
    assert ended(1, "no port", 0.0, has_run=False) == "no memory"
    assert ended(0, "finished", 0.0, has_run=True) == "finished"
    assert ended(2, "no key", 0.0, has_run=False) == "finished"
    (tmp_path / "run" / "summary.json").write_text('{"exit_code": 1, "run_s": 0.0}')
    assert ended(1, "no model", 0.0, has_run=False) == "no model"


@pytest.mark.parametrize("log", ["  ", "  \n  ", "  (no log)", "  a: b", "  a\n  b: c", "    f()\n  two words: c"])
def test_a_log_that_ends_with_no_traceback_names_no_exception(log: str) -> None:
    assert last_exception(log) is None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "printed", "said"),
    [
        (2, "Not read: a key is wrong", "orchestrator exited with code 2"),
        (1, "error: no space left", "the run has failed: orchestrator exited with code 1 (no space left)"),
        (
            1,
            "Traceback\n  f()\nValueError: a shape",
            "the run has failed: orchestrator exited with code 1 (ValueError: a shape)",
        ),
        (1, "  f()\nmine.Boom", "the run has failed: orchestrator exited with code 1 (mine.Boom)"),
        (1, "  f()\nValueError: of before\nsaved", "the run has failed: orchestrator exited with code 1"),
        (1, "warning: a value", "the run has failed: orchestrator exited with code 1"),
        (7, "  f()\nValueError: caught", "the run has failed: orchestrator exited with code 7"),
    ],
)
def test_whether_the_orchestrator_refuses_is_told_by_its_code(
    code: int, printed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, output = launched(tmp_path, f"import sys; sys.exit(print({printed!r}) or {code})", monkeypatch)
    assert found == (2 if code == 2 else 1)
    _, first, second, *log = output.splitlines()
    assert first == said
    assert re.fullmatch(r"the end of /.*\.log:", second)
    assert log == [f"  {line}" for line in printed.splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ended_by", "last"),
    [
        (Interrupted(), "interrupted; the same command resumes from its beginning"),
        (within.TimeIsUp(), f"{within.REASON}; the same command resumes from its beginning"),
        (KeyboardInterrupt(), "killed"),
    ],
)
def test_how_to_resume_is_told_of_a_run_that_was_stopped_in_order(
    ended_by: BaseException, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Launcher) -> bool:
        raise ended_by

    monkeypatch.setattr(Launcher, "_start", start)
    code, output = launched(tmp_path, "", monkeypatch)
    assert code == 130
    assert output.splitlines()[-1].startswith(last)


@pytest.mark.processes
def test_a_start_that_finds_the_run_over_keeps_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("journal/0.snapshot", "configs/orchestrator.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("the session before\n")
    (tmp_path / "logs").mkdir()
    says = "print('the run in this output_dir is over: all 1 steps are trained')"
    code, output = launched(tmp_path, says, monkeypatch)
    assert code == 0
    assert "nothing is left to do" in output
    assert (tmp_path / "configs" / "orchestrator.toml").read_text() == "the session before\n"


def launcher_of_three(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Launcher, Any]:
    """A launcher that starts nothing, and a table of processes: the orchestrator comes back where it was."""
    sources = {"train": {"env": [{"id": "reverse-text"}]}}
    config = RLConfig.model_validate({"max_steps": 6, "model": {"path": "m"}, "orchestrator": sources, **settings})
    processes: Any = SimpleNamespace(by_name={}, lost=None)
    launcher = Launcher(config, folder, Console(io.StringIO()), {}, placement=processes)
    launcher.orchestrator.url = "http://127.0.0.1:1"
    kinds = {"orchestrator": "orchestrator", "env": "env-worker", "trainer": "trainer"}
    described = {name: SimpleNamespace(name=name, kind=kind, config=None) for name, kind in kinds.items()}
    launcher.recovery.described = described  # type: ignore[assignment]

    def start(_: Any, described: Any) -> Process:
        processes.by_name[described.name] = Process(described.name, folder / f"{described.name}.log", pid=1)
        return processes.by_name[described.name]

    for one in described.values():
        start(processes, one)
    monkeypatch.setattr(recovery, "start", start)
    monkeypatch.setattr(recovery, "wait_for_orchestrator", lambda *_: launcher.orchestrator.url)
    return launcher, processes


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by SIGKILL"), (7, "exited with code 7")])
def test_rollouts_of_a_worker_that_ended_are_handed_out_at_once(
    code: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, processes = launcher_of_three(tmp_path, monkeypatch)
    described = launcher.recovery.described["env"]
    described.config = EnvWorkerConfig.model_construct(worker_name="env_task_0")  # type: ignore[misc]
    killed = processes.by_name["env"]
    workers = [{"worker": 4, "name": f"env_task_0:{killed.pid + 1}"}, {"worker": 5, "name": f"env_task_0:{killed.pid}"}]
    told = []

    class Orchestrator(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"workers": workers})

        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            told.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self._answer({"rollouts": [{"rollout": 12, "example": 3}, {"rollout": 14, "example": 0}]})

        def _answer(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Orchestrator) as server:
        threading.Thread(target=server.serve_forever).start()
        launcher.orchestrator.url = f"http://127.0.0.1:{server.server_port}"
        end(launcher, processes, "env", code)
        server.shutdown()
    assert told == [("/envs/leave", {"worker": 5, "reason": how})]
    assert processes.by_name["env"] is not killed
    said = launcher.console.output.getvalue()
    assert f"env {how}; it ran rollout 12 (example 3), rollout 14 (example 0); it is started again" in said


def end(launcher: Launcher, processes: Any, name: str, code: int) -> None:
    processes.by_name[name].code = code
    launcher.recovery.ended(processes.by_name[name])


def write_metrics(folder: Path, steps: int, torn: str = "") -> None:
    lines = [f'{{"step": {step}, "loss": 0.1}}\n' for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)


def test_a_stopped_run_has_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, processes = launcher_of_three(tmp_path, monkeypatch)
    processes.watch = lambda timeout_s: []
    write_metrics(tmp_path, 3, torn='{"step": 4, "lo')
    for name in ("trainer", "env", "orchestrator"):
        end(launcher, processes, name, 0)
    stopped = "the orchestrator was stopped at step 3 of 6; the same command resumes it"
    with pytest.raises(RunFailedError, match=f"^{stopped}$"):
        launcher._watch()
    write_metrics(tmp_path, 6)
    launcher._watch()


def test_what_a_stopped_run_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert position.trained_steps(tmp_path) == 0
    write_metrics(tmp_path, 6)
    assert position.cut_short(tmp_path, 6, evaluates=False) is None
    for over, lacks in (("all 6 steps are trained", None), (None, "stopped after step 6, before the last evaluation")):
        monkeypatch.setattr(position, "inspect_run", lambda folder, over=over: {"finished": over})
        found = position.cut_short(tmp_path, 6, evaluates=True)
        assert found is lacks if lacks is None else lacks in str(found)


def test_who_was_sent_home_comes_back_with_the_orchestrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, processes = launcher_of_three(tmp_path, monkeypatch)
    write_metrics(tmp_path, 3)
    end(launcher, processes, "trainer", 0)
    end(launcher, processes, "orchestrator", -9)
    assert launcher.recovery.early == {}
    assert not any(process.ended for process in processes.by_name.values())
    # What the killed one had said reaches the worker late.
    end(launcher, processes, "env", 0)
    launcher.recovery.ended_too_early(processes.by_name["env"])
    assert not processes.by_name["env"].ended


def test_a_trainer_that_has_trained_everything_is_not_called_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, processes = launcher_of_three(tmp_path, monkeypatch)
    write_metrics(tmp_path, 6)
    end(launcher, processes, "trainer", 0)
    end(launcher, processes, "orchestrator", -9)
    assert processes.by_name["trainer"].ended
    launcher.recovery.ended_too_early(processes.by_name["trainer"])


def test_a_trainer_that_ended_too_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, processes = launcher_of_three(tmp_path, monkeypatch, restarts=1)
    write_metrics(tmp_path, 3)
    end(launcher, processes, "trainer", 0)
    with pytest.raises(RunFailedError, match=r"^trainer ended before the run had\n"):
        launcher.recovery.ended_too_early(processes.by_name["trainer"])
    end(launcher, processes, "orchestrator", -9)
    end(launcher, processes, "trainer", 0)
    with pytest.raises(RunFailedError, match=r"^trainer ended before the run had, and `restarts` = 1 does not allow"):
        launcher.recovery.ended_too_early(processes.by_name["trainer"])


def test_a_trainer_that_is_started_again_has_the_time_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(recovery.orchestrator_status, "trainer_starts", lambda *said: told.append(said))
    settings = {"trainer": {"ckpt": {"interval": 1}}, "timeouts": {"start_s": 77}}
    launcher, processes = launcher_of_three(tmp_path, monkeypatch, **settings)
    end(launcher, processes, "trainer", -9)
    assert not processes.by_name["trainer"].ended
    assert told == [("http://127.0.0.1:1", 77.0, "was killed by SIGKILL")]
    end(launcher, processes, "env", -9)
    assert len(told) == 1, "nobody else's start is told"


def test_what_is_trained_again_is_told(tmp_path: Path) -> None:
    assert position.trained_again(tmp_path, Checkpoints()) is None
    write_metrics(tmp_path, 3)
    assert position.trained_again(tmp_path, Checkpoints()) == (
        "no checkpoint: the trainer trains steps 1 to 3 again (set ckpt.interval to resume from where it was)"
    )
    assert "ckpt.interval is 10; lower it" in str(position.trained_again(tmp_path, Checkpoints(interval=10)))
    only = Checkpoints(interval=10, weights_only=True)
    assert "ckpt.weights_only saves none; omit it" in str(position.trained_again(tmp_path, only))
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    assert position.trained_again(tmp_path, Checkpoints(interval=10)) is None


def test_a_killed_trainer_without_checkpoints_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, processes = launcher_of_three(tmp_path, monkeypatch)
    with pytest.raises(RunFailedError, match=r"(?s)^trainer was killed by SIGKILL; .*with ckpt\.interval"):
        end(launcher, processes, "trainer", -9)


def test_env_workers_of_an_earlier_session_are_signed_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is started: their process ids are not known, and may be in use again."""
    names = ["env_a_0:12", "env_a_1:13", "env_a_1@host:14", "gpu-7:15", "env_b_0"]
    workers = [{"worker": number, "name": name, "environment": "a"} for number, name in enumerate(names)]
    monkeypatch.setattr(recovery.orchestrator_status, "fetch", lambda url: {"workers": workers})
    left: list[Any] = []

    def tell(url: str, path: str, body: dict[str, Any], *, within_s: float) -> tuple[int, dict[str, Any]]:
        left.append((path, body))
        return 200, {"rollouts": []}

    monkeypatch.setattr(recovery.orchestrator_status, "tell", tell)
    sources = {"train": {"env": [{"id": "a", "num_workers": 2}, {"id": "b", "num_workers": 1}]}}
    config = RLConfig.model_validate({"max_steps": 1, "model": {"path": "model"}, "orchestrator": sources})
    sign_off_earlier("http://127.0.0.1:1", [*resolve.inference(config, "u"), *resolve.env_workers(config, "u")])
    reason = "ended with the session that had started it"
    assert left == [("/envs/leave", {"worker": number, "reason": reason}) for number in (0, 1, 4)]

    def unanswered(url: str, path: str, body: dict[str, Any], *, within_s: float) -> tuple[int, dict[str, Any]]:
        left.append((path, body))
        raise UnansweredError("no answer")

    # The start does not wait for each of them.
    left.clear()
    monkeypatch.setattr(recovery.orchestrator_status, "tell", unanswered)
    sign_off_earlier("http://127.0.0.1:1", resolve.env_workers(config, "u"))
    assert len(left) == 1


def test_missing_parts_are_named() -> None:
    assert missing(STATUS, ["reverse-text"]) == []
    bare = {"engines": [], "workers": [], "trainer": {}}
    assert missing(bare, ["a"]) == [
        "no inference engine has joined",
        "no env worker of 'a' has registered",
        "the trainer has not reported",
    ]
    refused = [{"environment": "a", "name": "w:7", "reason": 'worker "w:7" lists 5 examples'}]
    assert "no env worker of 'a' has registered: worker \"w:7\" lists 5 examples" in missing(
        {**bare, "refused_workers": refused}, ["a"]
    )
    unproved = {**STATUS, "engines": [{"version": None}]}
    assert missing(unproved, []) == ["no inference engine has proved its weights"]
    refused = {"url": "http://node:8001", "version": None, "healthy": False, "doing": "not reachable: refused"}
    [said] = missing({**STATUS, "engines": [refused]}, [])
    assert said.endswith("weights; http://node:8001: not reachable: refused")


def test_progress_is_any_sign_of_work() -> None:
    progress = Progress()
    assert progress.moved(STATUS, 1.0)
    assert not progress.moved(STATUS, 2.0)
    assert progress.since == 1.0
    assert progress.moved({**STATUS, "tokens": {"sampled": 9001}}, 3.0)
    assert progress.since == 3.0


def test_who_has_nothing_to_do_holds_nobody_up() -> None:
    trainer = "trainer waits for step 13: 2 of 8 groups ready (4 s)"
    assert waits(STATUS) == [trainer, "worker env_reverse_0 waits for a lease (5 s)"]
    assert longest_wait(STATUS, 0.0) == trainer
    assert longest_wait(STATUS, 4.0) is None
    blocked = {"who": "worker env_reverse_1", "for": "its environment's code, which blocks it", "since_s": 12.0}
    assert longest_wait({**STATUS, "waits": [*STATUS["waits"], blocked]}, 2.0) == (
        "worker env_reverse_1 waits for its environment's code, which blocks it (12 s)"
    )


def test_many_failures_are_on_the_line() -> None:
    shares = {"errors/environment": 0.5, "errors/timeout": 0.08, "errors/reverse-text/environment": 0.5}
    assert "reward 0.531  failed 58 % (environment)  3,412 tokens/s" in line(
        {**STATUS, "last_step": {**STATUS["last_step"], **shares}}
    )
    assert failures({"errors/environment": 0.04, "errors/engine": 0.0}) is None
    assert failures({"errors/environment": None}) is None


def test_an_engine_that_is_gone_is_told_only_when_no_other_serves() -> None:
    reason = "not reachable: health: no answer: error sending request for url (http://127.0.0.1:1/health)"
    gone = {"who": "engine http://127.0.0.1:1", "engine": 0, "for": reason, "since_s": 9.0, "deadline_s": None}
    status = {**STATUS, "waits": [gone, *STATUS["waits"]], "engines": [{"version": None}, {"version": 11}]}
    assert longest_wait(status, 2.0) == "trainer waits for step 13: 2 of 8 groups ready (4 s)"
    assert longest_wait({**status, "engines": [{"version": None}]}, 2.0) == "no engine serves (9 s)"
    # Whoever asks for all is told the cause.
    assert waits(status)[0] == f"engine http://127.0.0.1:1 does not serve: {reason} (9 s)"


def test_output_folder_of_strangers_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="--clean-output-dir"):
        output_folder.check_output_dir(str(tmp_path), clean=False, kind="rl")
    with pytest.raises(ConfigError, match="no run of primerl wrote"):
        output_folder.check_output_dir(str(tmp_path), clean=True, kind="rl")
    # Also where no one has asked before.
    with pytest.raises(ConfigError, match="no run of primerl wrote"), claimed(str(tmp_path), clean=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    # As projects have, too.
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "rl.toml").write_text("max_steps = 2")
    with pytest.raises(ConfigError, match="no run of primerl wrote"):
        output_folder.check_output_dir(str(tmp_path), clean=True, kind="rl")
    (tmp_path / LOCK).parent.mkdir()
    (tmp_path / LOCK).touch()
    output_folder.check_output_dir(str(tmp_path), clean=True, kind="rl")
    with claimed(str(tmp_path), clean=True):
        assert not (tmp_path / "thesis.tex").exists()
        # A second one, that had looked before the first began, must not empty the folder of a run that lives.
        (tmp_path / "metrics.jsonl").write_text("x")
        with pytest.raises(ConfigError, match="another run is using"), claimed(str(tmp_path), clean=True):
            pass
        assert (tmp_path / "metrics.jsonl").exists()


def test_output_folder_of_a_run_that_wrote_nothing_is_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(str(folder), clean=True):
        (folder / "engines_model").mkdir()
    with claimed(str(folder), clean=True):
        assert not (folder / "engines_model").exists()


def test_a_dry_run_leaves_the_run_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("journal/0.snapshot", "configs/trainer.toml", "metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    model = tmp_path.with_name("model")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    values = {"output_dir": str(tmp_path), "max_steps": 1, "model": {"path": str(model)}, "dry_run": True}
    config = RLConfig.model_validate({**values, "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}})
    # The folder's check alone: there is no model.
    monkeypatch.setattr(training, "check", lambda config, *_: training._output_dir(config) or {})
    output = io.StringIO()
    assert launch_run.run(config, Console(output)) == 0
    assert f"a start resumes the run in {tmp_path}" in output.getvalue()
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files.pop("run/launcher.lock") == ""
    assert files == {name: name for name in ("journal/0.snapshot", "configs/trainer.toml", "metrics.jsonl")}


def test_output_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(str(folder), clean=False):
        with pytest.raises(ConfigError, match="another run is using"):
            output_folder.check_output_dir(str(folder), clean=True, kind="rl")
        with pytest.raises(ConfigError, match="another run is using"), claimed(str(folder), clean=False):
            pass
    output_folder.check_output_dir(str(folder), clean=True, kind="rl")


def test_output_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    for folder in (tmp_path / "dangling", tmp_path / ("x" * 300), f"{tmp_path}/a\0b"):
        with pytest.raises(ConfigError, match=r"^output_dir: .* choose another output_dir"):
            output_folder.check_output_dir(str(folder), clean=False, kind="rl")
    # Only the attempt tells that nobody can make a folder there.
    with pytest.raises(ConfigError, match=r"^output_dir: /proc/"), claimed("/proc/1/run", clean=False):
        pass


def test_port_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PlacementError, match=rf"^orchestrator\.port: port {port} is in use"):
            plan_listener("orchestrator", "127.0.0.1", port)
    plan_listener("orchestrator", "127.0.0.1", 0)
    with pytest.raises(PlacementError, match=r"^inference\.host: 'no\.such\.host\.invalid'"):
        plan_listener("inference", "no.such.host.invalid", 0)
    for host in ("..", f"{'x' * 64}.org"):
        with pytest.raises(PlacementError, match=r"^orchestrator\.host: "):
            plan_listener("orchestrator", host, 0)


def plan_listener(key: str, host: str, port: int) -> None:
    LocalPlacement().plan([Role("one", "inference", listens=(Listener(key, host, port),))])


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (["config.json"], "has no config.json"),
        (["tokenizer.json"], "has no tokenizer.json"),
        (["model.safetensors"], "no .*safetensors weights"),
        (["chat_template.jinja"], "has no chat template"),
    ],
)
def test_incomplete_model_folder_is_named(tmp_path: Path, remove: list[str], message: str) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    model_folder.check_model(tmp_path)
    for name in remove:
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=message) as caught:
        model_folder.check_model(tmp_path)
    assert str(caught.value).startswith("model.path: ")
    assert str(tmp_path) in str(caught.value)


def test_absent_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: there is no folder"):
        model_folder.check_model(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"junk", "header cannot be read"),
        (b"\xff" * 16, "header cannot be read"),
        (b"\x02\0\0\0\0\0\0\0[]", "header cannot be read"),
        (b'\x2a\0\0\0\0\0\0\0{"a":{"dtype":"F32","data_offsets":[0,4]}}123', "53 bytes, its header says 54"),
    ],
)
def test_broken_weights_are_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        model_folder.check_weights(file)
    assert str(caught.value).startswith(f"model.path: {file} ")
    file.write_bytes(b'\x2a\0\0\0\0\0\0\0{"a":{"dtype":"F32","data_offsets":[0,4]}}1234')
    model_folder.check_weights(file)


def test_a_model_folder_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, seed=0)
    model_folder.check_model(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(changes: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(weights or whole, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError) as caught:
            model_folder.check_model(tmp_path)
        return str(caught.value)

    assert "quantised" in refused({"quantization_config": {"quant_method": "bitsandbytes"}})
    assert "token ids up to 255, but config.json says vocab_size 200" in refused({"vocab_size": 200})
    wide = 2 * config["hidden_size"]
    assert f"config.json implies [{config['vocab_size']}, {wide}]" in refused({"hidden_size": wide})
    layers = config["num_hidden_layers"]
    said = refused({"num_hidden_layers": layers + 1})
    assert f"have {layers} layers, config.json says num_hidden_layers {layers + 1}" in said
    name = "model.layers.0.self_attn.q_proj.weight"
    assert f"{name} in " in refused({}, {**whole, name: whole[name].to(torch.int8)})
    save_file(whole, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": {name: "model-00002-of-00002.safetensors"}}
    (tmp_path / model_folder.INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors, which is not in"):
        model_folder.check_model(tmp_path)
