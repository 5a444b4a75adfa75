"""Runs classic environments in the interpreter that has them, against a scripted model; prints what came of it as JSON.

.venv-classic/bin/python tests/classic_driver.py      (with `primerl` and tests/environments on PYTHONPATH)
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from primerl.envs.check import check_environment
from primerl.envs.generations import choice, classic
from primerl.envs.interface import Address, EnvironmentRefusedError

ROOT = "http://127.0.0.1:1/v1"
SETTINGS: dict[str, Any] = {
    "model": "policy",
    "sampling": {"temperature": 1.0, "max_tokens": 8, "top_k": 5},
    "time_limit": 600.0,
}
OVERFLOW = {"error": {"message": "This model's maximum context length is 8 tokens", "code": "context_length_exceeded"}}

Answer = Callable[[dict[str, Any]], Any]
"""Chat request -> text, message, or (status, body)."""


class Model:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.hung_up = 0
        self.waits = asyncio.Event()

    async def post(self, url: str, key: str, session: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        request = json.loads(body)
        self.asked.append({"url": url, "key": key, "session": session, "body": request})
        given = self.answer(request)
        if given is None:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.hung_up += 1
        if isinstance(given, tuple):
            return given[0], json.dumps(given[1]).encode()
        message = given if isinstance(given, dict) else {"role": "assistant", "content": given}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy"}
        return 200, json.dumps({**reply, "choices": [choice], "usage": usage}).encode()


def load(kind: str, **arguments: Any) -> Any:
    return classic.load("classic-trial", {"kind": kind, **arguments}, ROOT)


async def one(kind: str, answer: Answer) -> dict[str, Any]:
    """A rollout of the first example."""
    env, model = load(kind), Model(answer)
    row = classic.list_examples(env, kind, 0)[0]
    async with classic.serving(env, ROOT, model.post) as runner:
        outcome = await runner.run(row, Address("r", "http://h/rollouts/1/v1", "k1"), **SETTINGS)
    return {"outcome": outcome, "asked": model.asked}


async def group(kind: str, answer: Answer) -> dict[str, Any]:
    """A group of three."""
    env, model = load(kind), Model(answer)
    row = classic.list_examples(env, kind, 0)[0]
    rollouts = [Address(f"r{number}", f"http://h/rollouts/{number}/v1", f"k{number}") for number in range(3)]
    async with classic.serving(env, ROOT, model.post) as runner:
        try:
            outcomes = await runner.run_group(row, rollouts, **SETTINGS)
        except RuntimeError as error:
            # What it left behind is ended: wait for it, then count.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
            return {"raised": str(error), "hung_up": model.hung_up, "asked": len(model.asked)}
    return {"outcomes": outcomes, "asked": model.asked}


def by_number(request: dict[str, Any]) -> str:
    """Longer and longer answers."""
    by_number.calls = getattr(by_number, "calls", 0) + 1  # type: ignore[attr-defined]
    return "word " * by_number.calls  # type: ignore[attr-defined, no-any-return]


def dialogue(request: dict[str, Any]) -> str:
    return "well" if len(request["messages"]) < 5 else "that is enough"


def calls_tool(request: dict[str, Any]) -> Any:
    if request["messages"][-1]["role"] == "tool":
        return f"it is {request['messages'][-1]['content']}"
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def cancelled() -> dict[str, Any]:
    """While the model is asked."""
    env, model = load("single"), Model(lambda _: None)
    row = classic.list_examples(env, "single", 0)[0]
    async with classic.serving(env, ROOT, model.post) as runner:
        task = asyncio.ensure_future(runner.run(row, Address("r", "http://h", "k"), **SETTINGS))
        await model.waits.wait()
        task.cancel()
        await asyncio.wait([task])
    return {"cancelled": task.cancelled(), "hung_up": model.hung_up, "left": len(classic._RUNNING)}


async def splits() -> dict[str, Any]:
    """Which rows, in which order, and what is said of them."""

    def questions(env: Any, seed: int, role: Any) -> list[str]:
        return [row["question"] for row in classic.list_examples(env, "trial", seed, role)]

    env, alone = load("single", eval_examples=4), load("single")
    found = {name: questions(env, seed, role) for name, seed, role in [("a", 0, "train"), ("b", 1, "train")]}
    found |= {"again": questions(env, 0, "train"), "eval": questions(env, 0, "eval")}
    found |= {"fallback": questions(alone, 0, "eval")}
    remarks = [classic.remark(one, "trial", role) for one in (env, alone) for role in ("train", "eval")]
    return {**found, "remarks": remarks}


async def teardown() -> dict[str, Any]:
    """Once, although verifiers does it again at the exit of the process; our signal handlers stay ours."""
    before = signal.getsignal(signal.SIGTERM)
    env = load("torn_down")
    async with classic.serving(env, ROOT, Model(by_number).post):
        pass
    import classic_trial

    return {"times": len(classic_trial.torn_down), "handler_is_kept": signal.getsignal(signal.SIGTERM) is before}


async def refusals() -> dict[str, Any]:
    """What a check says."""

    def said(environment: str, *arguments: Any) -> str | None:
        return check_environment(environment, *arguments).problem

    return {
        "fine": said("owner/classic-trial@1.0", {"kind": "group"}, "train", 2, 2),
        "group_too_large": said("classic-trial", {"kind": "group"}, "train", 4, 3),
        "group_of_one": said("classic-trial", {"kind": "group"}, "train", 1),
        "evaluated_once": said("classic-trial", {"kind": "group"}, "eval", 1),
        "missing": said("no-such-environment", {}),
        "argument": said("classic-trial", {"colour": 1}),
        "secret": said("classic-trial", {"secret": "NO_SUCH_SECRET"}),
        "v1": said("trial-env", {}),
        "no_environment": said("json", {}),
        "remark": check_environment("classic-trial", {}, "eval").remark,
    }


async def env_group() -> dict[str, Any]:
    """Every row of two environments in one."""
    env, model = load("env_group"), Model(dialogue)
    rows = classic.list_examples(env, "env_group", 0)
    outcomes = []
    async with classic.serving(env, ROOT, model.post) as runner:
        for row in (rows[index] for index in range(len(rows))):
            outcomes.append(await runner.run(row, Address("r", "http://h", "k"), **SETTINGS))
    return {"stops": sorted(outcome["traces"][0]["stop_condition"] for outcome in outcomes), "asked": len(model.asked)}


async def imports() -> dict[str, Any]:
    """What a worker brings into an interpreter that is not ours."""
    import primerl.envs.worker

    ours = {name for name, module in sys.modules.items() if name.partition(".")[0] == "primerl" and module is not None}
    return {"ours": sorted(ours), "torch": "torch" in sys.modules, "file": primerl.envs.worker.__file__}


SCENARIOS: dict[str, Callable[[], Awaitable[Any]]] = {
    "single": lambda: one("single", lambda _: "hello there"),
    "dialogue": lambda: one("dialogue", dialogue),
    "tool": lambda: one("tool", calls_tool),
    "reward_raises": lambda: one("reward_raises", lambda _: "hello"),
    "reward_is_none": lambda: one("reward_is_none", lambda _: "hello"),
    "reward_is_nan": lambda: one("reward_is_nan", lambda _: "hello"),
    "measures": lambda: one("measures", lambda _: "hello"),
    "group_measures": lambda: group("group_measures", by_number),
    "overflow": lambda: one("single", lambda _: (400, OVERFLOW)),
    "engine_fails": lambda: one("single", lambda _: (503, {"error": {"message": "no engine"}})),
    "empty_answer": lambda: one("single", lambda _: ""),
    "group": lambda: group("group", by_number),
    "group_reward_is_short": lambda: group("group_reward_is_short", by_number),
    "group_raises": lambda: group("group_raises", lambda _: None),
    "cancelled": cancelled,
    "splits": splits,
    "teardown": teardown,
    "refusals": refusals,
    "imports": imports,
    "env_group": env_group,
}


async def main() -> dict[str, Any]:
    return {name: await run() for name, run in SCENARIOS.items()}


if __name__ == "__main__":
    try:
        choice.prepared(choice.installed())
    except EnvironmentRefusedError as refused:
        sys.exit(str(refused))
    found = asyncio.run(main())
    print("\n" + json.dumps(found), flush=True)
