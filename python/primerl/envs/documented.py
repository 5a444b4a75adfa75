"""What Hosted Training documents for v1 environments, in the words of the installed verifiers.

    harness               of the environment -> of its only seat, whose limits (`max_turns` and the like) are the seat's
    taskset.rewards       a list of functions -> `taskset.task.rewards`, by name
    taskset.toolsets      functions           -> a tool server beside those of the taskset (`bound_tools`)

A taskset that has settings of these names itself gets them unchanged.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.utils.loaders import taskset_config_type

from primerl.envs.bound_tools import BoundTools, BoundToolsConfig, functions_of

Settings = dict[str, Any]


class UnusableError(Exception):
    """The message names the key and the mend."""


def translate(environment_id: str, config: Settings, seats: list[str]) -> tuple[Settings, Settings]:
    """The config as verifiers takes it, and the toolsets, which it does not take.

    Raises UnusableError.
    """
    config = dict(config)
    if "harness" in config and "harness" not in seats:
        _seat(config, seats, config.pop("harness"))
    own = taskset_config_type(environment_id).model_fields
    taskset = dict(config["taskset"])
    if "rewards" in taskset and "rewards" not in own:
        taskset["task"] = _with_rewards(taskset.get("task", {}), taskset.pop("rewards"))
    toolsets: Settings = taskset.pop("toolsets", {}) if "toolsets" not in own else {}
    return {**config, "taskset": taskset}, toolsets


def add_toolsets(env: vf.Env[Any], toolsets: Settings) -> None:
    """Serves them with the taskset's own, one process for all.

    Raises UnusableError where a function cannot be imported, or an argument is bound that is none.
    """
    if not toolsets:
        return
    try:
        functions_of(toolsets, objects=None)
    except Exception as error:
        raise UnusableError(f"taskset.toolsets: {error}") from error
    own = env.taskset.toolsets
    server = BoundTools(BoundToolsConfig(toolsets=toolsets))
    env.taskset.toolsets = lambda config: [*own(config), server]


def _seat(config: Settings, seats: list[str], harness: Any) -> None:
    if not isinstance(harness, dict):
        raise UnusableError("`harness` must be a table of settings")
    if len(seats) != 1:
        raise UnusableError(
            f"`harness` is for environments with one seat, and this one has {', '.join(seats) or 'none'}; give each "
            "seat its own, as args.SEAT.harness"
        )
    seat = config.get(seats[0], {})
    if not isinstance(seat, dict):
        raise UnusableError(f"seat `{seats[0]}` must be a table of settings")
    own = dict(seat.get("harness", {}))
    of_seat = {name for name in vf.AgentConfig.model_fields if name not in HarnessConfig.model_fields}
    seat = dict(seat)
    for name, value in harness.items():
        target = seat if name in of_seat else own
        if name in target:
            raise UnusableError(f"harness.{name} and args.{seats[0]} both set {name}; leave one of them out")
        target[name] = value
    config[seats[0]] = {**seat, **({"harness": own} if own else {})}


def _with_rewards(task: Any, rewards: Any) -> Settings:
    if not isinstance(rewards, list) or not all(isinstance(reward, dict) and "fn" in reward for reward in rewards):
        raise UnusableError("taskset.rewards must be a list of tables, each with the function `fn`")
    named = dict(task.get("rewards", {}))
    for reward in rewards:
        name = str(reward["fn"]).replace(":", ".").rsplit(".", 1)[-1]
        if name in named:
            raise UnusableError(f"taskset.rewards: two functions are called {name!r}; rename one of them")
        named[name] = dict(reward)
    return {**task, "rewards": named}
