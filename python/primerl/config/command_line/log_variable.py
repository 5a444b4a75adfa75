"""`PRIME_LOG_LEVEL`: the log level that the environment asks for, where neither file nor flag has one."""

from __future__ import annotations

import os
from typing import Any, get_args

from pydantic import BaseModel

from primerl.config.describe.fields import models
from primerl.config.errors.fail import ConfigError

VARIABLE = "PRIME_LOG_LEVEL"
SAME = {"warning": "warn", "critical": "error", "fatal": "error", "success": "info"}
"""Names that other tools have for levels."""


def with_level(cls: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with `log.level` of the variable, if `cls` has that key and the tree does not.

    Raises:
        ConfigError: The variable holds no level.
    """
    given = os.environ.get(VARIABLE, "").strip().lower()
    log = tree.get("log", {})
    if not given or "log" not in cls.model_fields or not isinstance(log, dict) or "level" in log:
        return tree
    section = next(iter(models(cls.model_fields["log"].annotation)), None)
    if section is None or "level" not in section.model_fields:
        return tree
    levels = get_args(section.model_fields["level"].annotation)
    meant = {level: level for level in levels} | {
        ours: level for level in levels for ours in SAME if SAME[ours] == level
    }
    # The trainer's list has `warning`, the others' `warn`.
    meant |= {"warn": "warning"} if "warning" in levels else {}
    if given not in meant and given != "trace":
        raise ConfigError(f"{VARIABLE} is {given!r}; set it to one of {', '.join(levels)}, or unset it")
    return {**tree, "log": {**log, "level": meant.get(given, "debug")}}
