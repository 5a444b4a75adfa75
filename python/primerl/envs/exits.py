"""What an environment does to end the process, taken for what it is: its failure. Standard library only.

`sys.exit` in a rollout, or in a library that it calls, would end the worker with all its other rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from primerl.envs.interface import EnvironmentRefusedError

log = logging.getLogger("primerl.envs")


def told(error: BaseException) -> str:
    """In words that name who did it."""
    if isinstance(error, SystemExit):
        return f"the environment called sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, KeyboardInterrupt):
        return "the environment raised KeyboardInterrupt"
    return f"{type(error).__name__}: {error}"


def run_to_end(main: Coroutine[Any, Any, int]) -> int:
    """As `asyncio.run`, but a task that ends the process ends by itself alone.

    asyncio hands SystemExit and KeyboardInterrupt on from any task to whoever runs the loop. Whoever awaits that task
    gets them as well, once the loop runs again.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if task.done():
                    raise
                log.warning("%s; the worker goes on", told(error))


@contextlib.contextmanager
def refused(environment_id: str) -> Iterator[None]:
    """Within the block, while an environment is loaded, it cannot end the process: it is refused."""
    try:
        yield
    except SystemExit as error:
        why = "" if error.code is None else f": {error.code}"
        raise EnvironmentRefusedError(f"environment {environment_id!r} ended the process{why}") from error
