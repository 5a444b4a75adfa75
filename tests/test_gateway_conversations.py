"""What clients do with a conversation between two requests: what goes to the engine is what was sampled, or a fork with
its right reason, and every token that an engine sampled is trained once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import Recorder, Sample, Sampled, check_every_token_is_trained_once, recording, report, samples_of
from engine_helpers import wait_until
from gateway_helpers import Gateway, Message, gateway
from primerl.train.data.batch import decode_batch
from test_orchestrator_in_process import PATIENCE_S, post

ARGUMENTS = '{"city": "Zürich", "days": 2, "hourly": [1, 0.5]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWERS = [
    ("Where to?", f"<think>\nThe weather decides.\n</think>\n\nI look.\n{CALL}<|im_end|>"),
    ("sun\n</tool_response>", "<think>\nClear.\n</think>\n\nGo there.<|im_end|>"),
    ("And then?", "<think>\nHome.\n</think>\n\n  Home again.\n\n<|im_end|>"),
    ("Say nothing.", "<|im_end|>"),
    ("Talk plainly.", "Zürich 🚆 – ¡vámonos! 漢字<|im_end|>"),
    ("Say more.", "one two three four five six seven eight nine ten<|im_end|>"),
    ("Compress.", "We went to Zürich.<|im_end|>"),
    ("Run it.", "Thought.\n<code>\nx = 1\n</code>\nObservation: 2<|im_end|>"),
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("get_weather", "clock")
]
SYSTEM = {"role": "system", "content": "Plan a trip."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str, call: str = "call_1") -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text}


@dataclass
class Scene:
    """Two rollouts, the whole group of a batch; the first is what a test is about."""

    gateway: Gateway
    recorder: Recorder
    rollouts: list[dict[str, Any]]
    sessions: set[str] = field(default_factory=set)

    def send(self, body: dict[str, Any] | bytes, path: str = "chat/completions", **headers: str) -> httpx.Response:
        self.sessions.add(headers.get("x_session_id", ""))
        given = {"authorization": f"Bearer {self.rollouts[0]['api_key']}", "content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.rollouts[0]['base_url']}/{path}"
        return httpx.post(url, content=content, headers=given, timeout=PATIENCE_S)

    def ask(self, messages: list[Message], *, headers: dict[str, str] | None = None, **fields: Any) -> Message:
        """The answer's message."""
        answer = self.send({"messages": messages, **fields}, **(headers or {}))
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0]["message"])

    def seen(self) -> list[Sampled]:
        """What the engine was asked in the first rollout, and what it said."""
        return self.recorder.of(self.rollouts[0])

    def check_extends(self, later: int, earlier: int, *, closed: bool = True) -> None:
        """The prompt of one request is that of another, what was sampled, and something new."""
        before, after = self.seen()[earlier], self.seen()[later]
        begin = before.prompt + before.token_ids
        if not closed:
            begin = [*begin, self.stop]
        assert after.prompt[: len(begin)] == begin
        assert len(after.prompt) > len(begin)

    @property
    def stop(self) -> int:
        return self.gateway.renderer.stop_token_ids[-1]

    def prompts(self) -> dict[str, int]:
        """How those of the first rollout were made; the second's one turn is not counted."""
        turns = self.gateway.turns()
        return {kind: count for kind, count in turns.items() if count}

    def finish(self, trained: int | None = None) -> list[list[Sample]]:
        """Ends both rollouts and compares the batch with the engine's words. `trained`: samples of the first."""
        other = self.rollouts[1]
        given = {"authorization": f"Bearer {other['api_key']}"}
        body = {"messages": [user("Compress.")]}
        answer = httpx.post(f"{other['base_url']}/chat/completions", json=body, headers=given, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        sessions = [tuple(sorted(self.sessions)), ("",)]
        for reward, (rollout, own) in enumerate(zip(self.rollouts, sessions, strict=True)):
            report(self.gateway.orchestrator.url, self.gateway.worker, rollout, float(reward), own)
        batch = self.gateway.orchestrator.next_batch(1, 0)
        assert batch is not None
        samples = samples_of(decode_batch(batch))
        for rollout in self.rollouts:
            check_every_token_is_trained_once(self.recorder.of(rollout), samples[rollout["rollout"]])
        if trained is not None:
            assert len(samples[self.rollouts[0]["rollout"]]) == trained
        return [samples[rollout["rollout"]] for rollout in self.rollouts]


@pytest.fixture
def flags() -> tuple[str, ...]:
    """Of the mock engine."""
    return ()


@pytest.fixture
def scene(mock_binary: Path, tmp_path: Path, flags: tuple[str, ...]) -> Iterator[Scene]:
    recorder = Recorder()
    before = partial(recording, recorder)
    sizes = {"batch_size": 2, "group_size": 2}
    with gateway(
        tmp_path, mock_binary, answers=ANSWERS, template="qwen3", before=before, flags=flags, **sizes
    ) as served:
        yield Scene(served, recorder, [served.lease, served.another_rollout()])
        # Otherwise the orchestrator's end waits for it.
        post(f"{served.orchestrator.url}/envs/leave", {"worker": served.worker})


def reordered(arguments: str) -> str:
    return json.dumps(dict(reversed(json.loads(arguments).items())), ensure_ascii=False)


def spread(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=4)


def escaped(arguments: str) -> str:
    return json.dumps(json.loads(arguments), ensure_ascii=True, separators=(",", ":"))


def renumbered(arguments: str) -> str:
    """As languages without whole numbers write them."""
    return arguments.replace("2", "2.0").replace("0.5", "5e-1")


@pytest.mark.parametrize("rewrite", [reordered, spread, escaped, renumbered])
def test_calls_whose_arguments_were_written_anew(scene: Scene, rewrite: Callable[[str], str]) -> None:
    messages = [SYSTEM, user("Where to?")]
    answer = scene.ask(messages, tools=TOOLS)
    [call] = answer["tool_calls"]
    rewritten = rewrite(call["function"]["arguments"])
    assert rewritten != call["function"]["arguments"]
    call["function"]["arguments"] = rewritten
    call["id"] = "call_1"
    assert scene.ask([*messages, answer, tool("sun")], tools=TOOLS)["content"].strip() == "Go there."
    scene.check_extends(1, 0)
    assert scene.prompts() == {"first_turn": 1, "extended": 1}
    scene.finish(trained=1)


@pytest.mark.parametrize(
    "change", [str.strip, lambda text: f"\n{text} \t", lambda text: text.replace(" ", "\u00a0 "), lambda t: t.rstrip()]
)
def test_content_whose_white_space_was_changed(scene: Scene, change: Callable[[str], str]) -> None:
    answer = scene.ask([user("And then?")])
    answer["content"] = change(answer["content"])
    scene.ask([user("And then?"), answer, user("Say more.")])
    scene.check_extends(1, 0)
    scene.finish(trained=1)


def moved(name: str) -> Callable[[Message], None]:
    def move(answer: Message) -> None:
        reasoning = answer.pop("reasoning_content")
        answer.pop("reasoning", None)
        answer[name] = reasoning

    return move


def dropped(answer: Message) -> None:
    for name in ("reasoning_content", "reasoning", "reasoning_details"):
        answer.pop(name, None)


def as_details(answer: Message) -> None:
    reasoning = answer["reasoning_content"]
    dropped(answer)
    answer["reasoning_details"] = [{"type": "reasoning.text", "text": reasoning, "index": 0}]


def in_content(answer: Message) -> None:
    reasoning = answer["reasoning_content"]
    dropped(answer)
    answer["content"] = f"<think>\n{reasoning}\n</think>\n\n{answer['content']}"


REASONING: list[Callable[[Message], None]] = [
    lambda _: None,
    dropped,
    moved("reasoning"),
    moved("reasoning_content"),
    as_details,
    in_content,
]


@pytest.mark.parametrize("change", REASONING)
@pytest.mark.parametrize("calls", [False, True])
def test_reasoning_that_was_kept_dropped_or_moved(scene: Scene, change: Callable[[Message], None], calls: bool) -> None:
    question, more = ("Where to?", tool("sun")) if calls else ("And then?", user("Say more."))
    answer = scene.ask([user(question)], tools=TOOLS)
    assert answer["reasoning_content"]
    if calls:
        more["tool_call_id"] = answer["tool_calls"][0]["id"]
    change(answer)
    scene.ask([user(question), answer, more], tools=TOOLS)
    scene.check_extends(1, 0)
    scene.finish(trained=1)


def test_thinking_blocks(scene: Scene) -> None:
    question = {"role": "user", "content": "And then?"}
    for blocks in (lambda content: content, lambda content: [b for b in content if b["type"] != "thinking"]):
        answer = scene.send({"max_tokens": 100, "messages": [question]}, "messages").json()
        assert answer["content"][0]["type"] == "thinking"
        messages = [question, {"role": "assistant", "content": blocks(answer["content"])}, user("Say more.")]
        assert scene.send({"max_tokens": 100, "messages": messages}, "messages").status_code == 200
    scene.check_extends(1, 0)
    # The question came again: both of its answers are the same words, and the one sampled last is gone on from.
    scene.check_extends(3, 2)
    scene.finish()


def test_other_reasoning_is_another_answer(scene: Scene) -> None:
    answer = scene.ask([user("And then?")])
    scene.ask([user("And then?"), {**answer, "reasoning_content": "Abroad."}, user("Say more.")])
    assert scene.prompts() == {"first_turn": 1, "answer_edited": 1}
    scene.finish(trained=2)


def test_the_system_prompt_changes(scene: Scene) -> None:
    answer = scene.ask([SYSTEM, user("And then?")])
    scene.ask([{**SYSTEM, "content": "It is Monday."}, user("And then?"), answer, user("Say more.")])
    assert scene.prompts() == {"first_turn": 1, "history_edited": 1}
    scene.finish(trained=2)


@pytest.mark.parametrize(("place", "fork"), [(0, "history_edited"), (1, "answer_edited"), (2, "history_edited")])
def test_a_history_is_edited(scene: Scene, place: int, fork: str) -> None:
    messages = [SYSTEM, user("And then?")]
    messages.append(scene.ask(messages))
    messages.append(user("Say more."))
    messages.append(scene.ask(messages))
    edited = [dict(message) for message in messages]
    edited[place + 1]["content"] = "Something else."
    scene.ask([*edited, user("And then?")])
    assert scene.prompts() == {"first_turn": 1, "extended": 1, fork: 1}
    scene.finish(trained=2)


def test_an_agent_writes_on_behind_its_stop_sequence(scene: Scene) -> None:
    sampled = "Thought.\n<code>\nx = 1\n</code>"
    answer = scene.ask([user("Run it.")], stop=["</code>"])
    assert answer["content"] == sampled.removesuffix("</code>")
    written = f"{sampled}\nCalling tools:\n[{{'id': 'call_1'}}]"
    messages = [user("Run it."), {"role": "assistant", "content": [{"type": "text", "text": written}]}]
    answer = scene.ask([*messages, user("Say more.")], stop=["</code>"])
    assert scene.prompts() == {"first_turn": 1, "extended": 1}
    first, second = scene.seen()
    text = scene.gateway.renderer.decode
    assert text(second.prompt).startswith(f"{text(first.prompt)}{written}<|im_end|>\n")
    # The next request has both, and is known by what was recorded.
    scene.ask([*messages, user("Say more."), answer, user("Talk plainly.")], stop=["</code>"])
    assert scene.prompts() == {"first_turn": 1, "extended": 2}


def test_a_history_is_compacted(scene: Scene) -> None:
    messages = [SYSTEM, user("And then?")]
    messages.append(scene.ask(messages))
    summary = scene.ask([*messages, user("Compress.")])
    compacted = [SYSTEM, user(f"Before: {summary['content']}. Say more.")]
    compacted.append(scene.ask(compacted))
    scene.ask([*compacted, user("And then?")])
    assert scene.prompts() == {"first_turn": 1, "extended": 2, "new_conversation": 1}
    scene.check_extends(1, 0)
    scene.check_extends(3, 2)
    scene.finish(trained=2)


def test_tools_change_between_turns(scene: Scene) -> None:
    answer = scene.ask([user("And then?")], tools=TOOLS)
    messages = [user("And then?"), answer, user("Say more.")]
    messages.append(scene.ask(messages, tools=TOOLS[:1]))
    scene.ask([*messages, user("And then?")], tools=TOOLS[:1])
    assert scene.prompts() == {"first_turn": 1, "tools_changed": 1, "extended": 1}
    scene.check_extends(2, 1)
    scene.finish(trained=2)


def test_sub_agents_take_turns_on_one_url(scene: Scene) -> None:
    conversations = [[{"role": "system", "content": name}, user("And then?")] for name in ("a", "b", "c")]
    for _ in range(3):
        for messages in conversations:
            messages += [scene.ask(messages), user("Say more.")]
    assert scene.prompts() == {"first_turn": 1, "new_conversation": 2, "extended": 6}
    for later in range(3, 9):
        scene.check_extends(later, later - 3)
    scene.finish(trained=3)


@pytest.mark.parametrize("named", [False, True])
def test_branches_at_a_time_from_one_prefix(scene: Scene, named: bool) -> None:
    root = [SYSTEM, user("And then?")]
    headers = {"x_session_id": "seat"} if named else {}
    root.append(scene.ask(root, headers=headers))
    questions = [f"{n}. Say more." for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(scene.ask, [*root, user(question)], headers=headers) for question in questions]
        branches = [future.result() for future in asked]
    for later in range(1, 7):
        scene.check_extends(later, 0)
    # Each goes on by itself, the last first.
    for question, answer in reversed(list(zip(questions, branches, strict=True))):
        scene.ask([*root, user(question), answer, user("Compress.")], headers=headers)
    assert scene.prompts() == {"first_turn": 1, "extended": 12}
    scene.finish(trained=6)


def test_an_answer_that_was_cut_is_closed(scene: Scene) -> None:
    answer = scene.send({"messages": [user("Say more.")], "max_tokens": 4}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    scene.ask([user("Say more."), choice["message"], user("And then?")])
    scene.check_extends(1, 0, closed=False)
    assert scene.prompts() == {"first_turn": 1, "extended": 1}
    scene.finish(trained=1)


SLOW = pytest.mark.parametrize("flags", [("--step-latency-ms", "30")])


def running(scene: Scene) -> int:
    [engine] = scene.gateway.orchestrator.status()["engines"]
    return int(engine["running"])


@SLOW
def test_an_aborted_turn_leaves_nothing_behind(scene: Scene) -> None:
    given = {"authorization": f"Bearer {scene.rollouts[0]['api_key']}"}
    url = f"{scene.rollouts[0]['base_url']}/chat/completions"
    body = {"messages": [user("Say more.")], "stream": True}
    with httpx.stream("POST", url, json=body, headers=given, timeout=PATIENCE_S) as answer:
        assert "data" in next(answer.iter_text())
    wait_until(lambda: running(scene) == 0, "the engine's request ends")
    assert scene.seen() == []
    answer_ = scene.ask([user("Say more.")])
    scene.ask([user("Say more."), answer_, user("And then?")])
    assert scene.prompts() == {"first_turn": 1, "extended": 1}
    scene.finish(trained=1)


@SLOW
@pytest.mark.parametrize("how", ["marked", "keyed"])
def test_retries_in_flight_and_after_are_sampled_once(scene: Scene, how: str) -> None:
    headers = {"idempotency_key": "one"} if how == "keyed" else {"x_stainless_retry_count": "1"}
    first = {**headers, "x_stainless_retry_count": "0"}
    messages = [user("Say more.")]
    with ThreadPoolExecutor(3) as pool:
        begun = pool.submit(scene.ask, messages, headers=first)
        # Or has ended, on a busy machine: then the others come after it.
        wait_until(lambda: running(scene) == 1 or begun.done(), "the request runs")
        again = [pool.submit(scene.ask, messages, headers=headers) for _ in range(2)]
        answers = [future.result() for future in [begun, *again]]
    answers.append(scene.ask(messages, headers=headers))
    assert all(answer == answers[0] for answer in answers)
    assert len(scene.seen()) == 1
    scene.ask([*messages, answers[0], user("And then?")])
    scene.check_extends(1, 0)
    scene.finish(trained=1)


def test_honest_repeats_are_turns_of_their_own(scene: Scene) -> None:
    messages = [user("Anything.")]
    ids = [scene.send({"messages": messages, "max_tokens": 20}).json()["id"] for _ in range(3)]
    assert len(set(ids)) == 3
    said = [tuple(answer.token_ids) for answer in scene.seen()]
    assert len(set(said)) == 3
    retry = scene.send({"messages": messages, "max_tokens": 20}, x_stainless_retry_count="1")
    assert retry.json()["id"] == ids[2]
    scene.finish(trained=3)


def test_requests_out_of_order(scene: Scene) -> None:
    """A turn is gone on from after later ones were."""
    trail = [SYSTEM, user("And then?")]
    for question in ("Say more.", "Compress.", "And then?"):
        trail += [scene.ask(trail), user(question)]
    scene.ask([*trail[:3], user("Talk plainly.")])
    scene.ask([*trail[:5], user("Talk plainly.")])
    scene.ask(trail)
    assert scene.prompts() == {"first_turn": 1, "extended": 5}
    for later, earlier in [(1, 0), (2, 1), (3, 0), (4, 1), (5, 2)]:
        scene.check_extends(later, earlier)
    scene.finish(trained=3)


def test_several_conversations_on_one_url(scene: Scene) -> None:
    """The same words in each; what one sampled is not taken for the other's."""
    sessions = [{"x_session_id": name} for name in ("left", "right")]
    conversations = [[user("And then?")] for _ in sessions]
    for _ in range(3):
        for headers, messages in zip(sessions, conversations, strict=True):
            messages += [scene.ask(messages, headers=headers), user("Say more.")]
    assert scene.prompts() == {"first_turn": 2, "extended": 4}
    for later in range(2, 6):
        scene.check_extends(later, later - 2)
    scene.finish(trained=2)


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}], "absent"])
def test_an_empty_answer(scene: Scene, content: Any) -> None:
    answer = scene.ask([user("Say nothing.")])
    assert not answer["content"]
    answer["content"] = content
    if content == "absent":
        del answer["content"]
    scene.ask([user("Say nothing."), answer, user("Say more.")])
    scene.check_extends(1, 0)
    scene.finish(trained=1)


def test_half_a_character_is_refused_and_the_conversation_goes_on(scene: Scene) -> None:
    broken = b'{"messages": [{"role": "user", "content": "half \\ud83d"}]}'
    refused = scene.send(broken)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    invalid = scene.send(b'{"messages": [{"role": "user", "content": "\xff"}]}')
    assert invalid.status_code == 400
    messages = [user("nul \x00 and \x7f, \u2028, \ufeff, e\u0301. And then?")]
    messages.append(scene.ask(messages))
    scene.ask([*messages, user("Say more.")])
    scene.check_extends(1, 0)
    scene.finish(trained=1)


def test_bytes_that_are_no_characters(scene: Scene) -> None:
    """Sampled at random: nearly every answer has some, and the client gets and sends back what stands for them."""
    messages = [user("Anything.")]
    for turn in range(6):
        answer = scene.ask(messages, max_tokens=30)
        messages += [answer, user(f"{turn}")]
        if turn:
            scene.check_extends(turn, turn - 1, closed=scene.seen()[turn - 1].token_ids[-1] == scene.stop)
    assert any("\ufffd" in str(message["content"]) for message in messages)
    assert scene.prompts() == {"first_turn": 1, "extended": 5}
    scene.finish(trained=1)


@SLOW
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses", "completions"])
def test_characters_that_are_split_over_tokens(scene: Scene, path: str) -> None:
    """No event of a stream holds a part of one."""
    words = "Zürich 🚆 – ¡vámonos! 漢字"
    prompt = "<|im_start|>user\nTalk plainly.<|im_end|>\n<|im_start|>assistant\n"
    body: dict[str, Any] = {"stream": True} | {
        "chat/completions": {"messages": [user("Talk plainly.")]},
        "messages": {"messages": [user("Talk plainly.")], "max_tokens": 100},
        "responses": {"input": "Talk plainly."},
        "completions": {"prompt": prompt},
    }[path]
    text = scene.send(body, path).text
    pieces = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", []):
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            delta = event.get("delta")
            if event.get("type") in ("response.output_text.delta", "content_block_delta"):
                pieces.append(delta if isinstance(delta, str) else delta.get("text", ""))
    assert "".join(pieces) == words
    assert "\ufffd" not in text
    assert len([piece for piece in pieces if piece]) > 5
    scene.finish(trained=1)


def test_a_developers_message(scene: Scene) -> None:
    """Qwen's template writes any role; one that is misspelt is not sampled from."""
    developer = {"role": "developer", "content": "Be brief."}
    messages = [developer, user("And then?")]
    messages.append(scene.ask(messages))
    scene.ask([*messages, user("Say more.")])
    assert "Be brief." in scene.gateway.renderer.decode(scene.seen()[0].prompt)
    scene.check_extends(1, 0)
    refused = scene.send({"messages": [user("a"), {"role": "asistant", "content": "b"}, user("c")]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].role"
    scene.finish(trained=1)
