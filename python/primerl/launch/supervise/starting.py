"""Starting one process of a run, and what it means when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from primerl.config.process_files import files
from primerl.config.process_files.files import ProcessConfig
from primerl.forking import servers
from primerl.forking.preload import ENVIRONMENTS, TORCH
from primerl.inference import backends
from primerl.launch.interpreters import lookup
from primerl.launch.supervise.processes import Process, Processes, describe_end, last_error, tail
from primerl.process import rank_variables, redaction
from primerl.run_key import VARIABLE, learn, run_key

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
ORCHESTRATOR_START_S = 30.0
POLL_S = 0.1
OMP_WAIT_POLICY = servers.OMP_WAIT_POLICY
TALKS_TO_ORCHESTRATOR = ("inference", "env-worker", "trainer")


class RunFailedError(Exception):
    """The run cannot go on: the message says which part failed and why, without the user's secrets."""

    def __init__(self, message: str) -> None:
        # The ends of logs, which it quotes, may hold them.
        super().__init__(redaction.redact(message))


class RefusedError(RunFailedError):
    """The orchestrator cannot use its input, such as a changed setting: the message is its own."""


def start(processes: Processes, process: ProcessConfig, *flags: str) -> Process:
    """`flags`: of this start alone."""
    command = [process.python or sys.executable, "-m", "primerl", process.kind, "@", os.fspath(process.file), *flags]
    environment = environment_of(process)
    if process.python is not None:
        folder = folder_of(process) / "run" / "package"
        environment = lookup.variables(process.python, folder, environment)
    hide = redaction.forms(process.variables.values())
    fork = servers.address(fork_kind(process))
    return processes.start(process.name, command, log=process.log, environment=environment, hide=hide, fork=fork)


def folder_of(process: ProcessConfig) -> Path:
    """The output folder: configs are in its `configs`."""
    return process.file.parent.parent


def fork_kind(process: ProcessConfig) -> str | None:
    """The kind of fork server that has imported what the process needs; None where it needs little, or has an
    interpreter of its own."""
    if process.python is not None:
        return None
    if process.kind == "inference":
        return TORCH if backends.named(getattr(process.config, "backend", backends.DEFAULT)).preload else None
    return {"env-worker": ENVIRONMENTS, "trainer": TORCH}.get(process.kind)


def environment_of(process: ProcessConfig) -> dict[str, str]:
    variables = {"OMP_WAIT_POLICY": OMP_WAIT_POLICY, **rank_variables.without(os.environ)}
    variables |= process.variables
    if process.variables:
        variables[redaction.VARIABLE] = ",".join(process.variables)
    variables |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if process.kind in TALKS_TO_ORCHESTRATOR:
        key = run_key(folder_of(process))
        if key is not None:
            variables[VARIABLE] = key
    if process.kind == "trainer":
        variables[servers.VARIABLE] = servers.setting()  # for its ranks
    if process.threads:
        # Each of the math libraries would otherwise start a thread a core, and the processes fight for them.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            variables[name] = str(process.threads)
    return {**variables, **process.variables}


def wait_for_orchestrator(
    processes: Processes,
    process: Process,
    folder: Path,
    check: Callable[[], None] = lambda: None,
    others: Callable[[Process], None] = lambda ended: None,
) -> str | None:
    """The URL, once it listens; None when it says that the run is over. `check` may raise to give up sooner; `others`
    is told of other processes that end."""
    file = folder / "run" / "orchestrator.json"
    deadline = time.monotonic() + ORCHESTRATOR_START_S
    while time.monotonic() < deadline:
        check()
        ended = processes.poll(POLL_S)
        check_guard(processes)
        for other in ended:
            if other is not process:
                others(other)
        if process in ended:
            if process.code == 0:
                return None
            raise failure_of(process)
        with contextlib.suppress(FileNotFoundError):
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["pid"] == process.pid:
                url = str(content["url"])
                learn(url, folder)
                return url
    raise RunFailedError(
        f"orchestrator did not write {file} within {ORCHESTRATOR_START_S:.0f} s\n{tail(process.log)}".rstrip()
    )


def failure_of(process: Process, remark: str = "") -> RunFailedError:
    """`remark`: what is to be said of it before the end of its log."""
    error = last_error(tail(process.log))
    if process.name == "orchestrator" and process.code == BAD_INPUT and error is not None:
        # A log's end would be the session before.
        return RefusedError(f"the orchestrator refuses the run: {error}")
    return RunFailedError(describe_end(process, remark))


@contextlib.contextmanager
def unchanged_if_refused(file: Path) -> Iterator[None]:
    """The config of a run stays what it was trained with."""
    before = file.read_text(encoding="utf-8") if file.is_file() else None
    try:
        yield
    except RefusedError:
        if before is not None:
            files.write_text(file, before)
        raise


def check_guard(processes: Processes) -> None:
    """Raises RunFailedError once the guard is gone."""
    if processes.guard_end is not None:
        raise RunFailedError(f"the guard of the processes {processes.guard_end}")
