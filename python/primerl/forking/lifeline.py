"""Death by a pipe: the kernel kills a process when the other end of its lifeline closes. For Linux."""

from __future__ import annotations

import fcntl
import os
import select
import signal

F_SETSIG = getattr(fcntl, "F_SETSIG", 10)


def die_with_lifeline(descriptor: int, number: signal.Signals = signal.SIGKILL) -> None:
    """The reading end of a pipe that is never written to: that its last writer has gone is all that can be read.

    Unlike PR_SET_PDEATHSIG, it does not ask who the parent is. Raises OSError where the kernel has no such signal.
    """
    fcntl.fcntl(descriptor, F_SETSIG, int(number))
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if not is_open(descriptor):
        os.kill(os.getpid(), number)


def is_open(descriptor: int) -> bool:
    """Whether the pipe still has a writer."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return not poller.poll(0)
