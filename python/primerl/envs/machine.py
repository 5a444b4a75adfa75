"""What a worker, and each process that its environment starts from then on, may take of their machine."""

from __future__ import annotations

import os
from pathlib import Path


def limit_memory(memory_mb: int) -> None:
    """What they allocate themselves, not the files and libraries that they map (`RLIMIT_DATA`)."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory_mb * 2**20 + _reserved_memory()
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _reserved_memory() -> int:
    """Bytes that allocators have set aside, unused; the kernel counts them."""
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()]
    except OSError:  # not on Linux
        return 0
    kib = {words[0]: int(words[1]) for words in lines if words and words[0] in ("VmData:", "RssAnon:")}
    return max(0, kib.get("VmData:", 0) - kib.get("RssAnon:", 0)) * 1024


def limit_cores(cpus: int, first: int = 0) -> None:
    """To so many of those that this process may run on, beginning with the one of number `first`, around; to all of
    them where there are no more. On a system that cannot bind processes to cores, nothing changes."""
    usable = cores()
    if not usable:
        return
    os.sched_setaffinity(0, {usable[(first + number) % len(usable)] for number in range(min(cpus, len(usable)))})


def cores() -> list[int]:
    """Numbers of the cores that this thread may run on; empty if the system does not report them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
