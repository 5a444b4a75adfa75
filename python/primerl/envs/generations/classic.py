"""A classic verifiers environment (0.1.14 to 0.3: a module with `load_environment`) as the worker sees it.

Model calls go through the worker's own client, each to its rollout's URL: the environment's row carries a number, by
which the client finds it. So cancelling a rollout hangs up, and an orchestrator that is started again is waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import random
import signal
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import datasets
import verifiers as vf
from openai.types.chat import ChatCompletion
from pydantic_core import to_json
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import ClientConfig

from primerl import run_key
from primerl.envs import limits
from primerl.envs.generations import patches
from primerl.envs.interface import (
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    Address,
    EnvironmentRefusedError,
    Gateway,
    Outcome,
    Post,
    Role,
    check_held_out,
    is_overflow,
    module_name,
    numbers,
    shortened,
    with_demonstrations,
)
from primerl.envs.limits import NO_LIMITS, RolloutLimits
from primerl.envs.listing import comparable

log = logging.getLogger("primerl.envs")

NUMBER = "primerl_rollout"
"""Column of a row: which rollout of this process it is run for."""
KINDS = {
    "ModelError": "engine",
    "InvalidModelResponseError": "engine",
    "EmptyModelResponseError": "model",
    "ToolError": "tool",
    "ToolParseError": "tool",
    "ToolCallError": "tool",
    "InfraError": "infrastructure",
    "TunnelError": "infrastructure",
    "SandboxError": "infrastructure",
    "BrowserSandboxError": "infrastructure",
}
"""Kinds of verifiers' errors; all others are the environment's."""


class RowRefusedError(ModelError):  # type: ignore[misc]
    """The environment asks the model for a row that it was not given, or after its rollout has ended."""


def prepare() -> None:
    """Changes verifiers as an env worker needs it; before an environment is loaded."""
    patches.tear_down_once()
    patches.watch_rewards(_reward_failed, _measured)
    # A log is no terminal.
    datasets.disable_progress_bars()


def load(environment_id: str, arguments: dict[str, Any], root: str) -> Any:
    """The environment, from the module's `load_environment(**arguments)`.

    Raises:
        EnvironmentRefusedError: It is not installed, fails to import, refuses its arguments, or misses a secret.
    """
    try:
        with _kept_signal_handlers():
            return vf.load_environment(module_name(environment_id), **arguments)
    except Exception as error:
        raise EnvironmentRefusedError(f"environment {environment_id!r} cannot be loaded: {_reason(error)}") from error


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """A classic environment takes SIGINT and SIGTERM for itself, and would exit with a code of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _reason(error: BaseException) -> str:
    """verifiers wraps what `load_environment` raises."""
    if type(error).__name__ == "MissingKeyError":
        return f"{str(error).splitlines()[0]}; set them by `primerl env secret set`, or in a file of env_files"
    inner = error.__cause__ or error
    if isinstance(inner, ImportError):
        return f"{str(inner).rstrip('.')}; install its package into the environment's virtual environment"
    return f"{type(inner).__name__}: {inner}"


class Rows(Sequence[dict[str, Any]]):
    """Rows of a dataset in an order; decoded when they are asked for."""

    def __init__(self, dataset: Any, order: list[int]) -> None:
        self._dataset = dataset
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return dict(self._dataset[self._order[index]])


def list_examples(env: Any, environment_id: str, seed: int, role: Role = "train", held_out: int = 0) -> Rows:
    """All but the first `held_out` rows of `get_dataset()`, for evaluations of `get_eval_dataset()`, in an order of our
    own: verifiers' shuffle would also change the order for everybody else."""
    try:
        if held_out:
            env.build_eval_dataset()
            # Validated on a split of its own: nothing has to be held out.
            held_out = 0 if env.eval_dataset is not None else held_out
        dataset = env.get_dataset() if role == "train" else env.get_eval_dataset()
        count = len(dataset)
    except Exception as error:
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} cannot list its examples ({_split(role)}): {type(error).__name__}: {error}"
        ) from error
    if count == 0:
        raise EnvironmentRefusedError(f"environment {environment_id!r} has no examples with these args", "args")
    check_held_out(environment_id, count, held_out)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return Rows(dataset, order[held_out:])


def _split(role: Role) -> str:
    return "`dataset`" if role == "train" else "`eval_dataset`"


def with_system_prompt(example: dict[str, Any], text: str) -> dict[str, Any]:
    """The row with this system message in place of its own; before a plain text, with a blank line between."""
    prompt = example.get("prompt")
    if isinstance(prompt, list):
        others = [message for message in prompt if message.get("role") != "system"]
        return {**example, "prompt": [{"role": "system", "content": text}, *others]}
    return {**example, "prompt": f"{text}\n\n{prompt or ''}"}


def key(example: dict[str, Any]) -> str:
    """A hash of the row as the dataset has it."""
    return hashlib.sha256(to_json(comparable(example))).hexdigest()


def scores_groups(env: Any) -> bool:
    """`run_rollout` refuses such environments."""
    return bool(env.requires_group_rollouts)


def remark(env: Any, environment_id: str, role: Role) -> str | None:
    """Where `get_eval_dataset` fell back to the training examples."""
    if role == "train" or env.eval_dataset is not None:
        return None
    return (
        f"environment {environment_id!r} has no evaluation split of its own (`eval_dataset`): it is measured on "
        "examples of its training split"
    )


@dataclass
class _Running:
    """A rollout of this process."""

    gateway: Gateway
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks that wait for the model."""
    reward_error: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    """What metrics returned that are no numbers."""


# By number. Event loop only.
_RUNNING: dict[int, _Running] = {}
_numbers = itertools.count(1)


def _reward_failed(state: Any, name: str, error: Exception) -> None:
    running = _RUNNING.get(state["input"].get(NUMBER, 0))
    if running is not None:
        text = "".join(traceback.format_exception(error))
        log.error("reward function %s failed:\n%s", name, shortened(text, LONGEST_TRACEBACK))
        running.reward_error = running.reward_error or f"{name}: {type(error).__name__}: {error}"


def _measured(state: Any, name: str, value: Any) -> None:
    running = _RUNNING.get(state["input"].get(NUMBER, 0))
    if running is not None:
        running.measured[name] = value


@contextmanager
def _running(gateways: list[Gateway]) -> Iterator[list[int]]:
    numbers = [next(_numbers) for _ in gateways]
    _RUNNING.update({number: _Running(gateway) for number, gateway in zip(numbers, gateways, strict=True)})
    try:
        yield numbers
    finally:
        ended = [_RUNNING.pop(number) for number in numbers]
        # verifiers leaves the others of a group running when one of them raises.
        for call in [call for running in ended for call in running.calls]:
            call.cancel()


class RolloutClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """One client for all rollouts: each call goes to the gateway of its row."""

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> ChatCompletion:
        state = kwargs["state"]
        running = _RUNNING.get(state["input"].get(NUMBER, 0))
        if running is None:
            raise RowRefusedError(
                "the environment called the model for a row that is not running, or no longer running"
            )
        body = _request(prompt, model, sampling_args, tools)
        task = asyncio.current_task()
        assert task is not None
        running.calls.add(task)
        try:
            return await _ask(running.gateway, str(state["trajectory_id"]), body)
        finally:
            running.calls.discard(task)


def _request(prompt: Any, model: str, sampling: dict[str, Any], tools: Any) -> bytes:
    extra = sampling.get("extra_body") or {}
    settings = {key: value for key, value in {**sampling, **extra}.items() if key != "extra_body" and value is not None}
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return to_json({"model": model, "messages": messages, **({"tools": tools} if tools else {}), **settings})


async def _ask(gateway: Gateway, session: str, body: bytes) -> ChatCompletion:
    timeout = max(0.0, gateway.deadline - time.monotonic())
    try:
        status, content = await gateway.post(
            f"{gateway.base_url}/chat/completions", gateway.api_key, session, body, timeout
        )
    except (ConnectionError, TimeoutError) as error:
        raise ModelError(str(error)) from error
    if status >= 400:
        text = content.decode(errors="replace")
        if is_overflow(status, text):
            raise OverlongPromptError(text)
        raise ModelError(f"upstream {status}: {text}")
    return ChatCompletion.model_validate_json(content)


@dataclass(frozen=True)
class Runner:
    """Runs examples of one environment; made by [`serving`][primerl.envs.generations.classic.serving]."""

    env: Any
    client: RolloutClient
    post: Post

    async def run(
        self,
        row: dict[str, Any],
        rollout: Address,
        *,
        model: str,
        sampling: dict[str, Any],
        time_limit: float,
        demonstration: str | None = None,
    ) -> Outcome:
        """One rollout, to its end (see [`Runner`][primerl.envs.interface.Runner])."""
        gateway, _ = await limits.gateway_of(rollout, self.post, time.monotonic() + time_limit, row)
        with _running([gateway]) as (number,):
            output = await self.env.run_rollout(
                {**row, NUMBER: number}, self.client, model, dict(sampling), state_columns=["trajectory_id"]
            )
            outcome = outcome_of(output, rollout.label, _RUNNING[number].reward_error, _RUNNING[number].measured)
            return with_demonstrations(outcome, demonstration, [(row.get("info"), row)])

    async def run_group(
        self,
        row: dict[str, Any],
        rollouts: Sequence[Address],
        *,
        model: str,
        sampling: dict[str, Any],
        time_limit: float,
        demonstration: str | None = None,
    ) -> list[Outcome]:
        """All rollouts of a group, scored together."""
        deadline = time.monotonic() + time_limit
        gateways = [(await limits.gateway_of(rollout, self.post, deadline, row))[0] for rollout in rollouts]
        with _running(gateways) as numbers:
            rows = [{**row, NUMBER: number} for number in numbers]
            outputs = await self.env.run_group(
                rows, self.client, model, dict(sampling), state_columns=["trajectory_id"]
            )
            ended = zip(outputs, rollouts, numbers, strict=True)
            outcomes = [
                outcome_of(output, rollout.label, _RUNNING[number].reward_error, _RUNNING[number].measured)
                for output, rollout, number in ended
            ]
            return [with_demonstrations(outcome, demonstration, [(row.get("info"), row)]) for outcome in outcomes]


@asynccontextmanager
async def serving(env: Any, root: str, post: Post, limits: RolloutLimits = NO_LIMITS) -> AsyncIterator[Runner]:
    """The environment, and what is torn down with it. Its limits are kept by the gateway alone."""
    # For calls that belong to no rollout. Named, so that a user's key for another server is not sent there.
    config = ClientConfig(
        client_type="openai_chat_completions", api_base_url=root, api_key_var=run_key.VARIABLE, max_retries=0
    )
    client = RolloutClient(config)
    try:
        yield Runner(env, client, post)
    finally:
        await client.close()
        await env._teardown()


def outcome_of(
    output: dict[str, Any], label: str, reward_error: str | None, measured: Mapping[str, Any] | None = None
) -> Outcome:
    """What is reported to the orchestrator. `measured`: metrics that are no numbers, in whose place verifiers has a
    0."""
    error = _error_of(output, reward_error)
    reward = output.get("reward")
    reward = 0.0 if reward is None else float(reward)
    if error is None and not math.isfinite(reward):
        error = {"kind": "environment", "message": "the reward is not a finite number"}
    if error is not None:
        error["message"] = shortened(error["message"], LONGEST_MESSAGE)
        log.error("%s failed (%s): %s", label, error["kind"], error["message"])
    trace = {
        "session": str(output["trajectory_id"]),
        "trainable": True,
        "ok": error is None,
        "reward": reward if math.isfinite(reward) else 0.0,
        "metrics": numbers({**(output.get("metrics") or {}), **(measured or {})}),
        "stop_condition": output.get("stop_condition"),
        "truncated": bool(output.get("is_truncated")),
    }
    return {"ok": error is None, "traces": [trace], "error": error}


def _error_of(output: dict[str, Any], reward_error: str | None) -> dict[str, str] | None:
    found = output.get("error")
    if found:
        name = str(found["error"])
        # In versions without a message, the chain of errors has it.
        said = found.get("error_chain_repr") or found.get("message") or ""
        return {"kind": KINDS.get(name, "environment"), "message": f"{name}: {said}", "exception": name}
    if reward_error is not None:
        # verifiers continued with 0.0, which says nothing about the answer.
        return {"kind": "environment", "message": reward_error, "exception": "TaskError"}
    return None
