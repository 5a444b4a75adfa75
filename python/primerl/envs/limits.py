"""Limits of single rollouts, as far as the worker keeps them: those of an example, and the time of a seat.

The orchestrator keeps the environment's limits by itself. It cannot see an example, so the worker tells it the limits
that one brings (`POST /rollouts/{id}/limits`) before the environment is asked for anything. A harness that hangs asks
for nothing, so the worker ends its seat when the time is up, by verifiers' own deadline: a stop, not an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from primerl.envs.interface import Address, Gateway, Post
from primerl.process import setting_checks
from primerl.run_key import run_key

# The field of an example's data that holds its limits.
FIELD = "rollout_limits"
# verifiers' stop condition of a seat whose time was up, and ours where the limit was ours.
SEAT_TIMED_OUT, STOP = "agent_timeout", "limit_time"

# When the seats of the rollout that runs in this context have to end, on the clock of `time.monotonic`.
_deadline: ContextVar[float | None] = ContextVar("primerl_seat_deadline", default=None)


MOST = {"time_s": setting_checks.LONGEST_S, "turns": setting_checks.MOST_COUNT, "tokens": setting_checks.MOST_COUNT}


@dataclass(frozen=True)
class RolloutLimits:
    """None: no limit of this kind."""

    time_s: float | None = None
    turns: int | None = None
    tokens: int | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From the values of an example, which nothing has checked. Raises ValueError that names the key."""
        limits = setting_checks.from_mapping(cls, dict(values))
        for name, most in MOST.items():
            value = getattr(limits, name)
            if value is not None and not 0 < value <= most:
                raise ValueError(f"{name}: must be above 0 and at most {most}, not {value!r}")
        return limits

    def given(self) -> dict[str, float | int]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


NO_LIMITS = RolloutLimits()


def of_example(data: Any) -> RolloutLimits | None:
    """Those in the example's `rollout_limits`, a table; None where it has none. Raises ValueError."""
    found = data.get(FIELD) if isinstance(data, Mapping) else getattr(data, FIELD, None)
    if found is None:
        return None
    values = found.model_dump() if hasattr(found, "model_dump") else found
    if not isinstance(values, Mapping):
        raise ValueError(f"it must be a table of limits, not {type(found).__name__}")
    limits = RolloutLimits.from_mapping(values)
    return limits if limits.given() else None


async def gateway_of(
    rollout: Address, post: Post, deadline: float, example: Any
) -> tuple[Gateway, RolloutLimits | None]:
    """The rollout's gateway, once the orchestrator has the limits that the example brings, and these."""
    gateway = Gateway(rollout.base_url, rollout.api_key, post, deadline)
    own = of_example(example)
    if own is not None:
        await _report(gateway, own)
    return gateway, own


async def _report(gateway: Gateway, own: RolloutLimits) -> None:
    """Sends the orchestrator the limits that an example brings. Raises RuntimeError if it does not take them.

    With the run's key: a rollout's own, which its agent has, opens chat routes only.
    """
    url = f"{gateway.base_url.removesuffix('/v1')}/limits"
    timeout = max(0.0, gateway.deadline - time.monotonic())
    status, content = await gateway.post(url, run_key() or "", "", json.dumps(own.given()).encode(), timeout)
    if status >= 400:
        answer = content.decode(errors="replace")
        raise RuntimeError(f"the orchestrator does not take the limits of this example: {status}: {answer}")


def begin(*limits: RolloutLimits | None) -> float | None:
    """The time of a rollout that starts now in this context: the shortest counts. Returns when it is up."""
    spans = [one.time_s for one in limits if one is not None and one.time_s is not None]
    deadline = time.monotonic() + min(spans) if spans else None
    _deadline.set(deadline)
    return deadline


def cap_seat(resolve: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """verifiers' own rule for the stages' timeouts of a seat, and the rollout's time on top."""

    def resolve_rollout_timeouts(timeout: Any, task: Any) -> Any:
        found = resolve(timeout, task)
        deadline = _deadline.get()
        if deadline is None:
            return found
        left = max(0.0, deadline - time.monotonic())
        return found if found.agent is not None and found.agent <= left else replace(found, agent=left)

    return resolve_rollout_timeouts


def cap_segment(step: Callable[..., Any]) -> Callable[..., Any]:
    """verifiers' own stretch of a seat that takes turns with others, or with a user, and the rollout's time on top: by
    verifiers' rule the time of a seat stands still while it waits for them, and the rollout's continues."""

    async def step_in_time(self: Any, messages: Any = None, *, on_input: Callable[[], None] | None = None) -> Any:
        deadline = _deadline.get()
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            seat = self._agent_time_remaining
            self._agent_time_remaining = left if seat is None else min(seat, left)
        return await step(self, messages, on_input=on_input)

    return step_in_time
