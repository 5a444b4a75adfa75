"""Variables by which torch's processes find each other, and who set them. Standard library only.

Schedulers of pods set RANK, WORLD_SIZE and MASTER_ADDR for whatever runs in a pod, also for one `primerl rl` that
starts its ranks by itself. Only torchrun and Slurm start one process a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)


class NotARankError(Exception):
    """The process is one of several that were not started as ranks. The message says what to do."""


COMMANDS = ("trainer", "sft")
"""What may be one of several ranks."""


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether torchrun (or primerl's own use of it) or `srun` started this process as a rank.

    Slurm has variables of its own. Where a script makes RANK and WORLD_SIZE of them, as torch wants, they agree. One
    task alone is no rank: container hooks set RANK for it too.
    """
    if "RANK" not in environ:
        return False
    if "TORCHELASTIC_RUN_ID" in environ:
        return True
    tasks = {environ.get(name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")}
    size = environ.get("WORLD_SIZE")
    return size != "1" and environ["RANK"] == environ.get("SLURM_PROCID") and size in tasks - {None}


def without(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in NAMES}


def forget_unless_rank(environ: MutableMapping[str, str], command: str) -> None:
    """Before anything reads them: this process starts its ranks itself, or has none.

    Raises NotARankError where another process has to do that, which would train the same a second time.
    """
    may_be = command in COMMANDS
    if may_be and is_rank(environ):
        return
    if may_be and environ.get("RANK", "0") not in ("", "0"):
        raise NotARankError(
            f"RANK is {environ['RANK']}, but neither torchrun nor Slurm has started this process; start the ranks with "
            f"`torchrun ... -m primerl {command} ...`, or start `primerl` once and let `ranks` say how many it starts"
        )
    if may_be and environ.get("WORLD_SIZE", "1") not in ("", "1"):
        print(
            f"WORLD_SIZE ({environ['WORLD_SIZE']}) and RANK are not used, since neither torchrun nor Slurm has started "
            "this process: `ranks` says how many it starts",
            file=sys.stderr,
        )
    for name in NAMES:
        environ.pop(name, None)
