"""The base of every section: unknown keys refused, the sentence under each field is its help."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import pydantic_config
from pydantic import ConfigDict, Field, model_validator

MOST_PORTS = 65535
Port = Annotated[int, Field(ge=0, le=MOST_PORTS)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
# Room above for what is derived from it by counting up, within what TOML can hold.
Seed = Annotated[int, Field(ge=0, le=2**62)]
# Beyond any machine's cores; torch crashes where it cannot start as many as it is told.
Threads = Annotated[int, Field(ge=0, le=1024)]
# Also a folder name and a metric name.
NAME_PATTERN, NAME_LENGTH = r"^[A-Za-z0-9][A-Za-z0-9._-]*$", 100
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=NAME_LENGTH)]
LogLevel = Literal["trace", "debug", "info", "warn", "error"]


class Section(pydantic_config.BaseConfig):
    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def listed_last(cls) -> frozenset[str]:
        """Fields that help and the reference list after all others."""
        return frozenset()

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """`max_steps = true` is a slip, not one step. (Pydantic's strict mode would refuse the command line's "6", and
        a validator of every field cannot be had beside discriminated unions.)"""
        for name, value in given.items() if isinstance(given, dict) else ():
            values = value if isinstance(value, list | tuple) else [value]
            if name in cls.model_fields and any(isinstance(one, bool) for one in values):
                found = kinds(cls.model_fields[name].annotation)
                if found & {int, float} and not found & {bool, Any}:
                    raise ValueError(f"{name} is true or false, where a number is expected; write the number")
        return given


def check_whole_groups(batch: str, batch_size: int, group: str, group_size: int) -> None:
    """`batch` and `group`: what the two keys are called. Raises ValueError."""
    rest = batch_size % group_size
    if rest:
        lower = batch_size - rest
        nearest = " or ".join(str(size) for size in (lower, lower + group_size) if size)
        raise ValueError(
            f"{batch} ({batch_size}) must be a multiple of {group} ({group_size}); set {batch} to {nearest}"
        )


def check_dry_run(*, dry_run: bool, clean_output_dir: bool) -> None:
    """Raises ValueError: who asks what would happen must not lose a run over it."""
    if dry_run and clean_output_dir:
        raise ValueError(
            "dry_run and clean_output_dir are both set, but a dry run deletes nothing; leave clean_output_dir out "
            "(--no-clean-output-dir where the file sets it), or dry_run to delete and start"
        )


class Log(Section):
    """What is written to the process's log."""

    level: LogLevel = "info"
    """Least severe level that is logged."""


class RolloutLog(Log):
    """What is written to the logs of the orchestrator and of env workers."""

    vf_level: LogLevel = "warn"
    """Least severe level of verifiers' own lines (its `verifiers` loggers) in the logs of env workers; `info` has two
    lines a rollout, `debug` each call of a program and a tool server."""


def kinds(annotation: Any) -> frozenset[Any]:
    """What an annotation is made of: `list[int] | None` -> list, int, None."""
    inner = [part for part in get_args(annotation) if isinstance(part, type) or get_args(part) or part is Any]
    return frozenset([annotation]).union(*map(kinds, inner))
