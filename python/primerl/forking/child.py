"""Makes a fork of the server the process that was asked for, and ends it as one.

What Python or a library has done once for all processes is done again here: streams, search path, random numbers,
numbers of threads. Ends without taking apart what was imported, as Python's finalization does: that takes ten times as
long as the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from primerl import forking
from primerl.forking.lifeline import die_with_lifeline
from primerl.forking.request import GO, SIGNALS
from primerl.launch.supervise.trees import MARK, PART

# For the files that a process leaves open at its end.
FLUSH_S = 2.0
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Variables in /proc/PID/environ, which holds no secret: only what tells the processes apart.
SHOWN = (MARK, PART, "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


def can_set(name: str, value: str | None, before: str | None) -> bool:
    """Whether a variable that was read at the start is made good in a fork. `before`: its value then."""
    if name in THREADS:
        return value is not None and value.isascii() and value.isdigit() and int(value) > 0
    if name == "PYTHONPATH":
        return shadows_nothing(folders(value), folders(before))
    return name in ("PYTHONUNBUFFERED", "TMPDIR", "TEMP", "TMP", "TZ")


def folders(search_path: str | None) -> list[str]:
    return [os.path.abspath(folder) for folder in (search_path or "").split(os.pathsep) if folder]


def shadows_nothing(wanted: list[str], before: list[str]) -> bool:
    """Whether what the server has imported would be the same by this search path."""
    if not set(before) <= set(wanted):
        return False
    imported = {name.split(".")[0] for name in sys.modules}
    for folder in set(wanted) - {*before, *map(os.path.abspath, sys.path)}:
        with contextlib.suppress(OSError):
            if imported & {name.split(".")[0] for name in os.listdir(folder)}:
                return False
    return True


@dataclass(repr=False)
class Request:
    """What was asked for, in the fork that is to become it. It has no `repr`: a traceback would show all variables."""

    content: dict[str, Any]
    connection: socket.socket
    server_variables: dict[str, str]
    lifeline: int = -1

    @property
    def argv(self) -> list[str]:
        argv: list[str] = self.content["argv"]
        return argv

    def take(self, descriptors: list[int]) -> None:
        """Everything that can fail, until the requester knows that the process has begun."""
        try:
            # First, so that whatever hangs from here on ends with the requester.
            self.lifeline = os.dup(descriptors[3])
            die_with_lifeline(self.lifeline)
            for number in map(int, SIGNALS):
                own: Any = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in self.content["ignored"] else own)
            if self.content["session"]:
                os.setsid()
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
            os.environ.clear()
            os.environ.update(self.content["environment"])
            show(self.argv, os.environ)
            os.chdir(self.content["cwd"])
            os.umask(self.content["umask"])
            for name, (soft, hard) in self.content["limits"].items():
                resource.setrlimit(getattr(resource, name), (soft, hard))
            if set(self.content["cores"]) != os.sched_getaffinity(0):
                os.sched_setaffinity(0, self.content["cores"])
            if self.content["nice"] != os.getpriority(os.PRIO_PROCESS, 0):
                os.setpriority(os.PRIO_PROCESS, 0, self.content["nice"])
            check_cuda()
            self.connection.sendall(json.dumps({"pid": os.getpid()}).encode())
            if self.connection.recv(len(GO)) != GO:
                os._exit(127)
        except BaseException as error:  # noqa: BLE001 - it is reported to the requester, and this must not become a second server
            with contextlib.suppress(OSError):
                self.connection.sendall(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
            os._exit(127)
        # A process that this one forks, and that lives longer, is not it.
        os.register_at_fork(after_in_child=self.let_go)

    def let_go(self) -> None:
        """In each process that is forked from this one, and from those in turn: once."""
        self.connection.close()
        lifeline, self.lifeline = self.lifeline, -1
        if lifeline >= 0:
            with contextlib.suppress(OSError):
                os.close(lifeline)


def check_cuda() -> None:
    """Raises where something had asked for CUDA before the fork: a fork cannot use it any more."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA was asked for before the fork")


def show(argv: list[str], environment: os._Environ[str]) -> None:
    """Overwrites what `ps` and the guard read, the server's own command line and environment."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    arguments, variables = (int(fields[45]), int(fields[46])), (int(fields[47]), int(fields[48]))
    shown = [f"{name}={environment[name]}" for name in SHOWN if name in environment]
    for words, (start, end) in ((argv, arguments), (shown, variables)):
        size = end - start
        text = os.fsencode("\0".join(words))[: size - 1]
        ctypes.memmove(start, text.ljust(size, b"\0"), size)


def become(request: Request) -> NoReturn:
    """Runs the program. Does not return."""
    forking.is_fork = True
    variables = request.content["environment"]
    for stream in (sys.stdout, sys.stderr):  # the same objects, as handlers of logging hold them
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=stream.isatty(), write_through="PYTHONUNBUFFERED" in variables)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    set_search_path(request.content["cwd"], folders(variables.get("PYTHONPATH")))
    importlib.invalidate_caches()
    tempfile.tempdir = None
    time.tzset()
    set_threads(variables, request.server_variables)
    draw_anew()
    gc.enable()
    run(request)


def set_search_path(cwd: str, wanted: list[str]) -> None:
    # With PYTHONSAFEPATH, the working folder is not in it.
    own, rest = ([], sys.path) if sys.flags.safe_path else ([cwd], sys.path[1:])
    sys.path[:] = [*own, *wanted, *(path for path in rest if path not in wanted)]


def set_threads(variables: dict[str, str], before: dict[str, str]) -> None:
    """Their numbers were read when the libraries were loaded."""
    changed = {
        name: int(variables[name])
        for name in THREADS
        if variables.get(name) != before.get(name) and can_set(name, variables.get(name), None)
    }
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in changed:
        torch.set_num_threads(changed["OMP_NUM_THREADS"])
    if "OPENBLAS_NUM_THREADS" in changed:
        for library in openblas():
            with contextlib.suppress(AttributeError):  # another build of it, which names its functions otherwise
                ctypes.CDLL(library).scipy_openblas_set_num_threads64_(changed["OPENBLAS_NUM_THREADS"])


def openblas() -> set[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "openblas" in line}


def draw_anew() -> None:
    """All forks would else draw the same random numbers; Python's own generator sees to itself."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def run(request: Request) -> NoReturn:
    code, interrupted = 0, False
    try:
        execute(request.argv)
    except SystemExit as end:
        code = exit_code(end)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_within(FLUSH_S)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    used = resource.getrusage(resource.RUSAGE_SELF)
    last_word = {"exit": code & 0xFF, "cpu_s": used.ru_utime + used.ru_stime}
    with contextlib.suppress(OSError):
        request.connection.sendall(json.dumps(last_word).encode())
    os._exit(code & 0xFF)


def execute(argv: list[str]) -> None:
    sys.orig_argv[:] = argv
    if argv[1] == "-c":
        sys.argv[:] = ["-c", *argv[3:]]
        if not sys.flags.safe_path:
            sys.path[0] = ""
        module = types.ModuleType("__main__")
        module.__builtins__ = __builtins__  # type: ignore[attr-defined]
        sys.modules["__main__"] = module
        exec(compile(argv[2], "<string>", "exec"), module.__dict__)
    else:
        sys.argv[:] = argv[2:]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)


def exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def flush_within(seconds: float) -> None:
    """A thread that was left behind may hold the lock of a file for ever."""
    with contextlib.suppress(RuntimeError):  # newer Pythons may start no thread any more
        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        thread.join(seconds)
        return
    flush()


def flush() -> None:
    """Files that are still open, and temporary ones, which end with the process. `gc` knows those of after the fork,
    as all before are frozen. What may be stuck comes last."""
    left = gc.get_objects()
    for thing in left:
        if type(thing) is tempfile._TemporaryFileWrapper:
            with contextlib.suppress(OSError, ValueError):
                thing.close()
    for thing in [sys.stdout, sys.stderr, *left]:
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
