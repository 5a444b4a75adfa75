"""Errors of the user's input, as a script that does not catch them shows them: its own line, and the sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from primerl.config.errors.fail import ConfigError
from primerl.launch.supervise.failures import RunFailedError

P = ParamSpec("P")
R = TypeVar("R")


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Without the frames of this package, in which nothing is wrong."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ConfigError, RunFailedError) as error:
            raise error.with_traceback(None) from None

    return call
