"""Turns of the in-process chat harness: recorded in the trace as verifiers' own server does, without its HTTP hop.

verifiers puts a local HTTP server between a harness and the model. A harness in the same process needs none:
[`take_turn`][primerl.envs.generations.interception.take_turn] does what the server's handler does (limits and stops,
overrides, message graph, call record), and asks the gateway itself. Where a rollout needs more than that (hooks on
requests or responses, another harness, a seat with its own endpoint)
[`session_of`][primerl.envs.generations.interception.session_of] says None and the harness uses the server, which is
always there.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import ChatDialect, parse_message
from verifiers.v1.errors import ProviderError, RolloutError, TaskError
from verifiers.v1.interception.base import Interception, Slot
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import Error, ModelCall, TimeSpan
from verifiers.v1.types import AssistantMessage, Response, Usage

from primerl.envs.interface import Gateway, is_overflow

FINISH_REASONS = ("stop", "length", "tool_calls")

_DIALECT = ChatDialect()


class TurnRefusedError(Exception):
    """The turn did not take place: a limit, a stop, or the model's context is full. The rollout has ended in order."""


class ContextFullError(Exception):
    """Cause of the ProviderError of a turn that the model's context had no room for."""


# Rollouts of this process by trace id; a rollout has one entry for each of its seats. Event loop only.
GATEWAYS: dict[str, Gateway] = {}
_SESSIONS: dict[str, RolloutSession] = {}


def address_of(trace_id: str) -> tuple[str, str] | None:
    """Base URL and API key of the trace's rollout."""
    gateway = GATEWAYS.get(trace_id)
    return None if gateway is None else (gateway.base_url, gateway.api_key)


class SharedInterception(Interception):  # type: ignore[misc]
    """verifiers' own interception, with its sessions open to the in-process harness."""

    def __init__(self, stock: Interception) -> None:
        super().__init__()
        self._stock = stock

    async def start(self) -> None:
        """Nothing to do: its owner has started it."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        async with self._stock.acquire(session) as slot:
            _SESSIONS[session.trace.id] = session
            try:
                yield slot
            finally:
                del _SESSIONS[session.trace.id]


def session_of(trace_id: str, root: str) -> RolloutSession | None:
    """The session, where a turn of it may be taken here; None where verifiers' server has to."""
    session = _SESSIONS.get(trace_id)
    if session is None or trace_id not in GATEWAYS:
        return None
    hooks = (
        session.request_interceptors
        or session.response_interceptors
        or session.request_stops
        or session.response_stops
        or session.network_policy.network_restricted
    )
    own_endpoint = session.ctx.client.type != "eval" or session.ctx.client.base_url != root
    return None if hooks or own_endpoint else session


async def take_turn(session: RolloutSession, body: dict[str, Any]) -> dict[str, Any]:
    """One model call, committed to the trace.

    Args:
        body: Chat request (`messages`, `tools`); model and sampling are the rollout's.

    Returns:
        The assistant's message as the gateway gave it.

    Raises:
        TurnRefusedError: The conversation has ended in order.
        ProviderError, TaskError: Also left in `session.error`, where verifiers looks for the cause.
    """
    trace = session.trace
    session.error = None
    body = _DIALECT.apply_overrides(body, session.ctx.model, session.ctx.sampling)
    await _ask_permission(session)
    request = _DIALECT.parse_request(body)
    turn = graph.prepare_turn(trace, request.messages, request.tools)
    trace.preview(turn, turn.tail)
    if session.on_turn_input is not None:
        on_input, session.on_turn_input = session.on_turn_input, None
        on_input()
    started, node, response, error = time.time(), None, None, None
    try:
        message, response = await _ask(session, body)
        node = turn.commit(response)
        return message
    except RolloutError as failure:
        error = session.error = failure
        raise
    except BaseException as failure:
        error = failure
        raise
    finally:
        if node is None:
            turn.abandon()
        if not session.released:
            trace.calls.append(_record(body, started, node, response, error))
            trace.notify()


async def _ask_permission(session: RolloutSession) -> None:
    if session.released or session.stopped:
        raise TurnRefusedError(session.trace.stop_condition or "the rollout is over")
    try:
        stopped = await session.refused()
    except RolloutError as error:
        session.error = error
        raise
    except Exception as error:
        session.error = TaskError(f"model boundary hook failed: {type(error).__name__}: {error}")
        raise session.error from error
    if stopped is not None:
        raise TurnRefusedError(stopped)


async def _ask(session: RolloutSession, body: dict[str, Any]) -> tuple[dict[str, Any], Response]:
    trace_id = session.trace.id
    gateway = GATEWAYS[trace_id]
    timeout = max(0.0, gateway.deadline - time.monotonic())
    try:
        url = f"{gateway.base_url}/chat/completions"
        status, content = await gateway.post(url, gateway.api_key, trace_id, to_json(body), timeout)
    except TimeoutError as error:
        raise ProviderError(str(error), status_code=504) from error
    except ConnectionError as error:
        raise ProviderError(str(error), status_code=503) from error
    if status >= 400:
        text = content.decode(errors="replace")
        cause = ContextFullError() if is_overflow(status, text) else None
        raise ProviderError(f"upstream {status}: {text}", status_code=status) from cause
    try:
        return parse_completion(content)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ProviderError(f"malformed upstream response: {type(error).__name__}: {error}") from error


def parse_completion(content: bytes) -> tuple[dict[str, Any], Response]:
    """A chat completion, read once: its message, and what the trace keeps of it."""
    raw = from_json(content)
    choice = raw["choices"][0]
    message = parse_message(choice["message"])
    if not isinstance(message, AssistantMessage):
        raise ValueError(f"the reply's role is {choice['message'].get('role')!r} instead of 'assistant'")
    finish, usage = choice.get("finish_reason"), raw.get("usage")
    response = Response(
        id=raw["id"],
        created=raw["created"],
        model=raw["model"],
        message=message,
        finish_reason=finish if finish in FINISH_REASONS else None,
        usage=_usage(usage) if usage else None,
    )
    return choice["message"], response


def _usage(usage: dict[str, Any]) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Usage(
        prompt_tokens=usage["prompt_tokens"] - (cached or 0),
        completion_tokens=usage["completion_tokens"],
        cached_input_tokens=cached,
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
    )


def _record(
    body: dict[str, Any], started: float, node: int | None, response: Response | None, error: BaseException | None
) -> ModelCall:
    try:
        sampling = _DIALECT.parse_sampling(body)
    except ValidationError:
        sampling = None  # the gateway refuses such a request; the record of that must not fail too
    failure = None
    if error is not None:
        failure = Error(type=type(error).__name__, message=str(error), status_code=getattr(error, "status_code", None))
    return ModelCall(
        node=node,
        model=body.get("model"),
        sampling=sampling,
        endpoint=_DIALECT.upstream_path,
        finish_reason=response.finish_reason if response else None,
        usage=response.usage if response else None,
        time=TimeSpan(start=started, end=time.time()),
        error=failure,
    )
