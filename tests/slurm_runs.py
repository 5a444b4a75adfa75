"""What tests of runs on a real Slurm share: the folder they are in, and what is asked of Slurm and of processes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from end_to_end import primerl, until
from long_runs import LongRuns
from primerl.launch.slurm import jobs
from run_helpers import write_run
from slurm_helpers import Cluster

SLURM = """
[deployment]
num_infer_nodes = 1
[slurm]
exclusive = false
"""
MANY_STEPS = 80
WAIT_S, LIMIT_S = 300, 600
"""Until a part of a run has moved, and until all of it has ended, on a machine that is busy."""


RUNS = LongRuns(MANY_STEPS, WAIT_S, LIMIT_S)


@contextlib.contextmanager
def within(slurm: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with `rl.toml`, on this Slurm, without the tests' own fork servers. Nothing may be left behind."""
    file = write_run(folder)
    file.write_text(file.read_text() + SLURM)
    monkeypatch.chdir(folder)
    for name, value in slurm.variables.items():
        monkeypatch.setenv(name, value)
    with forks.own_servers():
        yield
        slurm.run("scancel", "--user=root")
        until(lambda: slurm.run("squeue", "-h") == "", WAIT_S, "the end of all jobs")
        assert left(folder) == []


def named(word: str) -> list[str]:
    """Command lines of processes that have the word."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace") if entry.isdigit() else ""
            if word in words:
                found.append(words.replace("\0", " "))
    return found


def left(folder: Path) -> list[str]:
    """What is left of a run: the daemons of this Slurm are no part of it."""
    return [words for words in named(str(folder)) if "slurm.conf" not in words]


def job_of(output: Path) -> int:
    return int(until(lambda: jobs.noted(output), WAIT_S, "the job").id)


def variable(pid: int, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{name}=".encode()):
                return entry.partition(b"=")[2].decode()
    return None


def back_from_the_queue(slurm: Cluster, job: int) -> None:
    """Slurm lets a job that it has put back wait for two minutes, and that is waited for. A job that was started at
    once (`scontrol update StartTime=now`) after a node was down got no step on that node any more, for as long as it
    asked: "Requested node configuration is not available"."""

    def is_back() -> bool:
        found = slurm.job(job)
        return found["Restarts"] == "1" and found["JobState"] == "RUNNING"

    until(is_back, WAIT_S, "the job's second start")


def left_of_job(output: Path) -> list[str]:
    return [line for line in left(output) if "primerl rl @ rl.toml" not in line]


def one_listed(job: int) -> dict[str, Any]:
    """The test's own: another test's Slurm has jobs with the same numbers."""
    here = Path.cwd()
    runs = json.loads(primerl("run", "list", "--json"))
    [listed] = [one for one in runs if one["job"] == str(job) and Path(one["output_dir"]).is_relative_to(here)]
    return dict(listed)
