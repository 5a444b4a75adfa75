"""Whether evaluations that validate training environments measure what is never trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primerl.config.environment import EvaluationEnvironment, TrainEnvironment, Workers


def check_held_out(trained: Sequence[TrainEnvironment], evaluated: Sequence[EvaluationEnvironment]) -> None:
    """Of names that were checked. Raises ValueError that names both environments and what to do.

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
            raise ValueError(
                f"{who} is environment {own.id!r}, and this one is {environment.id!r}, whose examples are others; give "
                "both the same id, or leave validates out: its results are then told as eval"
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
    raise ValueError(
        f"{who} measures {measured}, and {kept} held out of training; set num_examples = {number} here and held_out = "
        f"{number} in train.env {own.label!r}, or name the validation split in taskset or args here, such as "
        '{ split = "eval" }'
    )


def _chooses(environment: Workers) -> dict[str, Any]:
    """The settings on which the list of examples may depend: all but the harness's."""
    return {name: value for name, value in environment.arguments.items() if name != "harness"}
