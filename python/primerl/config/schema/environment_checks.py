"""Environments that do not go together with each other, or with the run. All raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from primerl.config.schema import learning
from primerl.config.schema.base import NAME_LENGTH, BadKeysError
from primerl.config.schema.environment import (
    Environment,
    EvaluationEnvironment,
    EvaluationSource,
    TrainEnvironment,
    TrainSource,
    Workers,
    evaluation_label,
)
from primerl.envs.overrides import RESERVED

if TYPE_CHECKING:
    from primerl.config.schema.orchestrator import Orchestration

Numbered = TypeVar("Numbered", bound=Environment)


def check_held_out(trained: Sequence[TrainEnvironment], evaluated: Sequence[EvaluationEnvironment]) -> None:
    """Expects names that were checked. Raises ValueError that names both environments and what to do.

    One with other settings (`taskset`, `args`) is taken to measure a split of its own: which examples a setting chooses
    only the environment knows.
    """
    by_name = {environment.label: environment for environment in trained}
    for environment in evaluated:
        own = by_name.get(environment.validates) if environment.validates is not None else None
        if own is None:
            continue
        who = f"eval.env {environment.label!r}: validates ({own.label})"
        if environment.id != own.id:
            raise BadKeysError(
                f"{who} is environment {own.id!r}, and this one is {environment.id!r}, whose examples are others; give "
                "both the same id, or omit validates: its results are then reported as eval",
                "eval.env",
            )
        if _chooses(environment) == _chooses(own):
            _check_number(who, environment, own)


def _check_number(who: str, environment: EvaluationEnvironment, own: TrainEnvironment) -> None:
    wanted, held_out = environment.num_examples, own.held_out
    if wanted is not None and wanted <= held_out:
        return
    measured = "all examples" if wanted is None else f"the first {wanted} examples"
    kept = f"only {held_out} of them are" if held_out else "none of them is"
    number = wanted or held_out or "N"
    raise BadKeysError(
        f"{who} measures {measured}, and {kept} held out of training; set num_examples = {number} here and held_out = "
        f"{number} in train.env {own.label!r}, or name the validation split in taskset or args here, such as "
        '{ split = "eval" }',
        "eval.env",
    )


def _chooses(environment: Workers) -> dict[str, Any]:
    """The settings on which the list of examples may depend: all but the harness's."""
    return {name: value for name, value in environment.arguments.items() if name not in ("harness", RESERVED)}


class _Timed(Protocol):
    """An environment whose rollouts may have a time limit of their own."""

    @property
    def label(self) -> str: ...

    @property
    def rollout_s(self) -> float | None: ...


def check_environments(
    orchestration: Orchestration,
    trained: Sequence[TrainSource],
    evaluated: Sequence[EvaluationSource],
    made: int = 0,
) -> None:
    """`made`: so many of the evaluated ones, the first, come from `val`."""
    validating = [("val", one) for one in evaluated[:made]]
    measured = [*validating, *numbered("eval.env", evaluated[made:])]
    check_distinct([*numbered("train.env", trained), *measured])
    learning.check(orchestration, trained)
    check_limits(orchestration, [*numbered("train.env", trained), *measured])
    check_validated(trained, measured)
    client = next((one for one in evaluated if one.client is not None), None)
    if client is not None and orchestration.control_tokens != "keep":
        raise BadKeysError(
            f"control_tokens ({orchestration.control_tokens}) is for messages that are rendered here, and the client "
            f"of eval.env {client.label!r} is a server that renders them itself; omit one of the two",
            "control_tokens",
        )


def numbered(name: str, environments: Sequence[Numbered]) -> list[tuple[str, Numbered]]:
    """Each with its place: `train.env[0]`."""
    return [(f"{name}[{index}]", environment) for index, environment in enumerate(environments)]


def evaluation_labels(trained: Sequence[str], evaluated: Sequence[str]) -> list[str]:
    """The evaluations' names: one that a training environment has becomes `<name>-eval`, since metrics, logs and
    secrets go by names. It is kept, and refused later, where the new name is taken or too long."""
    taken = {*trained, *evaluated}
    found = []
    for label in evaluated:
        own = evaluation_label(label)
        if label in trained and own not in taken and len(own) <= NAME_LENGTH:
            taken.add(own)
            label = own
        found.append(label)
    return found


def check_distinct(environments: Sequence[tuple[str, Environment]]) -> None:
    """`environments`: each with its place, which a message begins with."""
    seen: set[str] = set()
    for place, environment in environments:
        if environment.label == "all" or environment.label.startswith("staleness_"):
            raise BadKeysError(
                f"{place}: an environment is called {environment.label!r}, which is a name of metrics; give it "
                "another `name`",
                place,
            )
        if environment.label in seen:
            raise BadKeysError(
                f"{place}: two environments are called {environment.label!r}; "
                "give one of them another `name` (it names metrics, logs and files)",
                place,
            )
        seen.add(environment.label)


def check_validated(trained: Sequence[TrainSource], evaluated: Sequence[tuple[str, EvaluationSource]]) -> None:
    names = [environment.label for environment in trained]
    for place, environment in evaluated:
        if environment.validates is not None and environment.validates not in names:
            raise BadKeysError(
                f"eval.env {environment.label!r}: validates ({environment.validates}) is no training environment; give "
                "the name of one in train.env, or omit it",
                f"{place}.validates",
            )


def check_ratios(ratios: list[float] | None, environments: Sequence[TrainSource]) -> None:
    if ratios is None:
        return
    if len(ratios) != len(environments):
        raise BadKeysError(
            f"buffer.env_ratios has {len(ratios)} numbers for the {len(environments)} environments of train.env; "
            "give one for each, in the order of train.env",
            "buffer.env_ratios",
        )
    for environment in environments:
        if environment.ratio is not None:
            raise BadKeysError(
                f"buffer.env_ratios is set, and so is the ratio of train.env {environment.label!r}; "
                "omit one of the two",
                "buffer.env_ratios",
            )


def check_limits(
    orchestration: Orchestration, environments: Sequence[tuple[str, TrainSource | EvaluationSource]]
) -> None:
    """A rollout at its limit has yet to be scored and reported."""
    check_rollout_times(orchestration.timeouts.rollout_s, environments)
    for place, environment in environments:
        time_s, own = environment.limits.time_s, environment.rollout_s
        longest, key = (own, "rollout_s") if own else (orchestration.timeouts.rollout_s, "timeouts.rollout_s")
        its = "its " if own else ""
        if time_s is not None and time_s >= longest:
            raise BadKeysError(
                f"limits.time_s ({time_s:g}) of environment {environment.label!r} is not below {its}{key} "
                f"({longest:g}), at which a rollout that was not reported has failed; lower it, or raise the other",
                f"{place}.limits.time_s",
                f"{place}.rollout_s" if own else key,
            )


def check_rollout_times(longest: float, environments: Sequence[tuple[str, _Timed]]) -> None:
    """`longest`: of all environments, `timeouts.rollout_s`."""
    for place, environment in environments:
        if environment.rollout_s is not None and environment.rollout_s > longest:
            raise BadKeysError(
                f"rollout_s ({environment.rollout_s:g}) of environment {environment.label!r} is above "
                f"timeouts.rollout_s ({longest:g}), the most that any rollout has; lower it, or raise the other",
                f"{place}.rollout_s",
                "timeouts.rollout_s",
            )
