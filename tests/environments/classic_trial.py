"""Classic environments that behave, and misbehave, in every way that they can."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset

torn_down: list[str] = []


def rows(prefix: str, count: int) -> Dataset:
    return Dataset.from_list([{"question": f"{prefix} {number}", "answer": str(number)} for number in range(count)])


def said(completion: Any) -> list[str]:
    """Contents of the assistant's messages."""
    plain = [message if isinstance(message, dict) else message.model_dump() for message in completion]
    return [str(message.get("content") or "") for message in plain if message["role"] == "assistant"]


async def words(completion: Any) -> float:
    await asyncio.sleep(0)
    return float(sum(len(text.split()) for text in said(completion)))


def half(completion: Any) -> float:
    return 0.5


def not_a_number(completion: Any) -> float:
    return float("nan")


def raises(completion: Any) -> float:
    raise ZeroDivisionError("this reward cannot be computed")


def says_nothing(completion: Any) -> None:
    return None


def several(completion: Any) -> Any:
    return {"x": 1, "word": "none", "inner": {"y": 2.5}}


def several_each(completions: list[Any]) -> Any:
    return [{"place": place} for place, _ in enumerate(completions)]


def longest(completions: list[Any]) -> list[float]:
    lengths = [len("".join(said(completion))) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def too_few(completions: list[Any]) -> list[float]:
    return [1.0]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Dialogue(vf.MultiTurnEnv):
    """Asks for more until it hears `enough`."""

    @vf.stop
    async def heard_enough(self, state: Any) -> bool:
        return any("enough" in text for text in said(state.get("completion") or [])) or bool(
            state["trajectory"] and "enough" in str(said(state["trajectory"][-1]["completion"]))
        )

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "more"}]


class NeverEnds(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        await asyncio.Event().wait()
        return state


class FirstRaises(vf.SingleTurnEnv):
    """The first rollout of a group raises what verifiers does not catch, when the two others ask the model."""

    started = asking = 0

    async def setup_state(self, state: Any) -> Any:
        self.started += 1
        if self.started == 1:
            while self.asking < 2:
                await asyncio.sleep(0)
            raise RuntimeError("the world is not there")
        return state

    async def get_model_response(self, *arguments: Any, **named: Any) -> Any:
        self.asking += 1
        return await super().get_model_response(*arguments, **named)


class TornDown(vf.SingleTurnEnv):
    @vf.teardown
    async def tear_down(self) -> None:
        torn_down.append("torn down")
        print("torn down", flush=True)


KINDS: dict[str, Any] = {
    "single": (vf.SingleTurnEnv, [words, half]),
    "dialogue": (Dialogue, [words]),
    "tool": (vf.ToolEnv, [words]),
    "reward_raises": (vf.SingleTurnEnv, [half, raises]),
    "reward_is_none": (vf.SingleTurnEnv, [says_nothing]),
    "reward_is_nan": (vf.SingleTurnEnv, [not_a_number]),
    "group": (vf.SingleTurnEnv, [longest, half]),
    "group_reward_is_short": (vf.SingleTurnEnv, [too_few]),
    "group_raises": (FirstRaises, [longest]),
    "never_ends": (NeverEnds, [half]),
    "group_never_ends": (NeverEnds, [longest]),
    "torn_down": (TornDown, [half]),
    "measures": (vf.SingleTurnEnv, [half, several]),
    "group_measures": (vf.SingleTurnEnv, [longest, several_each]),
}
METRICS = {"measures", "group_measures"}
"""Kinds whose second function has weight 0."""


def load_environment(kind: str = "single", examples: int = 6, eval_examples: int = 0, secret: str = "") -> Any:
    if secret:
        vf.ensure_keys([secret])
    if kind == "env_group":
        return vf.EnvGroup([load_environment("single"), load_environment("dialogue")], ["single", "dialogue"])
    cls, funcs = KINDS[kind]
    more: dict[str, Any] = {"tools": [add]} if cls is vf.ToolEnv else {}
    if issubclass(cls, vf.MultiTurnEnv) and not issubclass(cls, vf.SingleTurnEnv):
        more["max_turns"] = 5
    return cls(
        dataset=rows("train", examples),
        eval_dataset=rows("eval", eval_examples) if eval_examples else None,
        rubric=vf.Rubric(funcs=funcs, weights=[1.0, 0.0] if kind in METRICS else None),
        **more,
    )
