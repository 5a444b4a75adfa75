"""What an environment does to end the process, taken for what it is: its failure. Standard library only.

`sys.exit` in a rollout, or in a library that it calls, would end the worker with all its other rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any

from primerl.envs.interface import EnvironmentRefusedError

log = logging.getLogger("primerl.envs")


def told(error: BaseException) -> str:
    """A description that names what ended the process."""
    if isinstance(error, SystemExit):
        return f"the environment called sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, KeyboardInterrupt):
        return "the environment raised KeyboardInterrupt"
    return f"{type(error).__name__}: {error}"


def innermost(error: BaseException) -> BaseException:
    """The exception at the start of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def place(error: BaseException) -> str:
    """` (file, line 3)`: where it was raised, without Python's own import system; empty where that is unknown."""
    own = os.path.dirname(importlib.__file__ or "")
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<")]
    files = [frame for frame in files if os.path.dirname(frame.filename) != own]
    return f" ({files[-1].filename}, line {files[-1].lineno})" if files else ""


def not_imported(environment_id: str, error: ImportError) -> EnvironmentRefusedError:
    """The refusal of an environment that is installed, and of which an import fails."""
    cause = innermost(error)
    fix = "install what it needs" if isinstance(cause, ModuleNotFoundError) else "install the version that it needs"
    return EnvironmentRefusedError(
        f"environment {environment_id!r} cannot be imported: {told(cause)}{place(cause)}; {fix} where its workers run"
    )


def run_to_end(main: Coroutine[Any, Any, int]) -> int:
    """As `asyncio.run`, but a task that ends the process ends by itself alone.

    asyncio hands SystemExit and KeyboardInterrupt on from any task to the caller of the loop. Code that awaits that
    task gets them as well, once the loop runs again.
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
                log.warning("%s; the worker continues", told(error))


@contextlib.contextmanager
def refused(environment_id: str) -> Iterator[None]:
    """Within the block, while an environment is loaded, it cannot end the process: it is refused."""
    try:
        yield
    except SystemExit as error:
        why = "" if error.code is None else f": {error.code}"
        raise EnvironmentRefusedError(f"environment {environment_id!r} ended the process{why}{place(error)}") from error
