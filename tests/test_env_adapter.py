"""What a rollout of a verifiers environment tells the orchestrator, and how its turns reach the gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import subprocess
import sys
import time
import types
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from env_orchestrator import Chat, Orchestrator, completion, key_of
from primerl import run_key
from primerl.envs import limits as rollout_limits
from primerl.envs.generations import harness, interception, patches, v1
from primerl.envs.interface import Address
from primerl.envs.limits import NO_LIMITS, RolloutLimits
from verifiers.v1.utils import loaders

ENVIRONMENTS = Path(__file__).parent / "environments"
ROOT = "http://127.0.0.1:1/v1"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test environments, for this process and for the tool servers it starts."""
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


def chat_completion(content: str, **fields: Any) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    return json.dumps({**body, **fields}).encode()


class Gateway:
    """Answers model calls in this process, and keeps them."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, bytes] | Awaitable[tuple[int, bytes]]]) -> None:
        self.answer = answer
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    async def post(self, url: str, api_key: str, session: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        # What an agent has opens chat routes only.
        assert api_key == ("the-run's" if url.endswith("/limits") else key_of(7))
        request = json.loads(body)
        self.calls.append((url, session, request))
        answer = self.answer(request)
        return await answer if isinstance(answer, Awaitable) else answer


def saying(*replies: str) -> Gateway:
    said = itertools.cycle(replies)
    return Gateway(lambda _: (200, chat_completion(next(said))))


@asynccontextmanager
async def runner_of(
    environment: str, gateway: Gateway, arguments: dict[str, Any], limits: RolloutLimits = NO_LIMITS
) -> Any:
    v1.prepare()
    env = v1.load(environment, arguments, ROOT)
    async with v1.serving(env, ROOT, gateway.post, limits) as runner:
        yield runner


def roll_out(
    environment: str,
    gateway: Gateway,
    arguments: dict[str, Any] | None = None,
    example: int = 0,
    base_url: str = "http://gateway/rollouts/7/v1",
    limits: RolloutLimits = NO_LIMITS,
    time_limit: float = 30.0,
) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with runner_of(environment, gateway, arguments or {}, limits) as runner:
            # In the order of the taskset, so that tests can name an example by its place.
            task = list(runner.env.taskset)[example]
            outcome: dict[str, Any] = await runner.run(
                task,
                Address("rollout 7", base_url, key_of(7)),
                model="policy",
                sampling={"temperature": 0.5, "max_tokens": 28},
                time_limit=time_limit,
            )
            return outcome

    return asyncio.run(run())


def trial(kind: str, gateway: Gateway, **settings: Any) -> dict[str, Any]:
    return roll_out("trial-env", gateway, {"taskset": {"kinds": [kind], **settings}})


def test_a_single_turn_is_scored_and_its_request_is_the_rollouts() -> None:
    arguments = {"taskset": {"num_examples": 1, "seed": 3}}
    v1.prepare()
    text = next(iter(v1.load("reverse-text", arguments, ROOT).taskset)).data.text
    gateway = saying(f"<r>{text[::-1]}</r>")
    outcome = roll_out("reverse-text", gateway, arguments)
    [(url, session, request)] = gateway.calls
    assert url == "http://gateway/rollouts/7/v1/chat/completions"
    assert request["messages"] == [{"role": "user", "content": f"Reverse: {text}"}]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("policy", 0.5, 28)
    [trace] = outcome["traces"]
    assert trace == {
        "session": session,
        "seat": "agent",
        "trainable": True,
        "ok": True,
        "reward": 1.0,
        "metrics": {"exact": 1.0},
        "stop_condition": "agent_completed",
        "truncated": False,
    }
    assert outcome["ok"]
    assert outcome["error"] is None


def test_a_reply_that_was_cut_is_truncated() -> None:
    cut = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "<r>a"}, "finish_reason": "length"}]}
    outcome = roll_out("reverse-text", Gateway(lambda _: (200, chat_completion("", **cut))))
    assert outcome["ok"]
    assert outcome["traces"][0]["truncated"]
    assert outcome["traces"][0]["reward"] == 0.0


def test_a_scripted_user_extends_one_conversation() -> None:
    gateway = saying("first", "second", "third")
    outcome = roll_out("sort-letters", gateway, {"taskset": {"min_turns": 3, "max_turns": 3}})
    assert outcome["ok"]
    assert len({session for _, session, _ in gateway.calls}) == 1
    histories = [request["messages"] for _, _, request in gateway.calls]
    assert [len(history) for history in histories] == [1, 3, 5]
    for earlier, later, reply in zip(histories, histories[1:], ["first", "second"], strict=False):
        assert later[: len(earlier)] == earlier
        assert later[len(earlier)] == {"role": "assistant", "content": reply}
        assert later[-1]["content"].startswith("Add: ")


def test_a_multi_turn_reward_counts_missing_turns_as_zero() -> None:
    # The policy sorts the first turn right; then its context is full.
    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        if len(request["messages"]) > 1:
            return 400, b'{"error": {"message": "maximum context length is 10", "code": "context_length_exceeded"}}'
        return 200, chat_completion("".join(sorted(request["messages"][0]["content"].removeprefix("Sort: "))))

    outcome = roll_out("sort-letters", Gateway(answer), {"taskset": {"min_turns": 2, "max_turns": 2}})
    assert outcome["ok"]
    assert outcome["traces"][0]["reward"] == 0.5
    assert outcome["traces"][0]["metrics"] == {"exact": 0.0}


def test_a_stop_and_a_limit_refuse_the_turn_in_order() -> None:
    gateway = saying("never said")
    outcome = trial("stops_at_once", gateway)
    assert gateway.calls == []
    assert outcome["ok"]
    assert outcome["traces"][0]["stop_condition"] == "enough"
    limited = {"agent": {"max_turns": 2}, "taskset": {"min_turns": 3, "max_turns": 3}}
    gateway = saying("a")
    outcome = roll_out("sort-letters", gateway, limited)
    assert len(gateway.calls) == 2
    assert outcome["ok"]
    assert outcome["traces"][0]["stop_condition"] == "max_turns"
    assert outcome["traces"][0]["truncated"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reward_raises", "the reward of this example cannot be computed"),
        ("setup_raises", "the world is not there"),
        ("setup_raises_at_length", "the world is not there at all"),
    ],
)
def test_an_exception_of_the_environment_is_a_typed_error_with_its_traceback_in_the_log(
    kind: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "primerl.envs"):
        outcome = trial(kind, saying("hello"))
    assert not outcome["ok"]
    assert outcome["error"]["kind"] == "environment"
    assert message in outcome["error"]["message"]
    assert "Traceback" not in outcome["error"]["message"]
    assert len(outcome["error"]["message"]) < 2 * v1.LONGEST_MESSAGE
    [record] = caplog.records
    assert len(record.getMessage()) < 2 * v1.LONGEST_TRACEBACK
    assert "rollout 7 failed" in record.getMessage()
    assert 'trial_env.py", line' in record.getMessage()


def test_a_reward_that_is_no_number_is_an_error() -> None:
    outcome = trial("reward_is_nan", saying("hello"))
    assert not outcome["ok"]
    assert outcome["error"]["kind"] == "environment"
    assert "not a finite number" in outcome["error"]["message"]
    assert outcome["traces"][0]["reward"] == 0.0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, b"engine is down"), "upstream 500: engine is down"),
        ((410, b"rollout is over"), "upstream 410"),
        ((200, b"<html>"), "malformed upstream response"),
        ((200, b'{"choices": []}'), "malformed upstream response"),
        ((200, b"[]"), "malformed upstream response"),
    ],
)
def test_a_failed_model_call_is_an_engine_error(answer: tuple[int, bytes], words: str) -> None:
    gateway = Gateway(lambda _: answer)
    outcome = roll_out("reverse-text", gateway)
    assert len(gateway.calls) == 1
    assert not outcome["ok"]
    assert outcome["error"]["kind"] == "engine"
    assert outcome["error"]["exception"] == "ProviderError"
    assert outcome["error"]["status"] == (answer[0] if answer[0] != 200 else 502)
    assert words in outcome["error"]["message"]
    assert not outcome["traces"][0]["ok"]


@pytest.mark.processes
@pytest.mark.parametrize("failure", [ConnectionError("cannot reach it"), TimeoutError("no answer")])
def test_a_gateway_that_cannot_be_reached_is_an_engine_error(failure: Exception) -> None:
    def answer(_: dict[str, Any]) -> tuple[int, bytes]:
        raise failure

    outcome = roll_out("reverse-text", Gateway(answer))
    assert outcome["error"]["kind"] == "engine"
    assert str(failure) in outcome["error"]["message"]


def test_a_full_context_ends_in_order_and_has_no_turn() -> None:
    body = b'{"error": {"message": "This model\'s maximum context length is 10", "code": "context_length_exceeded"}}'
    outcome = trial("plain", Gateway(lambda _: (400, body)))
    assert outcome["ok"]
    assert outcome["traces"][0]["metrics"] == {"turns": 0.0}
    assert outcome["traces"][0]["reward"] == 0.0


def test_a_metric_may_be_several_and_one_of_weight_0_fails_nothing() -> None:
    outcome = trial("measures", saying("six"))
    assert outcome["ok"], outcome["error"]
    assert outcome["traces"][0]["reward"] == 3.0
    assert outcome["traces"][0]["metrics"] == {"turns": 1.0, "more/y": 2.0}


def test_of_a_taskset_without_end_the_first_examples_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    v1.prepare()
    monkeypatch.setattr(v1, "FIRST_OF_ENDLESS", 9)
    kinds = ["plain", "measures"]
    env = v1.load("trial-env", {"taskset": {"bounded": False, "kinds": kinds}}, ROOT)
    examples = v1.list_examples(env, "trial-env", 3, held_out=1)
    assert len(examples) == 9
    again = [one.data.kind for one in v1.list_examples(env, "trial-env", 3, held_out=1)]
    assert [one.data.kind for one in examples] == again
    assert "its first 9 are used" in (v1.remark(env, "trial-env", "train") or "")
    bounded = v1.load("trial-env", {"taskset": {"kinds": kinds}}, ROOT)
    assert v1.remark(bounded, "trial-env", "train") is None


def test_a_cancelled_rollout_leaves_nothing_behind() -> None:
    async def run() -> None:
        asked = asyncio.Event()

        async def hang() -> tuple[int, bytes]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with runner_of("reverse-text", Gateway(lambda _: hang()), {}) as runner:
            task = asyncio.ensure_future(
                runner.run(
                    next(iter(runner.env.taskset)),
                    Address("", "http://gateway/v1", key_of(7)),
                    model="m",
                    sampling={},
                    time_limit=30,
                )
            )
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert interception.GATEWAYS == {}
            assert interception._SESSIONS == {}

    asyncio.run(run())


def test_hooks_on_replies_go_through_verifiers_own_server_to_the_rollouts_url() -> None:
    with Orchestrator() as orchestrator:
        gateway = saying("not asked")
        outcome = roll_out("hooked-env", gateway, base_url=f"{orchestrator.url}/rollouts/7/v1")
        assert gateway.calls == []
        [chat] = orchestrator.chats
        assert chat.rollout == 7
        assert chat.session == outcome["traces"][0]["session"]
        assert outcome["ok"], outcome
        assert outcome["traces"][0]["reward"] == 1.0


# verifiers' own use of tenacity.
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")
def test_tools_are_run_between_turns() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "", "arguments": '{"text": "abc"}'}}

    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        if request["messages"][-1]["role"] == "tool":
            return 200, chat_completion("done")
        call["function"]["name"] = request["tools"][0]["function"]["name"]  # type: ignore[index]
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, chat_completion("", choices=[{"index": 0, "message": message, "finish_reason": "tool_calls"}])

    gateway = Gateway(answer)
    outcome = roll_out("tool-env", gateway)
    assert outcome["ok"], outcome
    assert outcome["traces"][0]["reward"] == 1.0
    assert [message["role"] for message in gateway.calls[-1][2]["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("arguments", [{"agent": {"harness": {"id": "elsewhere"}}}, {"harness": {"id": "elsewhere"}}])
def test_another_harness_reaches_the_rollouts_url_too(arguments: dict[str, Any]) -> None:
    """A harness in a process of its own, as a package may bring it; named by seat, or for the only one."""

    async def reply(chat: Chat) -> Any:
        return completion(f"<r>{chat.last.removeprefix('Reverse: ')[::-1]}</r>")

    with Orchestrator(reply=reply) as orchestrator:
        sys.modules["elsewhere"] = _elsewhere()
        try:
            outcome = roll_out(
                "reverse-text", saying("not asked"), arguments, base_url=f"{orchestrator.url}/rollouts/7/v1"
            )
        finally:
            del sys.modules["elsewhere"]
        assert outcome["ok"], outcome
        assert outcome["traces"][0]["reward"] == 1.0
        assert [chat.rollout for chat in orchestrator.chats] == [7]


def test_a_seat_with_an_endpoint_of_its_own_never_reaches_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key_of(3))
    gateway = saying("what is it?")
    with Orchestrator() as elsewhere:
        client = {"type": "eval", "base_url": f"{elsewhere.url}/rollouts/3/v1", "api_key_var": "JUDGE_KEY"}
        outcome = roll_out("seats-env", gateway, {"judged": True, "answers": {"client": client}})
        assert [chat.last for chat in elsewhere.chats] == ["Answer: what is it?"]
    assert outcome["ok"], outcome
    assert {trace["seat"]: trace["trainable"] for trace in outcome["traces"]} == {"asks": True, "answers": False}
    sessions = {trace["seat"]: trace["session"] for trace in outcome["traces"]}
    assert [session for _, session, _ in gateway.calls] == [sessions["asks"]]


def test_the_limits_of_an_example_are_told_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_key.VARIABLE, "the-run's")

    async def told(request: dict[str, Any]) -> tuple[int, bytes]:
        return (200, b"{}") if "messages" not in request else (200, chat_completion("yes"))

    gateway = Gateway(told)
    limits = {"turns": 2, "tokens": 100}
    assert roll_out("seats-env", gateway, {"taskset": {"limits": limits}})["ok"]
    assert gateway.calls[0] == ("http://gateway/rollouts/7/limits", "", limits)
    assert len(gateway.calls) == 3
    # Before a run, and by name.
    v1.prepare()
    env = v1.load("seats-env", {"taskset": {"limits": {"turn": 2}}}, ROOT)
    with pytest.raises(v1.EnvironmentRefusedError, match="`rollout_limits` of example 0: unknown setting `turn`"):
        v1.list_examples(env, "seats-env", 0)


def test_a_seat_that_hangs_is_ended_when_the_rollouts_time_is_up_and_scored() -> None:
    async def never(request: dict[str, Any]) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    plain = {"taskset": {"kinds": ["plain"]}}
    outcome = roll_out("trial-env", Gateway(never), plain, limits=RolloutLimits(time_s=0.2), time_limit=60.0)
    assert outcome["ok"], outcome
    [trace] = outcome["traces"]
    assert (trace["stop_condition"], trace["truncated"], trace["reward"]) == ("limit_time", True, 0.0)


def test_the_rollouts_time_goes_on_while_a_seat_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers counts the time of a seat in its own turns only."""
    passed = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr(rollout_limits, "time", clock)
    monkeypatch.setattr(v1, "time", clock)

    async def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal passed
        await asyncio.sleep(0)  # where a seat whose time is up is ended
        passed = 2000.0
        return 200, chat_completion("first")

    gateway = Gateway(answer)

    three = {"taskset": {"min_turns": 3, "max_turns": 3}}
    outcome = roll_out("sort-letters", gateway, three, limits=RolloutLimits(time_s=1000.0), time_limit=5000.0)
    assert outcome["ok"], outcome
    [trace] = outcome["traces"]
    assert (trace["stop_condition"], trace["truncated"]) == ("limit_time", True)
    assert len(gateway.calls) <= 2


def _elsewhere() -> Any:

    class ElsewhereHarness(harness.ChatHarness):  # type: ignore[misc]
        """Knows nothing but the endpoint it was given."""

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any, **more: Any
        ) -> Any:
            data = rest[1]
            body = {"model": ctx.model, "messages": self._messages(data)}
            await harness._ask_server(endpoint, secret, body)
            return harness.ProgramResult(0, "", "")

    module = types.ModuleType("elsewhere")
    module.ElsewhereHarness = ElsewhereHarness  # type: ignore[attr-defined]
    module.__all__ = ["ElsewhereHarness"]  # type: ignore[attr-defined]
    return module


def test_what_verifiers_logs_is_below_one_logger(caplog: pytest.LogCaptureFixture) -> None:
    """Whose level is `orchestrator.log.vf_level`."""
    with caplog.at_level(logging.INFO, "verifiers"):
        assert trial("plain", saying("hello"))["ok"]
    assert any(record.name.startswith("verifiers.v1.") for record in caplog.records)


def test_settings_of_the_harness_reach_the_one_seat() -> None:
    v1.prepare()
    agent = v1.load("reverse-text", {"harness": {"tool_timeout": 5}, "agent": {"max_turns": 3}}, ROOT).config.agent
    assert (agent.harness.id, agent.harness.tool_timeout, agent.harness.root) == (harness.HARNESS_ID, 5, ROOT)
    assert (agent.max_turns, agent.runtime.type) == (3, "subprocess")
    other = v1.load("reverse-text", {"harness": {"id": "null", "forward_env": ["A"]}}, ROOT).config.agent
    assert (other.harness.id, other.harness.forward_env, other.runtime.type) == ("null", ["A"], "subprocess")


def test_a_seats_own_harness_keeps_its_id_where_only_settings_are_given() -> None:
    v1.prepare()
    config = v1.load("reverse-text", {"id": "user-sim", "user": {"harness": {"tool_timeout": 5}}}, ROOT).config
    assert (config.user.harness.id, config.user.harness.tool_timeout) == ("null", 5)
    assert config.assistant.harness.id == harness.HARNESS_ID


def test_verifiers_own_default_can_be_asked_for_by_name() -> None:
    v1.prepare()
    for arguments in ({"agent": {"harness": {"id": "default"}, "max_turns": 3}}, {"harness": {"id": "default"}}):
        agent = v1.load("reverse-text", arguments, ROOT).config.agent
        assert agent.harness is None
        assert agent.runtime == vf.AgentConfig().runtime
        assert agent.runtime.type != "subprocess"
    given = {"agent": {"harness": {"id": "default", "forward_env": ["A"]}, "runtime": {"type": "subprocess"}}}
    agent = v1.load("reverse-text", given, ROOT).config.agent
    assert (agent.harness.id, agent.harness.forward_env, agent.runtime.type) == ("bash", ["A"], "subprocess")
    # Of several seats, those that name one keep it, and so do those whose environment has one for them.
    given = {"id": "user-sim", "harness": {"id": "default"}, "assistant": {"harness": {"id": "null"}}}
    config = v1.load("reverse-text", given, ROOT).config
    assert (config.assistant.harness.id, config.user.harness.id) == ("null", "null")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"harness": "null"}, "`harness` must be a table of settings"),
        ({"agent": {"harness": "bash"}}, "`agent.harness` must be a table of settings"),
        ({"harness": {"no_such": 1}}, "agent.harness.no_such: there is no such setting"),
        ({"harness": {"id": "no-such-harness"}}, "no_such_harness"),
        (
            {"harness": {"id": "null"}, "agent": {"harness": {"id": "null"}}},
            "harness.id and args.agent both set id; omit one of them",
        ),
        (
            {"id": "user-sim", "harness": {"id": "null"}},
            "`harness` is for environments with one seat, and this one has assistant, user; give each seat its own, as "
            "args.SEAT.harness",
        ),
    ],
)
def test_a_harness_that_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    v1.prepare()
    with pytest.raises(v1.EnvironmentRefusedError) as caught:
        v1.load("reverse-text", arguments, ROOT)
    assert message in str(caught.value)


def test_examples_depend_on_the_seed_and_nothing_else() -> None:
    v1.prepare()

    def listed(seed: int) -> list[str]:
        env = v1.load("reverse-text", {"taskset": {"num_examples": 50}}, ROOT)
        return [task.data.text for task in v1.list_examples(env, "reverse-text", seed)]

    assert listed(1) == listed(1)
    assert listed(1) != listed(2)
    assert sorted(listed(1)) == sorted(listed(2))


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ("no-such-environment", {}, ["no-such-environment", "install its package"]),
        ("reverse-text", {"taskset": {"lenght": 3}}, ["reverse-text", "taskset.lenght"]),
        ("reverse-text", {"taskset": {"letters": "z-a"}}, ["reverse-text", "letters must be a range"]),
        ("reverse-text", {"taskset": 3}, ["reverse-text", "`taskset` must be a table"]),
        ("reverse-text", {"agent": 3}, ["reverse-text", "seat `agent` must be a table"]),
        ("reverse-text", {"agent": {"max_turn": 3}}, ["reverse-text", "agent.max_turn"]),
        ("trial-env", {"taskset": {"empty": True}}, ["trial-env", "no examples"]),
        ("json", {}, ["json", "cannot be loaded"]),
    ],
)
def test_a_refused_environment_is_named_with_what_is_wrong(
    environment: str, arguments: dict[str, Any], words: list[str]
) -> None:
    v1.prepare()
    with pytest.raises(v1.EnvironmentRefusedError) as refused:
        v1.list_examples(v1.load(environment, arguments, ROOT), environment, 0)
    for word in words:
        assert word in str(refused.value)


def test_a_patch_whose_target_is_gone_or_different_is_refused() -> None:
    with pytest.raises(patches.PatchError, match=r"json\.no_such_function is gone"):
        patches._replace("json", "no_such_function", [], lambda original: original)
    with pytest.raises(patches.PatchError, match=r"json\.loads takes"):
        patches._replace("json", "loads", ["text"], lambda original: original)


@pytest.mark.processes
def test_the_tasksets_of_verifiers_are_imported_where_one_is_named_alone() -> None:
    for environment_id, expected in (
        ("reverse-text", "False reverse_text"),
        ("harbor", "True verifiers.v1.tasksets.harbor"),
    ):
        script = (
            "import sys; from primerl.envs.generations import choice; from verifiers.v1.utils import loaders; "
            "choice.prepared('v1'); "
            f"module = loaders._import_plugin({environment_id!r}, 'taskset', choice.TASKSETS); "
            "print(choice.TASKSETS in sys.modules, module.__name__)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_an_id_that_is_nowhere_is_refused_in_the_words_of_verifiers() -> None:
    v1.prepare()
    with pytest.raises(ModuleNotFoundError, match="taskset 'no-such-one' not found"):
        loaders._import_plugin("no-such-one", "taskset", "verifiers.v1.tasksets")
