"""Whether an environment can be used as configured: `python -m primerl.envs.check ID [JSON] [--traceback]`.

Run in a process of its own by the launcher, before anything is started. Exit code 0, or 2 after one line on stderr
that says what is wrong and what to do.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from primerl.envs import exits, overrides, versions
from primerl.envs.generations import choice
from primerl.envs.interface import EnvironmentRefusedError, Role

USAGE = """usage: python -m primerl.envs.check ID [JSON] [--traceback]

Loads the environment with these settings, as a worker would. --traceback: also where what it raised comes from."""


@dataclass(frozen=True)
class Verdict:
    problem: str | None = None
    """What is wrong; None where the environment can be used."""
    remark: str | None = None
    """What its user should know."""
    keys: tuple[str, ...] = ()
    """Those of the environment's section that the problem is about."""
    cause: BaseException | None = None
    """What was raised, where its traceback tells more than the problem."""


def check_environment(
    environment_id: str,
    arguments: dict[str, Any],
    role: Role = "train",
    rollouts: int | None = None,
    max_concurrent: int | None = None,
    modules: Sequence[str] = (),
    held_out: int = 0,
) -> Verdict:
    """Loads the environment and lists its examples.

    Args:
        rollouts: Of an example, where it is known: an environment whose rewards compare them needs two.
        max_concurrent: Rollouts that a worker runs at the same time, where it is known.
        modules: What a worker with these settings needs in addition to verifiers.
        held_out: Examples that are kept for validation.
    """
    try:
        for name in modules:
            if importlib.util.find_spec(name) is None:
                raise EnvironmentRefusedError(
                    f"environment {environment_id!r}: {sys.executable} has no {name}, which metrics_port needs; "
                    "install it there, or omit metrics_port",
                    "metrics_port",
                )
        with exits.refused(environment_id):
            generation = choice.chosen(environment_id)
            own, asked = overrides.split(arguments)
            env = generation.load(environment_id, own, "http://127.0.0.1:1/v1")
            asked.applied(generation, environment_id, generation.list_examples(env, environment_id, 0, role, held_out))
        if rollouts is not None and generation.scores_groups(env):
            _check_group(environment_id, role, rollouts, max_concurrent)
        remarks = [generation.remark(env, environment_id, role), versions.remark(environment_id)]
        return Verdict(remark="; ".join(remark for remark in remarks if remark is not None) or None)
    except EnvironmentRefusedError as error:
        return Verdict(str(error), keys=error.keys, cause=error.__cause__)


def _check_group(environment_id: str, role: Role, rollouts: int, max_concurrent: int | None) -> None:
    name = "group_size" if role == "train" else "rollouts_per_example"
    compares = f"environment {environment_id!r} rewards the rollouts of a group by comparing them, and {name}"
    if rollouts == 1:
        raise EnvironmentRefusedError(f"{compares} is 1; raise it to 2 or more", name)
    if max_concurrent is not None and max_concurrent < rollouts:
        raise EnvironmentRefusedError(
            f"{compares} ({rollouts}) is above max_concurrent ({max_concurrent}), and one worker runs all of a group "
            "at a time; raise max_concurrent",
            name,
            "max_concurrent",
        )


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    shows_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        print(USAGE.splitlines()[0], file=sys.stderr)
        return 2
    try:
        settings = json.loads(arguments[1]) if len(arguments) == 2 else {}
    except ValueError as error:
        print(f"the settings are not JSON: {error}", file=sys.stderr)
        return 2
    verdict = check_environment(arguments[0], settings)
    if verdict.remark is not None:
        print(verdict.remark)
    if verdict.problem is None:
        return 0
    if shows_traceback and verdict.cause is not None:
        traceback.print_exception(verdict.cause)
    print(" ".join(verdict.problem.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
