"""Which trainer this is: what the orchestrator knows the one by that has the run. All of its ranks send the same."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primerl.train.client import OrchestratorClient
    from primerl.train.distributed import Ranks

LAUNCHER = "PRIMERL_RUN_MARK"
"""Set by the launcher, which ends its processes with itself."""
BEGAN_AT = 19
"""Of the fields of /proc/PID/stat behind the process's name."""

Identity = dict[str, object]


def own_identity() -> Identity:
    """Of this process: a new id, its number and machine; where the system has words for them, what its number is a
    number of and when it began, by which the orchestrator sees that it has ended."""
    identity: Identity = {"id": uuid.uuid4().hex, "pid": os.getpid(), "host": socket.gethostname()}
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        numbers = os.readlink("/proc/self/ns/pid")
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        identity |= {"place": f"{boot} {numbers}", "began": int(fields[BEGAN_AT])}
    except (OSError, ValueError, IndexError):
        pass  # Not Linux: it is known by its heartbeats alone.
    if LAUNCHER in os.environ:
        identity["launcher"] = os.environ[LAUNCHER]
    return identity


def begin(ranks: Ranks, client: OrchestratorClient) -> Identity:
    """Ask for the run, as the leading rank for all. Waits while it is not known whether another trainer, which has it,
    still lives.

    Raises OrchestratorError on all ranks: the run has a trainer, which is named.
    """
    from primerl.train.client import OrchestratorError

    identity, refusal = own_identity(), ""
    if ranks.leads:
        try:
            client.begin(identity)
        except OrchestratorError as error:
            refusal = str(error)
    agreed: tuple[Identity, str] = ranks.agree((identity, refusal))
    identity, refusal = agreed
    if refusal:
        raise OrchestratorError(refusal)
    client.identity = identity
    return identity
