"""Starts the ranks of a training on this machine and watches them, by torch's elastic launcher, `torchrun`.

    run(4, ["trainer", "@", file])    -> the exit code of the first rank that failed, 0 if all succeeded

Where a placement puts the ranks on several machines, it starts the same command on each (`RENDEZVOUS`).

If a signal kills a rank, this process ends the other ranks, logs which one was killed, and dies of the same signal. So
its supervisor can tell a process that was killed, and restarts it, from one that gave up.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import primerl.forking
from primerl.forking import servers
from primerl.forking.exit_status import NOT_KNOWN, described
from primerl.forking.preload import TORCH
from primerl.process.imports import importing
from primerl.process.rank_variables import is_rank

log = logging.getLogger(__name__)

STOP_S = 8
"""Time that ranks have to end when asked to. One that hangs does not react, and is killed."""
PR_SET_PDEATHSIG = 1
RENDEZVOUS = "PRIMERL_RENDEZVOUS"
"""Set where the ranks are on several machines, by the placement that starts this process on each of them:
`machines;ranks of each;host;port;id;folder of logs`, where host and port are those of the first."""
NODE_RANK = "PRIMERL_NODE_RANK"
"""Which of the machines this is, from 0."""
JOIN_S = 300
"""How long the first machine waits for the others, in seconds."""


def rendezvous(machines: int, ranks: int, host: str, port: int, folder: Path) -> str:
    """The value of `RENDEZVOUS` for so many ranks in all; `folder`: of their logs."""
    return f"{machines};{ranks // machines};{host};{port};{uuid.uuid4().hex};{folder}"


def are_wanted(ranks: int) -> bool:
    """Whether this process should start ranks, and was not itself started as one."""
    return ranks != 1 and not is_rank(os.environ)


def run(ranks: int, arguments: list[str]) -> int:
    """Run `primerl <arguments>` as so many ranks."""
    with importing():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from primerl.train.loop.metrics import log_to_stdout

    log_to_stdout("info")
    end_within(STOP_S)
    fork_ranks()
    # Its own tables of errors repeat the ranks' logs.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    given = os.environ.pop(RENDEZVOUS, "")
    where = _on_this_machine(ranks) if not given else _on_several(given, int(os.environ[NODE_RANK]))
    config = LaunchConfig(**where, max_restarts=0, shutdown_timeout=STOP_S)
    try:
        with servers.launched(TORCH):
            elastic_launch(config, sys.executable)("-m", "primerl", *arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        # The first failure by whole seconds, and within a second one by a signal: the others fail because a rank is
        # gone, or are ended here.
        def order(item: tuple[int, Any]) -> tuple[int, bool]:
            code = item[1].exitcode
            return item[1].timestamp, code >= 0 or code == -signal.SIGTERM

        rank, failure = min(error.failures.items(), key=order)
        return ended(rank, failure.exitcode)
    return 0


def _on_this_machine(ranks: int) -> dict[str, Any]:
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
    }


def _on_several(given: str, node: int) -> dict[str, Any]:
    """This machine's part of the ranks. Those after its first write to files of their own, below the folder that
    `given` names."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

    nodes, ranks, host, port, run, folder = given.split(";", 5)
    os.makedirs(os.path.join(folder, f"node_{node}"), exist_ok=True)
    return {
        "min_nodes": int(nodes),
        "max_nodes": int(nodes),
        "nproc_per_node": int(ranks),
        "run_id": run,
        # The first machine is the one that the others connect to, and has rank 0.
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{host}:{port}",
        "rdzv_configs": {"rank": node, "timeout": JOIN_S},
        "logs_specs": DefaultLogsSpecs(
            log_dir=os.path.join(folder, f"node_{node}"), redirects=dict.fromkeys(range(1, int(ranks)), Std.ALL)
        ),
    }


def end_within(seconds: int) -> None:
    """torch uses `shutdown_timeout` only when it is stopped itself; after a failed rank it gives the others 30 s."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = seconds) -> None:
        close(context, death_sig, min(timeout, seconds))

    PContext.close = close_soon  # type: ignore[assignment, method-assign]


def fork_ranks() -> None:
    """Fork ranks from a server that has imported everything; torch would start each as a new program."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from primerl.forking.popen import ForkedPopen

    start = SubprocessHandler._popen

    hangs = False  # a server that did not answer is not asked again

    def start_fork(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        nonlocal hangs
        address = None if hangs else servers.address(TORCH)
        if address is None or args[0] != sys.executable or handler._stdout or handler._stderr:
            return start(handler, args, env)
        process = ForkedPopen(args, address=address, env=env, start_new_session=True)
        if process.timed_out:
            hangs = True
            log.warning("the fork server does not answer; ranks start without it")
        return process

    SubprocessHandler._popen = start_fork  # type: ignore[method-assign, assignment]


def ended(rank: int, code: int) -> int:
    if code >= 0:
        log.error("rank %d ended with exit code %d", rank, code)
        return code
    log.error("rank %d %s; the other ranks were ended", rank, described(code))
    # If the signal is unknown, this process is killed too, and restarted: the rank did not give up by itself.
    number = signal.SIGKILL if code == NOT_KNOWN else signal.Signals(-code)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def die_with_parent() -> None:
    """A rank whose starter was killed would keep training alongside the ranks that are started next."""
    if primerl.forking.is_fork:
        return  # its lifeline ends it
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
