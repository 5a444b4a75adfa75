"""A rollout's own time limit: what ran is named before it is ended. Standard library only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from primerl.envs import stacks

log = logging.getLogger("primerl.envs")

Result = TypeVar("Result")


class TimeUpError(Exception):
    """The message says how long it had, and where it was."""


async def within(seconds: float, label: str, package: str, running: Coroutine[Any, Any, Result]) -> Result:
    """What it returns. Raises TimeUpError where it did not end in time, after its stack has gone to the log; a
    TimeoutError is its own.

    Args:
        label: Names it in the log.
        package: The environment's, whose lines are the ones to name.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(None) as scope:

            def expire() -> None:
                # Read before the task is cancelled, which unwinds the stack.
                at = stacks.place(stacks.of_task(task), package)
                said.append(f"the environment did not end within {seconds:.1f} s; it was at {at}")
                log.error("%s did not end within %.1f s; it is at\n%s", label, seconds, stacks.shown(task))
                scope.reschedule(loop.time())

            clock = loop.call_later(seconds, expire)
            try:
                return await running
            finally:
                clock.cancel()
    except TimeoutError as error:
        if said and scope.expired():
            raise TimeUpError(said[0]) from error
        raise
