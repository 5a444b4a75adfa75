"""The base of every section: unknown keys refused. The sentence under each field is its help (`field_docs`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import pydantic_config
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from primerl.process.log_levels import LogLevel
from primerl.process.problems import ProblemError
from primerl.process.setting_checks import LONGEST_S, MOST_COUNT, MOST_LARGE_COUNT, MOST_PORTS, MOST_THREADS

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class Bound:
    """What help and the reference say of a bound that a validator of ours checks. Among an annotation's metadata."""

    text: str


class BadKeysError(ProblemError, ValueError):
    """A section's own check failed. Its keys are those below the section."""


# The orchestrator's integers, and bounds of all others: an absurd number is reported with its place in the user's file,
# instead of by the process that would fail on it.
Count = Annotated[int, Field(gt=0, le=MOST_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST_COUNT)]
LargeCount = Annotated[int, Field(gt=0, le=MOST_LARGE_COUNT)]
LargeCountOrZero = Annotated[int, Field(ge=0, le=MOST_LARGE_COUNT)]
# A file is written for each.
Processes = Annotated[int, Field(gt=0, le=10_000)]
ProcessesOrZero = Annotated[int, Field(ge=0, le=10_000)]
# `seq_len` defaults to a power of two that holds at least four answers.
AnswerTokens = Annotated[int, Field(gt=0, le=2**29)]
# Rollouts of a batch. Those in flight are a multiple of it, and have to fit into 32 bits.
MOST_ROLLOUTS = 1_000_000
BatchSize = Annotated[int, Field(gt=0, le=MOST_ROLLOUTS)]
Oversampling = Annotated[float, Field(ge=1, le=1000)]
Port = Annotated[int, Field(ge=0, le=MOST_PORTS)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
# How long something is waited for: a clock of microseconds has to see it pass.
Wait = Annotated[float, Field(ge=0.001, le=LONGEST_S)]
SecondsOrZero = Annotated[float, Field(ge=0, le=LONGEST_S)]
# Room above for what is derived from it by counting up, within what TOML can hold.
Seed = Annotated[int, Field(ge=0, le=2**62)]
Threads = Annotated[int, Field(ge=0, le=MOST_THREADS)]
# Also a folder name and a metric name.
NAME_PATTERN, NAME_LENGTH = r"^[A-Za-z0-9][A-Za-z0-9._-]*$", 100
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=NAME_LENGTH)]


def _as_toml(value: Any, place: str = "") -> Any:
    """The values of keys that are not ours, without None, as TOML files can hold them. Raises ValueError that names the
    key."""
    if isinstance(value, dict):
        given = {str(key): inner for key, inner in value.items() if inner is not None}
        return {key: _as_toml(inner, f"{place}.{key}" if place else key) for key, inner in given.items()}
    if isinstance(value, list):
        return [_as_toml(inner, f"{place}[{index}]") for index, inner in enumerate(value)]
    if value is None:
        raise BadKeysError(f"{place} is null, which lists of TOML do not hold; remove it", place)
    if isinstance(value, int) and not -MOST_LARGE_COUNT <= value <= MOST_LARGE_COUNT:
        raise BadKeysError(f"{place} is more than the 64 bits of an integer hold; write it as a string", place)
    return value


# A table whose keys are an environment's, a template's or another program's.
Settings = Annotated[dict[str, Any], AfterValidator(_as_toml)]


ControlTokens = Literal["keep", "neutralize"]
"""What becomes of control tokens of the model in the text of messages."""


class Section(pydantic_config.BaseConfig):
    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        # Most sections of a command are a part of a larger one, which is built once, when a config is checked.
        defer_build=True,
    )

    def implied(self, **values: Any) -> Self:
        """A copy with these values, of which none counts as given that was not given before: they follow from the
        machine, and another one, on which a run resumes, decides again."""
        copy: Self = self.model_copy(update=values)
        copy.model_fields_set.intersection_update(self.model_fields_set)
        return copy

    @classmethod
    def listed_last(cls) -> frozenset[str]:
        """Fields that help and the reference list after all others."""
        return frozenset()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        from primerl.config.describe.field_docs import field_doc

        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name in cls.model_fields.keys() & properties.keys():
            text = field_doc(cls, name)
            if text is not None:
                properties[name].setdefault("description", text)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """`max_steps = true` is a slip, not one step. (Pydantic's strict mode would refuse the command line's "6", and
        a validator of every field does not work with discriminated unions.)"""
        for name, value in given.items() if isinstance(given, dict) else ():
            values = value if isinstance(value, list | tuple) else [value]
            if name in cls.model_fields and any(isinstance(one, bool) for one in values):
                found = kinds(cls.model_fields[name].annotation)
                if found & {int, float} and not found & {bool, Any}:
                    raise BadKeysError(f"{name} is true or false, where a number is expected; write the number", name)
        return given


def check_whole_groups(batch: str, batch_size: int, group: str, group_size: int) -> None:
    """`batch` and `group`: what the two keys are called. Raises ValueError."""
    rest = batch_size % group_size
    if rest:
        lower = batch_size - rest
        nearest = " or ".join(str(size) for size in (lower, lower + group_size) if size)
        raise BadKeysError(
            f"{batch} ({batch_size}) must be a multiple of {group} ({group_size}); set {batch} to {nearest}",
            batch,
            group,
        )


def check_dry_run(*, dry_run: bool, clean_output_dir: bool) -> None:
    """Raises ValueError: who asks what would happen must not lose a run over it."""
    if dry_run and clean_output_dir:
        raise BadKeysError(
            "dry_run and clean_output_dir are both set, but a dry run deletes nothing; omit clean_output_dir "
            "(--no-clean-output-dir where the file sets it), or dry_run to delete and start",
            "dry_run",
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
