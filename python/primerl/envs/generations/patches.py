"""Everything that primerl changes in other libraries while an env worker runs, each change with its reason.

A patch names its target; where the target is gone or looks different, `install` raises
[`PatchError`][primerl.envs.generations.patches.PatchError] instead of running with half of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from primerl.envs.interface import module_name, numbers


class PatchError(Exception):
    """A library no longer has what a patch replaces."""


def _replace(module: str, name: str, parameters: list[str], make: Callable[[Any], Any]) -> None:
    """Puts `make(original)` in the place of `module.name` (or `module.Class.name`), which must take exactly
    `parameters`. Once."""
    owner: Any = import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, last, None)
    if original is None:
        raise PatchError(f"{module}.{name} is gone: this version of the library is not supported")
    if hasattr(original, "_primerl_original"):
        return
    found = list(inspect.signature(original).parameters)
    if found != parameters:
        raise PatchError(f"{module}.{name} takes {found} instead of {parameters}: this version is not supported")
    replacement = make(original)
    replacement._primerl_original = original
    setattr(owner, last, replacement)


def cache_default_factories() -> None:
    """pydantic asks for the signature of every default factory on every construction: a third of a rollout's CPU."""
    _replace(
        "pydantic._internal._fields",
        "takes_validated_data_argument",
        ["default_factory"],
        lambda original: functools.lru_cache(maxsize=4096)(original),
    )


def cache_plugin_classes() -> None:
    """verifiers looks a harness's module up on the disk for every rollout."""
    for name, parameter in (("harness_class", "harness_id"), ("harness_config_type", "harness_id")):
        _replace(
            "verifiers.v1.utils.loaders",
            name,
            [parameter],
            lambda original: functools.lru_cache(maxsize=256)(original),
        )


def find_plugins_by_file(ships: Callable[[str, str], bool]) -> None:
    """verifiers imports all tasksets that it has, MCP servers with them, to see whether an id is one of these: a sixth
    of what a start takes. `ships(package, module)` says it without."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def import_plugin(plugin_id: str, kind: str, group: str) -> Any:
            name = module_name(plugin_id)
            if name.isidentifier() and not ships(group, name):
                with contextlib.suppress(ModuleNotFoundError):
                    return import_module(name)
            # Also for its words, where there is none.
            return stock(plugin_id, kind, group)

        return import_plugin

    _replace("verifiers.v1.utils.loaders", "_import_plugin", ["plugin_id", "kind", "group"], make)


def cap_seat_time(cap: Callable[[Any], Any], cap_segment: Callable[[Any], Any]) -> None:
    """A rollout's own time limit ends its seats as verifiers' timeouts do: a stop, and what there is gets scored. Both
    as a seat begins, and whenever it has its turn."""
    _replace("verifiers.v1.agent", "resolve_rollout_timeouts", ["timeout", "task"], cap)

    def checked(step: Any) -> Any:
        if "_agent_time_remaining" not in step.__code__.co_names:
            raise PatchError("verifiers.v1.rollout.Rollout.step has no time left: this version is not supported")
        return cap_segment(step)

    _replace("verifiers.v1.rollout", "Rollout.step", ["self", "messages", "on_input"], checked)


def record_numbers() -> None:
    """verifiers fails a rollout whose metric is no number, such as one that does not apply to it (None), or a
    dictionary of several; and one whose reward of weight 0, which is a metric, is none."""

    def make(stock: Callable[[Any, str, float], None]) -> Callable[[Any, str, Any], None]:
        def record_metric(self: Any, name: str, value: Any) -> None:
            for key, number in numbers({name: value}).items():
                stock(self, key, number)

        return record_metric

    def make_reward(stock: Callable[[Any, str, float, float], None]) -> Callable[[Any, str, Any, float], None]:
        def record_reward(self: Any, name: str, value: Any, weight: float = 1.0) -> None:
            if not weight:
                self.rewards.pop(name, None)
            found = {name: value} if weight else numbers({name: value})
            for key, number in found.items():
                stock(self, key, number, weight)

        return record_reward

    _replace("verifiers.v1.trace", "Trace.record_metric", ["self", "name", "value"], make)
    _replace("verifiers.v1.trace", "Trace.record_reward", ["self", "name", "value", "weight"], make_reward)


def offer_harness(harness_id: str, module: ModuleType) -> None:
    """verifiers finds a harness by importing a top-level module named like its id."""
    sys.modules.setdefault(harness_id.replace("-", "_"), module)


def route_by_trace(root: str, address_of: Callable[[str], tuple[str, str] | None]) -> None:
    """Sends each trace's calls through verifiers' own server to its rollout, with its key, over one connection pool.

    A base URL in the client's config would build and keep one HTTP client for every rollout.
    Calls without a trace (`GET /v1/models`) and seats with an endpoint of their own are not changed.
    """
    from verifiers.v1.clients.eval import EvalClient

    class RolloutClient(EvalClient):  # type: ignore[misc]
        def _at(self, session_id: str | None) -> EvalClient:
            address = address_of(session_id) if session_id is not None and self.base_url == root else None
            if address is None:
                return self
            client = copy.copy(self)
            client.base_url, client.api_key = address
            return client

        async def get_response(
            self,
            dialect: Any,
            body: dict[str, Any],
            sampling: Any,
            session_id: str | None = None,
            turn: Any = None,
            headers: Mapping[str, str] | None = None,
        ) -> Any:
            return await EvalClient.get_response(
                self._at(session_id), dialect, body, sampling, session_id, turn, headers
            )

        async def relay(
            self,
            dialect: Any,
            body: dict[str, Any],
            session_id: str | None = None,
            headers: Mapping[str, str] | None = None,
        ) -> Any:
            return await EvalClient.relay(self._at(session_id), dialect, body, session_id, headers)

    def make(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def resolve_client(config: Any) -> Any:
            return RolloutClient(config) if config.type == "eval" else stock(config)

        return resolve_client

    _replace("verifiers.v1.interception.server", "resolve_client", ["config"], make)


def tear_down_once() -> None:
    """A classic environment also tears itself down at the exit of the process, where the worker has done so."""

    def make(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def tear_down(self: Any) -> None:
            if not self.__dict__.get("_primerl_torn_down"):
                self._primerl_torn_down = True
                await stock(self)

        return tear_down

    _replace("verifiers.envs.environment", "Environment._teardown", ["self"], make)


def watch_rewards(failed: Callable[[Any, str, Exception], None], measured: Callable[[Any, str, Any], None]) -> None:
    """A reward function that raises counts as 0 in classic environments, with a line in the log. `failed` is called for
    each rollout's state that it was called for, with the function's name and the error. One of weight 0 is a metric,
    and may return something else than a number, such as several: `measured` is called, and verifiers gets a 0."""

    def make_individual(stock: Callable[..., Any]) -> Callable[..., Any]:
        async def call(self: Any, func: Any, state: Any) -> Any:
            def read(result: Any) -> float:
                if _weight(self, func) == 0:
                    return _measured(func, result, lambda name, value: measured(state, name, value))
                return float(result)

            return await stock(self, _watched(func, read, lambda name, error: failed(state, name, error)), state)

        return call

    def make_group(stock: Callable[..., Any]) -> Callable[..., Any]:
        async def call(self: Any, func: Any, states: Any) -> Any:
            def of_all(name: str, error: Exception) -> None:
                for state in states:
                    failed(state, name, error)

            def one_each(scores: Any) -> list[float]:
                if len(scores) != len(states):
                    raise ValueError(f"{len(scores)} scores for {len(states)} rollouts")
                if _weight(self, func) == 0:
                    return [
                        _measured(func, score, functools.partial(measured, state))
                        for state, score in zip(states, scores, strict=True)
                    ]
                return [float(score) for score in scores]

            return await stock(self, _watched(func, one_each, of_all), states)

        return call

    rubric = "verifiers.rubrics.rubric"
    _replace(rubric, "Rubric._call_individual_reward_func", ["self", "func", "state"], make_individual)
    _replace(rubric, "Rubric._call_group_reward_func", ["self", "func", "states"], make_group)


def _weight(rubric: Any, func: Any) -> float:
    """1 of a function that is not the rubric's own."""
    weights = (weight for own, weight in zip(rubric.funcs, rubric.weights, strict=False) if own is func)
    return next(weights, 1.0)


def _measured(func: Any, value: Any, tell: Callable[[str, Any], None]) -> float:
    name = getattr(func, "__name__", repr(func))
    number = {} if isinstance(value, Mapping) else numbers({name: value})
    if name not in number:
        tell(name, value)
    return number.get(name, 0.0)


def _watched(func: Any, read: Callable[[Any], Any], failed: Callable[[str, Exception], None]) -> Any:
    """The reward function, with the same signature and errors."""

    @functools.wraps(func)
    async def call(*arguments: Any, **named: Any) -> Any:
        try:
            result = func(*arguments, **named)
            return read(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            failed(getattr(func, "__name__", repr(func)), error)
            raise

    return call
