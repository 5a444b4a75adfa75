"""Fork servers: what a fork has to be for others to take it for a process that was started anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from end_to_end import find, until
from primerl.forking import child, exit_status, request, server, servers
from primerl.forking.popen import ForkedPopen
from primerl.forking.preload import ENVIRONMENTS, TORCH
from primerl.forking.servers import Servers, are_wanted
from primerl.launch.placement.protocol import Process
from primerl.launch.supervise.processes import Processes
from primerl.launch.supervise.trees import marked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux"),
]
PIPE = subprocess.PIPE
NO_PIPES = {"stdin": None, "stdout": None, "stderr": None}
PARENT = "import os; print(os.getppid())"
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def bare() -> Iterator[Servers]:
    """One that has imported nothing, and starts in no time."""
    with closing(Servers(Path(tempfile.mkdtemp(prefix="primerl-test-")), own=True)) as servers:
        servers.start("bare")
        yield servers


def forked(servers: Servers, script: str, *arguments: str, **options: Any) -> ForkedPopen:
    options = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "text": True, **options}
    return ForkedPopen([sys.executable, "-c", script, *arguments], address=str(servers.address("bare")), **options)


def plain(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "text": True, **options}
    with forks.plain():
        return subprocess.Popen([sys.executable, "-c", script, *arguments], **options)


def is_forked(process: ForkedPopen) -> bool:
    """Of a script that prints its parent."""
    return int(process.communicate(timeout=30)[0]) != os.getpid()


LOOKS = """
import json, os, resource, signal, sys, tempfile, time
with open("/proc/self/cmdline", "rb") as file:
    shown = file.read().rstrip(b"\\0").decode().split("\\0")
os.umask(umask := os.umask(0))
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path[:2], "shown": shown, "main": __name__,
    "cwd": os.getcwd(), "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "umask": umask, "leads": os.getsid(0) == os.getpid(), "temporary": tempfile.gettempdir(), "zone": time.tzname,
    "limits": [resource.getrlimit(number) for number in range(16)], "cores": sorted(os.sched_getaffinity(0)),
    "nice": os.getpriority(os.PRIO_PROCESS, 0), "input": sys.stdin.read(), "terminal": sys.stdout.isatty(),
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 3, 13, 15)],
    "descriptors": sum(fd < 3 for fd in map(int, os.listdir("/proc/self/fd"))),
    "frozen": __import__("gc").isenabled(), "buffered": sys.stdout.write_through,
}))
print("and this", file=sys.stderr)
"""


def test_a_fork_is_what_a_new_process_is(bare: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    added = {"PYTHONPATH": os.pathsep.join(["/nowhere/else", os.environ.get("PYTHONPATH", "")]), "TZ": "Asia/Tokyo"}
    options = {"cwd": tmp_path, "env": {**os.environ, **added, "NEW": "ü"}, "start_new_session": True}
    before = os.umask(0o27)
    try:
        started = [start(LOOKS, "an argument", **options) for start in (lambda *a, **o: forked(bare, *a, **o), plain)]
    finally:
        os.umask(before)
    seen = []
    for process in started:
        output, errors = process.communicate("what is typed", timeout=30)
        assert (process.returncode, errors) == (0, "and this\n")
        seen.append(json.loads(output))
    assert seen[0] == seen[1]
    assert seen[0]["input"] == "what is typed"
    assert seen[0]["cwd"] == str(tmp_path)


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit(True)", 1, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("raise ValueError('bad')", 1, "ValueError: bad\n"),
        ("import os; os._exit(7)", 7, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_the_end_is_as_of_a_new_process(script: str, code: int, told: str, bare: Servers) -> None:
    for process in (forked(bare, script), plain(script)):
        _, errors = process.communicate(timeout=30)
        assert process.returncode == code
        assert errors.endswith(told)
        assert bool(errors) == bool(told)


def test_what_ends_with_a_process_is_done(bare: Servers, tmp_path: Path) -> None:
    script = f"""
import atexit, threading, time
file = open({str(tmp_path / "file")!r}, "w")
file.write("not flushed")
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
print("main", end=" ")
"""
    output, _ = forked(bare, script).communicate(timeout=30)
    assert output == "main of a thread\nat exit\n"
    assert (tmp_path / "file").read_text() == "not flushed"


def test_waiting_polling_signals_and_times_of_the_processor(bare: Servers) -> None:
    process = forked(bare, SLEEPS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == process.poll() == -signal.SIGTERM
    process.kill()  # which is no error once it has ended
    assert process.cpu_s > 0
    process.communicate()


@pytest.mark.parametrize(
    ("name", "value", "is_fork"),
    [
        ("OF_A_USER", "1", True),
        ("OPENAI_API_KEY", "1", True),
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("OMP_NUM_THREADS", "3", True),
        ("PYTHONUNBUFFERED", "1", True),
        ("PYTHONPATH", "/nowhere/else", True),
        ("PYTHONHASHSEED", "7", False),
        ("LD_PRELOAD", "", False),
        ("SSL_CERT_FILE", "/nowhere", False),
    ],
)
def test_what_was_read_before_the_fork_is_started_the_plain_way(
    name: str, value: str, is_fork: bool, bare: Servers
) -> None:
    known = os.environ.get(name)
    added = f"{value}{os.pathsep}{known}" if name == "PYTHONPATH" and known else value
    assert is_forked(forked(bare, PARENT, env={**os.environ, name: added})) == is_fork


def test_a_search_path_that_would_have_imported_others_is_started_the_plain_way(bare: Servers, tmp_path: Path) -> None:
    (tmp_path / "selectors.py").touch()  # one that the server has imported
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    assert not is_forked(forked(bare, PARENT, env={**os.environ, "PYTHONPATH": path}))


def test_who_is_elsewhere_gets_no_fork(bare: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another network namespace, say, where a fork would reach another network than its run."""
    here = request.place()
    assert any(part.startswith("net:") for part in here)
    monkeypatch.setattr(request, "place", lambda: [*here[:-1], "0::/elsewhere"])
    process = forked(bare, PARENT)
    assert not is_forked(process)
    assert process.refusal == "who asks has another user, namespace, root folder or control group"


def test_variables_that_imports_look_up_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "1")
    with server.recorded() as names:
        assert os.environ.get("SET") == "1"
        assert os.getenv("NOT_SET") is None
        assert "LOOKED_FOR" not in os.environ
        assert dict(os.environ)["SET"] == {**os.environ}["SET"] == "1"
    os.environ.get("LATER")
    assert names == {"SET", "NOT_SET", "LOOKED_FOR"}


@pytest.mark.skipif(os.environ.get("PRIMERL_FORK_SERVER") == "off", reason="the tests run without fork servers")
@pytest.mark.parametrize("kind", [ENVIRONMENTS, TORCH])
def test_servers_are_fit_to_fork(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread of Python, no CUDA, no torch where none is needed; each fork draws numbers of its own."""
    script = """
import sys, threading
if "torch" in sys.modules:
    import torch
    assert not torch.cuda._is_in_bad_fork() and not torch.cuda.is_initialized()
    torch.ones(256, 256) @ torch.ones(256, 256)
import numpy
print(threading.active_count(), "torch" in sys.modules, "transformers" in sys.modules, "verifiers" in sys.modules)
print(numpy.random.random(), torch.rand(()).item() if "torch" in sys.modules else numpy.random.default_rng().random())
"""
    shared = Servers(Path(os.environ["PRIMERL_FORK_SERVER"]), own=False) if forks._shared is None else forks._shared
    shared.start(kind)
    monkeypatch.setattr(request, "FORK_WAIT_S", 240.0)  # on a machine at work
    address = str(shared.address(kind))
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    drawn = []
    for _ in range(2):
        process = ForkedPopen([sys.executable, "-c", script], address=address, stdout=PIPE, text=True, env=environment)
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, process.refusal) == (0, None)
        state, numbers = output.splitlines()
        assert state == ("1 True True False" if kind == TORCH else "1 False False True")
        drawn.append(numbers.split())
    assert not set(drawn[0]) & set(drawn[1])


def test_a_fork_that_could_not_use_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError, match="CUDA was asked for before the fork"):
        child.check_cuda()


def test_ps_shows_what_it_is_and_no_secrets(bare: Servers, tmp_path: Path) -> None:
    environment = {**os.environ, "A_KEY": "value-1", "RANK": "3"}
    with Processes() as processes:
        fork = str(bare.address("bare"))
        # Another copy of the tests may run at the same time.
        command = [sys.executable, "-c", SLEEPS, "@", str(tmp_path / "trainer.toml")]
        process = processes.start("it", command, log=tmp_path / "log", environment=environment, fork=fork)
        until(lambda: processes.poll(0.1) is not None and process.pid, 30, "a start")
        assert find(SLEEPS, str(tmp_path / "trainer.toml")) == process.pid
        shown = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"value-1" not in shown
        assert b"RANK=3\0" in shown
        assert marked(processes.mark) == [process.pid]


def begin(
    processes: Processes, servers: Servers, name: str, script: str, folder: Path, *, waits: bool = True
) -> Process:
    command = [sys.executable, "-c", script]
    fork = servers.address("bare")
    process = processes.start(name, command, log=folder / name, environment=dict(os.environ), fork=fork)
    if waits:
        until(lambda: processes.poll(0.05) is not None and (process.pid or process.ended), 30, "a start")
    return process


def parent_of(process: Process) -> int:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[1])


def test_a_server_that_is_killed_takes_nothing_with_it(bare: Servers, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    script = f"import time, pathlib\nwhile not pathlib.Path({go!r}).exists(): time.sleep(0.02)\n"
    with Processes() as processes:
        ends = begin(processes, bare, "ends", script + "raise SystemExit(5)", tmp_path)
        dies = begin(processes, bare, "dies", SLEEPS, tmp_path)
        stays = begin(processes, bare, "stays", SLEEPS, tmp_path)
        assert parent_of(ends) == parent_of(stays) == bare.processes["bare"].pid
        bare.processes["bare"].kill()
        bare.processes["bare"].wait()
        assert bare.lost() == ["bare"]
        assert bare.lost() == []
        later = begin(processes, bare, "later", SLEEPS, tmp_path)
        assert parent_of(later) == processes.guard_pid
        Path(go).touch()
        assert dies.pid is not None
        os.kill(dies.pid, signal.SIGTERM)
        until(lambda: processes.poll(0.1) is not None and ends.ended and dies.ended, 30, "two ends")
        assert ends.code == 5
        # Older kernels keep no status for others than the parent, who may have taken it by now.
        assert dies.code in (-signal.SIGTERM, exit_status.NOT_KNOWN)
        assert not stays.ended
        processes.stop(grace_s=10)
        assert stays.ended
        assert later.code == -signal.SIGTERM
        assert marked(processes.mark) == []


def test_a_server_that_hangs_hides_no_end(bare: Servers, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = (
        f"import time, pathlib\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\nraise SystemExit(5)"
    )
    with Processes() as processes:
        ends, dies = begin(processes, bare, "ends", script, tmp_path), begin(processes, bare, "dies", SLEEPS, tmp_path)
        popened = [forked(bare, script), forked(bare, SLEEPS)]
        os.kill(bare.processes["bare"].pid, signal.SIGSTOP)
        go.touch()
        assert dies.pid is not None
        os.kill(dies.pid, signal.SIGTERM)
        os.kill(popened[1].pid, signal.SIGSEGV)
        until(lambda: processes.poll(0.1) is not None and ends.ended and dies.ended, 30, "two ends")
        assert (ends.code, dies.code) == (5, -signal.SIGTERM)
        for process, code in zip(popened, (5, -signal.SIGSEGV), strict=True):
            process.communicate(timeout=30)
            assert process.returncode == code
        stays = begin(processes, bare, "stays", SLEEPS, tmp_path, waits=False)
        processes.stop(grace_s=5)
        assert stays.ended
        assert processes.guard_end is None
        os.kill(bare.processes["bare"].pid, signal.SIGCONT)


def test_nobody_waits_for_what_cannot_be_started_either_way(bare: Servers, tmp_path: Path) -> None:
    process = forked(bare, PARENT, cwd=tmp_path / "absent", at_once=True, **NO_PIPES)
    with pytest.raises(FileNotFoundError):
        process.communicate(timeout=30)
    process.kill()
    assert process.wait(30) == 127


def test_forks_of_a_fork_keep_their_files(bare: Servers) -> None:
    """What environments do that run code: a pool of processes, whose workers start programs with limits."""
    script = """
import multiprocessing, subprocess, sys
def work(number):
    return subprocess.run([sys.executable, "-c", "print(1)"], preexec_fn=lambda: None, capture_output=True).stdout
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(work, range(4)) == [b"1\\n"] * 4)
"""
    assert forked(bare, script).communicate(timeout=60) == ("True\n", "")


def test_a_thread_that_is_stuck_does_not_hold_up_the_end(bare: Servers) -> None:
    script = """
import subprocess, sys, tempfile, threading, time
nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
reader = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, **nowhere)
threading.Thread(target=lambda: reader.stdin.write(b"x" * 10_000_000), daemon=True).start()
file = tempfile.NamedTemporaryFile()
print(file.name, reader.pid)
"""
    output, _ = forked(bare, script).communicate(timeout=30)
    name, reader = output.split()
    os.kill(int(reader), signal.SIGKILL)
    assert not Path(name).exists()


def test_numbers_of_threads_that_only_the_library_reads_start_the_plain_way(bare: Servers) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "", "OMP_NUM_THREADS": "4,2"}
    process = forked(bare, PARENT, env=environment)
    assert not is_forked(process)
    assert process.returncode == 0


def test_a_server_that_is_gone_or_hangs_costs_time_only(
    bare: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(bare.address("bare"))
    os.kill(bare.processes["bare"].pid, signal.SIGSTOP)
    monkeypatch.setattr(request, "FORK_WAIT_S", 0.2)
    assert not is_forked(forked(bare, PARENT))
    bare.processes["bare"].kill()
    bare.processes["bare"].wait()
    process = ForkedPopen([sys.executable, "-c", PARENT], address=address, stdout=PIPE, text=True)
    assert not is_forked(process)


def test_what_is_ended_before_it_has_begun_never_begins(bare: Servers, tmp_path: Path) -> None:
    file = tmp_path / "begun"
    os.kill(bare.processes["bare"].pid, signal.SIGSTOP)
    script = f"open({str(file)!r}, 'w')"
    process = forked(bare, script, at_once=True)
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    with Processes() as processes:
        command = [sys.executable, "-c", script]
        address = bare.address("bare")
        asked = processes.start("it", command, log=tmp_path / "log", environment=dict(os.environ), fork=address)
        processes.stop(grace_s=5, names=["it"])
        assert asked.code == -signal.SIGTERM
        os.kill(bare.processes["bare"].pid, signal.SIGCONT)
        assert is_forked(forked(bare, PARENT))  # by then it has looked at what was asked for before
    assert not file.exists()


OWNER = """
import sys, time
from pathlib import Path
from primerl.forking.popen import ForkedPopen
from primerl.forking.servers import Servers
servers = Servers(Path(sys.argv[1]), own=True)
servers.start("bare")
address = str(servers.address("bare"))
fork = ForkedPopen([sys.executable, "-c", "import time; time.sleep(600)"], address=address)
print(servers.processes["bare"].pid, fork.pid, flush=True)
time.sleep(600)
"""


def test_an_owner_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="primerl-test-"))
    owner = plain(OWNER, str(folder))
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    owner.kill()
    owner.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30, "the end of all")
    until(lambda: not folder.exists(), 30, "its folder gone")


def test_the_command_line_alone_switches_them_off() -> None:
    assert are_wanted(["@", "rl.toml"], {})
    assert not are_wanted(["@", "rl.toml", "--no-fork-server"], {})
    assert not are_wanted(["@", "rl.toml"], {"PRIMERL_FORK_SERVER": "off"})


def test_where_no_server_can_be_had_all_start_the_plain_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("a long name" * 12)  # longer than an address of a socket may be
    deep.mkdir()
    for folder in (deep, tmp_path / "absent"):
        with forks.own_servers(), monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder))
            with servers.launched(ENVIRONMENTS):
                assert servers.address(ENVIRONMENTS) is None


def test_fifty_forks_in_a_row_leave_nothing_open(bare: Servers) -> None:
    pid = bare.processes["bare"].pid
    is_forked(forked(bare, PARENT))
    before = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        process = forked(bare, PARENT)
        assert int(process.communicate(timeout=30)[0]) == pid
    until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before[0], 10, "descriptors of the server")
    assert len(os.listdir("/proc/self/fd")) == before[1]
