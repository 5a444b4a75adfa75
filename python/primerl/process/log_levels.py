"""Names of log levels, one list for all processes, as Python's logging has them. Standard library only."""

from __future__ import annotations

import logging
from typing import Literal

LogLevel = Literal["trace", "debug", "info", "warn", "error"]

LEVELS: dict[LogLevel, int] = {
    # Python has nothing below it.
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
