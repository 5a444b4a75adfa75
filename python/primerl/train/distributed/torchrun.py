"""A process that starts the ranks of a training on this machine and watches them: torch's elastic launcher, `torchrun`.

    run(4, ["trainer", "@", file])    -> the exit code of the first rank that failed, 0 where all ended well

What kills a rank kills this process too, with the same signal, after it has ended the other ranks and named the one: so
whoever watches it sees a process that was killed, and starts it again, or one that gave up, and does not.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import uuid
from typing import Any

import primerl.forking
from primerl.forking import servers
from primerl.forking.exit_status import NOT_KNOWN, described
from primerl.forking.preload import TORCH
from primerl.process.imports import importing
from primerl.process.rank_variables import is_rank

log = logging.getLogger(__name__)

STOP_S = 8
"""Time that ranks have to end when they are asked to. One that hangs does not hear it, and is killed then."""
PR_SET_PDEATHSIG = 1


def are_wanted(ranks: int) -> bool:
    """Whether this process is to start ranks, and is not one that `torchrun` or this module has started."""
    return ranks != 1 and not is_rank(os.environ)


def run(ranks: int, arguments: list[str]) -> int:
    """`primerl <arguments>` as so many ranks."""
    with importing():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from primerl.train.loop.metrics import log_to_stdout

    log_to_stdout("info")
    end_within(STOP_S)
    fork_ranks()
    # Its own tables of errors repeat what the ranks have said.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=STOP_S,
    )
    try:
        with servers.launched(TORCH):
            elastic_launch(config, sys.executable)("-m", "primerl", *arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        # The first, in whole seconds, and in the same second one that was killed: others fail when a rank is gone, or
        # are ended here.
        def order(item: tuple[int, Any]) -> tuple[int, bool]:
            code = item[1].exitcode
            return item[1].timestamp, code >= 0 or code == -signal.SIGTERM

        rank, failure = min(error.failures.items(), key=order)
        return ended(rank, failure.exitcode)
    return 0


def end_within(seconds: int) -> None:
    """torch has `shutdown_timeout` for its own end only: where a rank has failed, it gives the others 30 s."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = seconds) -> None:
        close(context, death_sig, min(timeout, seconds))

    PContext.close = close_soon  # type: ignore[assignment, method-assign]


def fork_ranks() -> None:
    """torch starts each rank as a program, anew; a fork of a server that has imported all is as good."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from primerl.forking.popen import ForkedPopen

    start = SubprocessHandler._popen

    hangs = False  # the server: one that did not answer is asked no more

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
    # Where it is not known, this process is killed as well, and started again: the rank has not given up by itself.
    number = signal.SIGKILL if code == NOT_KNOWN else signal.Signals(-code)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def die_with_parent() -> None:
    """A rank whose starter was killed would train on beside the ranks that are started next."""
    if primerl.forking.is_fork:
        return  # Its lifeline does.
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
