"""Cores, memory, limits of the system, GPUs and their driver. Standard library only, and nvidia-ml-py where it is."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path

from primerl.doctor.finding import Finding, amount, note, ok, problem
from primerl.envs.machine import cores
from primerl.launch.placement import gpus
from primerl.runs.memory import main_memory

MEMORY = 4 * 2**30
"""Bytes below which even a small run is tight: the processes of one take about 3 GiB together."""
FILES = 4096
"""Open files of a process: a rollout in flight has two connections in the orchestrator, an idle one a second."""
SHARED = 64 * 2**20
"""Bytes of /dev/shm that NCCL and vLLM's processes need on one machine; containers often have just these."""


def findings() -> Iterator[Finding]:
    yield _system()
    yield _cores()
    yield _memory()
    yield _open_files()
    yield from _shared_memory()
    yield _control_groups()
    yield from _gpus()


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    if not (3, 11) <= sys.version_info < (3, 15):
        return problem("system", found, "primerl needs Python 3.11 to 3.14")
    if sys.platform != "linux":
        return note("system", found, "processes start without fork servers, and vLLM is for Linux")
    return ok("system", found)


def _cores() -> Finding:
    usable, all_of_them = len(cores()), os.cpu_count() or 1
    found = f"{usable} of {all_of_them} cores" if usable < all_of_them else f"{usable} cores"
    if usable < 2:
        return note("cores", found, "trainer and engines take turns; two cores let them work side by side")
    return ok("cores", found)


def _memory() -> Finding:
    limit = main_memory()
    if limit < MEMORY:
        return note(
            "memory", amount(limit), "a run of a small model takes about 3 GiB; `primerl models check` estimates"
        )
    return ok("memory", amount(limit))


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} of a process, at most {hard}"
    if soft != resource.RLIM_INFINITY and soft < FILES:
        return note(
            "open files",
            found,
            f"each rollout in flight takes up to three; `ulimit -n {FILES}` before a run with more than {soft // 4}",
        )
    return ok("open files", found)


def _shared_memory() -> Iterator[Finding]:
    with contextlib.suppress(OSError):
        there = os.statvfs("/dev/shm")
        size = there.f_frsize * there.f_blocks
        if size > SHARED:
            yield ok("/dev/shm", amount(size))
        else:
            yield note(
                "/dev/shm",
                amount(size),
                "too little for several GPUs: start the container with --shm-size=8g, or --ipc=host",
            )


def _control_groups() -> Finding:
    about, root = "control groups", Path("/sys/fs/cgroup")
    if not (root / "cgroup.controllers").exists():
        return ok(about, "no cgroup v2", "what a run starts is found by its marks at the end")
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").rpartition("::")[2].strip()
    if os.access(root / own.lstrip("/"), os.W_OK):
        return ok(about, "cgroup v2, can be written to", "whatever a run's processes start ends with it")
    return ok(about, "cgroup v2, cannot be written to", "what a run starts is found by its marks at the end")


def _gpus() -> Iterator[Finding]:
    there = gpus.visible()
    hidden = os.environ.get(gpus.VARIABLE)
    if not there:
        if hidden is not None:
            yield note(
                "GPUs", f"none: {gpus.VARIABLE} is {hidden!r}", f"unset {gpus.VARIABLE} to use those that there are"
            )
        else:
            yield ok("GPUs", "none", "everything computes on the CPU, in fp32: for small models and tests")
        return
    yield ok("GPUs", _described(there) + (f"; {gpus.VARIABLE} is {hidden!r}" if hidden is not None else ""))
    cuda = torch_cuda()
    if cuda is None and util.find_spec("torch") is not None:
        yield problem(
            "torch for GPUs",
            f"torch {metadata.version('torch')} was built without CUDA",
            "the trainer would compute on the CPU: install a build with CUDA (pip install torch)",
        )
    elif cuda is not None:
        yield ok("torch for GPUs", f"torch {metadata.version('torch')}, CUDA {cuda}")


def _described(there: Sequence[gpus.Gpu]) -> str:
    """Kinds and memory; numbers, where the driver tells no more."""
    if not all(one.model and one.memory for one in there):
        return f"{len(there)} ({', '.join(one.name for one in there)})"
    driver = gpus.driver_version()
    known = ", ".join(f"{one.model} with {amount(one.memory or 0)}" for one in there)
    return known if driver is None else f"{known}; driver {driver}"


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for, by its files: importing it takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with contextlib.suppress(OSError):
        for line in (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            if name.split(":")[0].strip() == "cuda":
                value = value.strip().strip("'\"")
                return None if value == "None" else value
    return None
