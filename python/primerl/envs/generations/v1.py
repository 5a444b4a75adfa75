"""A verifiers (0.4, v1) environment as the worker sees it: a list of examples, and a function that runs one of them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.trace import Error

from primerl import run_key
from primerl.envs import exits, limits
from primerl.envs.generations import choice, documented, harness, patches
from primerl.envs.generations.harness import HARNESS_ID
from primerl.envs.generations.interception import GATEWAYS, SharedInterception, address_of
from primerl.envs.interface import (
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    Address,
    EnvironmentRefusedError,
    Outcome,
    Post,
    Role,
    check_held_out,
    numbers,
    shortened,
    with_demonstrations,
)
from primerl.envs.limits import NO_LIMITS, RolloutLimits
from primerl.envs.listing import comparable, without_addresses

log = logging.getLogger("primerl.envs")

FIRST_OF_ENDLESS = 10_000
"""Examples of a taskset that yields tasks for ever: every worker has to list the same ones."""


def prepare() -> None:
    """Changes other libraries as an env worker needs them; before an environment is loaded."""
    patches.cache_default_factories()
    patches.cache_plugin_classes()
    patches.find_plugins_by_file(choice.ships)
    patches.record_numbers()
    patches.cap_seat_time(limits.cap_seat, limits.cap_segment)
    patches.offer_harness(HARNESS_ID, harness)


AS_VERIFIERS = "default"
"""Id of a harness that stands for the one which verifiers takes where none is named: one that the taskset's package
brings, else its shell. Its runtime is verifiers' default, too. For one seat, or for all that name none."""


def load(environment_id: str, arguments: dict[str, Any], root: str) -> vf.Env[Any]:
    """The environment, with a harness and a runtime on every seat that has none of its own.

    Args:
        arguments: The environment's config without the taskset's id; the taskset's settings under `taskset`.
        root: Base URL of the gateway, for seats without an endpoint of their own.

    Raises:
        EnvironmentRefusedError: It is not installed, fails to import, or refuses its config.
    """
    try:
        config, toolsets = _config(environment_id, arguments, root)
        env = vf.load_environment(vf.resolve_env_config(config))
        documented.add_toolsets(env, toolsets)
        return env
    except EnvironmentRefusedError:
        raise
    except documented.UnusableError as error:
        raise EnvironmentRefusedError(f"environment {environment_id!r}: {error}", *error.keys) from error.__cause__
    except ValidationError as error:
        raise _refused(environment_id, error) from error
    except ModuleNotFoundError as error:
        # verifiers says of any module that is missing that what it looked for is.
        missing = exits.innermost(error)
        if isinstance(missing, ImportError) and missing is not error and repr(missing.name) not in str(error):
            raise exits.not_imported(environment_id, error) from error
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} cannot be imported: {str(error).rstrip('.')}; install its package "
            "(for the examples: `pip install ./examples/<name>`) into this virtual environment"
        ) from error
    except Exception as error:
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _config(environment_id: str, arguments: dict[str, Any], root: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config for verifiers, and the toolsets that are added to the taskset's."""
    taskset = arguments.get("taskset", {})
    if not isinstance(taskset, dict):
        raise EnvironmentRefusedError(
            f"environment {environment_id!r}: `taskset` must be a table of settings", "taskset"
        )
    config = {**arguments, "taskset": {**taskset, "id": environment_id}}
    fields = vf.env_config_type(environment_id, config.get("id", "")).model_fields
    seats = {seat: field.default for seat, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
    as_verifiers = config.get("harness") == {"id": AS_VERIFIERS}
    if as_verifiers:
        del config["harness"]
    config, toolsets = documented.translate(environment_id, config, list(seats))
    # A package that brings its own harness keeps it.
    verifiers_own = default_agent_harness(environment_id).id
    brings_harness = verifiers_own == environment_id
    for seat, declared in seats.items():
        given = config.get(seat, {})
        if not isinstance(given, dict):
            raise EnvironmentRefusedError(
                f"environment {environment_id!r}: seat `{seat}` must be a table of settings", seat
            )
        # verifiers' own defaults are a shell on this machine and a sandbox in a cloud.
        defaults: dict[str, Any] = {"runtime": {"type": "subprocess"}}
        if declared.harness is not None:
            own_id = declared.harness.id
        else:
            own_id = environment_id if brings_harness else HARNESS_ID
        if own_id == HARNESS_ID:
            defaults["harness"] = {"id": HARNESS_ID}
        seat_config = {**defaults, **given}
        own = given.get("harness", {})
        if not isinstance(own, dict):
            raise EnvironmentRefusedError(
                f"environment {environment_id!r}: `{seat}.harness` must be a table of settings", f"{seat}.harness"
            )
        if own.get("id", AS_VERIFIERS if as_verifiers else None) == AS_VERIFIERS:
            # Where and by what it is played is left to verifiers, but for what is given.
            seat_config = {name: value for name, value in given.items() if name != "harness"}
            if own.keys() - {"id"}:
                pinned = verifiers_own if declared.harness is None else declared.harness.id
                seat_config["harness"] = {**own, "id": pinned}
        elif "harness" in given:
            # Settings without an id are of the seat's own harness; verifiers would take its shell.
            seat_config["harness"] = {"id": own_id, **own}
        if seat_config.get("harness", {}).get("id") == HARNESS_ID:
            seat_config["harness"] = {**seat_config["harness"], "root": root}
        config[seat] = seat_config
    return config, toolsets


def _refused(environment_id: str, error: ValidationError) -> EnvironmentRefusedError:
    keys = [".".join(str(part) for part in problem["loc"]) for problem in error.errors()]
    problems = "; ".join(
        f"{key or 'config'}: "
        + ("there is no such setting" if problem["type"] == "extra_forbidden" else problem["msg"])
        for key, problem in zip(keys, error.errors(), strict=True)
    )
    return EnvironmentRefusedError(
        f"environment {environment_id!r} refuses its settings: {problems}", *filter(None, keys)
    )


def list_examples(
    env: vf.Env[Any], environment_id: str, seed: int, role: Role = "train", held_out: int = 0
) -> list[vf.Task[Any, Any, Any]]:
    """All examples but the first `held_out`, in an order that depends on nothing but the environment and the seed; of a
    taskset without end, those that it yields first.
    Which split they are of is a setting of the taskset, where it has one."""
    taskset = env.taskset if env.taskset.bounded else env.taskset.take(held_out + FIRST_OF_ENDLESS)
    try:
        examples = list(taskset.shuffle(seed))
    except Exception as error:
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} cannot list its examples: {type(error).__name__}: {error}"
        ) from error
    if not examples:
        raise EnvironmentRefusedError(f"environment {environment_id!r} has no examples with these settings")
    for number, example in enumerate(examples):
        try:
            limits.of_example(example.data)
        except ValueError as error:
            raise EnvironmentRefusedError(
                f"environment {environment_id!r}: `{limits.FIELD}` of example {number}: {error}"
            ) from error
    check_held_out(environment_id, len(examples), held_out)
    return examples[held_out:]


def with_system_prompt(example: vf.Task[Any, Any, Any], text: str) -> vf.Task[Any, Any, Any]:
    """The example with this system prompt in place of its own, and without a system message in its prompt."""
    prompt = getattr(example.data, "prompt", None)
    messages = prompt if isinstance(prompt, list | tuple) else []
    kept = [message for message in messages if _role(message) != "system"]
    if len(kept) < len(messages):
        example = example.with_data(prompt=kept)
    return example.with_system_prompt(text)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


def key(example: vf.Task[Any, Any, Any]) -> str:
    """The example's own key, if it has one; else verifiers' hash of its data, of what is the same in every process."""
    own = type(example)
    if own.key is not vf.Task.key or own.hash is not vf.Task.hash:
        return without_addresses(str(example.key))
    data = example.data.model_dump(exclude_none=True, warnings="none")
    return hashlib.sha256(json.dumps(comparable(data), sort_keys=True).encode()).hexdigest()


def scores_groups(env: vf.Env[Any]) -> bool:
    """v1 judges across rollouts within one episode."""
    return False


def remark(env: vf.Env[Any], environment_id: str, role: Role) -> str | None:
    if env.taskset.bounded:
        return None
    return (
        f"environment {environment_id!r} has examples without end; its first {FIRST_OF_ENDLESS:,} are used, again and "
        "again (a setting of its taskset that bounds them is kept)"
    )


@dataclass(frozen=True)
class Runner:
    """Runs examples of one environment; made by [`serving`][primerl.envs.generations.v1.serving]."""

    env: vf.Env[Any]
    root: str
    post: Post
    limits: RolloutLimits
    """The environment's own."""

    async def run(
        self,
        task: vf.Task[Any, Any, Any],
        rollout: Address,
        *,
        model: str,
        sampling: dict[str, Any],
        time_limit: float,
        demonstration: str | None = None,
    ) -> Outcome:
        """One rollout, to its end (see [`Runner`][primerl.envs.interface.Runner])."""
        deadline = time.monotonic() + time_limit
        gateway, own = await limits.gateway_of(rollout, self.post, deadline, task.data)
        context = vf.ModelContext(
            model=model,
            # For calls that belong to no rollout. Named, so that a user's key for another server is not sent there.
            client=vf.EvalClientConfig(base_url=self.root, api_key_var=run_key.VARIABLE),
            sampling=vf.SamplingConfig(**sampling),
        )
        seats_end = limits.begin(self.limits, own)
        traces: list[str] = []

        def on_trace(trace: vf.Trace) -> None:
            traces.append(trace.id)
            GATEWAYS[trace.id] = gateway

        try:
            episode = await self.env.run_episode(task, context, on_trace=on_trace)
        finally:
            for trace_id in traces:
                del GATEWAYS[trace_id]
        outcome = outcome_of(episode, rollout.label, was_cut=seats_end is not None and time.monotonic() >= seats_end)
        places = [(trace.info, trace.task.data, task.data) for trace in episode.traces]
        return with_demonstrations(outcome, demonstration, places)

    async def run_group(
        self, task: vf.Task[Any, Any, Any], rollouts: Sequence[Address], **settings: Any
    ) -> list[Outcome]:
        raise AssertionError("no environment of this generation is scored by group")


@asynccontextmanager
async def serving(
    env: vf.Env[Any],
    root: str,
    post: Post,
    limits: RolloutLimits = NO_LIMITS,
) -> AsyncIterator[Runner]:
    """The environment with its shared servers up."""
    patches.route_by_trace(root, address_of)
    try:
        async with env.serving():
            env._interception = SharedInterception(env._interception)
            yield Runner(env, root, post, limits)
    finally:
        await harness.close_http()


def outcome_of(episode: vf.Episode, label: str, *, was_cut: bool = False) -> Outcome:
    """What is reported to the orchestrator. Tracebacks stay here, in the log. `was_cut`: the rollout's time was up."""
    traces = [_trace(trace) for trace in episode.traces]
    for trace in traces:
        if was_cut and trace["stop_condition"] == limits.SEAT_TIMED_OUT:
            trace.update(stop_condition=limits.STOP, truncated=True)
    # A retried seat keeps the errors of its earlier attempts although it succeeded.
    errors = [error for trace in episode.traces if not trace.ok for error in trace.errors[-1:]]
    errors = errors or ([] if episode.ok else episode.errors[-1:])
    error = None
    if errors:
        message = shortened(f"{errors[0].type}: {errors[0].message}", LONGEST_MESSAGE)
        error = {
            "kind": _kind(errors[0], episode),
            "message": message,
            "exception": errors[0].type,
            "status": errors[0].status_code,
        }
    unusable = [trace["session"] for trace in traces if not math.isfinite(trace["reward"])]
    if unusable and error is None:
        error = {"kind": "environment", "message": f"reward of trace {unusable[0]} is not a finite number"}
    if error is not None:
        tracebacks = "".join(
            f"\n{shortened(error.traceback, LONGEST_TRACEBACK)}" for error in errors if error.traceback
        )
        log.error("%s failed (%s): %s%s", label, error["kind"], error["message"], tracebacks)
    for trace in traces:
        if trace["session"] in unusable:
            trace.update(ok=False, reward=0.0)
    return {"ok": episode.ok and not unusable, "traces": traces, "error": error}


def _trace(trace: vf.Trace) -> dict[str, Any]:
    return {
        "session": trace.id,
        "seat": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "reward": float(trace.reward),
        "metrics": numbers(trace.metrics),
        "stop_condition": trace.stop_condition,
        "truncated": trace.is_truncated,
    }


def _kind(error: Error, episode: vf.Episode) -> str:
    if error.type == "ProviderError":
        return "engine"
    return "timeout" if episode.is_timeout else "environment"
