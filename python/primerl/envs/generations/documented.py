"""What Hosted Training documents for v1 environments, in the words of the installed verifiers.

    harness               of the environment -> of its only seat, whose limits (`max_turns` and the like) are the seat's
    taskset.rewards       a list of functions -> `taskset.task.rewards`, by name
    taskset.toolsets      functions           -> a tool server in addition to the taskset's (`bound_tools`)

A taskset that has settings of these names itself gets them unchanged.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.utils.loaders import plugged_fn, taskset_config_type

from primerl.envs.generations.bound_tools import BoundTools, BoundToolsConfig, functions_of, imported
from primerl.process.problems import ProblemError

Settings = dict[str, Any]

# Settings of a task that are tables of functions by name, each with `fn`.
PLUGGED = ("rewards", "metrics", "stops")


class UnusableError(ProblemError):
    """The message names the key and how to fix it."""


def translate(environment_id: str, config: Settings, seats: list[str]) -> tuple[Settings, Settings]:
    """The config as verifiers takes it, and the toolsets, which it does not take.

    Raises UnusableError, also where a function cannot be imported: verifiers does so when it scores, in the run.
    """
    config = dict(config)
    if "harness" in config and "harness" not in seats:
        _seat(config, seats, config.pop("harness"))
    own = taskset_config_type(environment_id).model_fields
    taskset = dict(config["taskset"])
    _check_functions(taskset.get("task"))
    if "rewards" in taskset and "rewards" not in own:
        taskset["task"] = _with_rewards(taskset.get("task", {}), taskset.pop("rewards"))
    toolsets: Settings = taskset.pop("toolsets", {}) if "toolsets" not in own else {}
    return {**config, "taskset": taskset}, toolsets


def add_toolsets(env: vf.Env[Any], toolsets: Settings) -> None:
    """Serves them with the taskset's own, one process for all.

    Raises UnusableError where a function cannot be imported, or an unknown argument is bound.
    """
    if not toolsets:
        return
    try:
        functions_of(toolsets, objects=None)
        for settings in toolsets.values():
            for path in settings.get("objects", {}).values():
                imported(path)
    except Exception as error:
        raise UnusableError.at("taskset.toolsets", str(error)) from error
    own = env.taskset.toolsets
    server = BoundTools(BoundToolsConfig(toolsets=toolsets))
    env.taskset.toolsets = lambda config: [*own(config), server]


def _seat(config: Settings, seats: list[str], harness: Any) -> None:
    if not isinstance(harness, dict):
        raise UnusableError("`harness` must be a table of settings", "harness")
    if len(seats) != 1:
        raise UnusableError(
            f"`harness` is for environments with one seat, and this one has {', '.join(seats) or 'none'}; give each "
            "seat its own, as args.SEAT.harness",
            "harness",
        )
    seat = config.get(seats[0], {})
    if not isinstance(seat, dict):
        raise UnusableError(f"seat `{seats[0]}` must be a table of settings", seats[0])
    own = dict(seat.get("harness", {}))
    of_seat = {name for name in vf.AgentConfig.model_fields if name not in HarnessConfig.model_fields}
    seat = dict(seat)
    for name, value in harness.items():
        target = seat if name in of_seat else own
        if name in target:
            raise UnusableError(
                f"harness.{name} and args.{seats[0]} both set {name}; omit one of them", f"harness.{name}"
            )
        target[name] = value
    config[seats[0]] = {**seat, **({"harness": own} if own else {})}


def _with_rewards(task: Any, rewards: Any) -> Settings:
    if not isinstance(rewards, list) or not all(isinstance(reward, dict) and "fn" in reward for reward in rewards):
        raise UnusableError("taskset.rewards must be a list of tables, each with the function `fn`", "taskset.rewards")
    named = dict(task.get("rewards", {}))
    for reward in rewards:
        name = str(reward["fn"]).replace(":", ".").rsplit(".", 1)[-1]
        if name in named:
            raise UnusableError.at("taskset.rewards", f"two functions are called {name!r}; rename one of them")
        named[name] = dict(reward)
    for number, reward in enumerate(rewards):
        _check_function(f"taskset.rewards[{number}].fn", str(reward["fn"]))
    return {**task, "rewards": named}


def _check_functions(task: Any) -> None:
    """Those that are given in verifiers' own words; of settings of another shape it says itself what is wrong."""
    for kind in PLUGGED if isinstance(task, dict) else ():
        functions = task.get(kind)
        for name, settings in functions.items() if isinstance(functions, dict) else ():
            if isinstance(settings, dict) and isinstance(settings.get("fn"), str):
                _check_function(f"taskset.task.{kind}.{name}.fn", settings["fn"])


def _check_function(key: str, path: str) -> None:
    try:
        plugged_fn(path)
    except Exception as error:
        raise UnusableError.at(
            key,
            f"{path!r} cannot be imported: {type(error).__name__}: {error}; give `module:function` of what is "
            "installed, or `path/to/file.py:function`",
        ) from error
