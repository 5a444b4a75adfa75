"""Limits of a rollout as its agent meets them: refused in words at which agents end, and reported as truncated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_helpers import Gateway, gateway
from primerl._core import Orchestrator, PrimerlError, inspect_run
from primerl.run_key import run_key_header
from test_orchestrator_in_process import PATIENCE_S, post, settings

REFUSED = {"type": "rollout_limit", "code": "context_length_exceeded"}


def limited(**limits: Any) -> dict[str, Any]:
    return {"train": {"env": [{"id": "task", "limits": limits}]}}


def ask(open_gateway: Gateway, words: str, *, session: str = "s", retry: int = 0, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": words}]
    headers = {"x-session-id": session, "x-stainless-retry-count": str(retry)}
    return open_gateway.post("chat/completions", {"model": "m", "messages": messages, **body}, **headers)


def refusal_of(answer: httpx.Response, limit: str) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert {**error, "message": ""} == {**REFUSED, "param": limit, "message": ""}
    # What verifiers, and most agents, look for.
    assert "maximum context length" in error["message"]
    return str(error["message"])


def reported(open_gateway: Gateway, *sessions: str) -> list[tuple[str | None, bool]]:
    """Of each trace that the environment reports as well ended: what the journal says of its end."""
    trace = {"trainable": True, "ok": True, "reward": 1.0, "metrics": {}, "stop_condition": "done", "truncated": False}
    outcome = {"ok": True, "traces": [{**trace, "session": session} for session in sessions], "error": None}
    rollout = open_gateway.lease["rollout"]
    body = {"worker": open_gateway.worker, "rollout": rollout, "outcome": outcome}
    assert post(f"{open_gateway.orchestrator.url}/envs/result", body)["accepted"]
    reports = inspect_run(open_gateway.output, "rollout", rollout)["reports"]
    return [(report["stop_condition"], report["truncated"]) for report in reports]


def test_turns_are_counted_over_all_conversations(tmp_path: Path, mock_binary: Path) -> None:
    with gateway(tmp_path, mock_binary, **limited(turns=3)) as open_gateway:
        first = ask(open_gateway, "one", session="a")
        assert first.status_code == 200
        refusal_of(ask(open_gateway, "two at once", session="b", n=3), "limits.turns")
        assert ask(open_gateway, "two", session="a", n=2).status_code == 200
        message = refusal_of(ask(open_gateway, "three", session="b"), "limits.turns")
        assert "has taken 3 turns, and may take 3 in all" in message
        # An answer that was given is given again.
        again = ask(open_gateway, "one", session="a", retry=1)
        assert again.json()["choices"] == first.json()["choices"]
        # In the words of the other dialects.
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "four"}]}
        answer = open_gateway.post("messages", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limits.turns")
        # Only what was refused is cut short.
        assert reported(open_gateway, "a", "b") == [("done", False), ("limit_turns", True)]


def test_an_examples_limits_are_lower_than_its_environments(tmp_path: Path, mock_binary: Path) -> None:
    with gateway(tmp_path, mock_binary, **limited(turns=2)) as open_gateway:
        url = f"{open_gateway.root_url}/limits"
        headers = run_key_header(url)
        for limits, problem in [({"turns": 0}, "limits.turns is 0"), ({"turn": 1}, "unknown field `turn`")]:
            answer = httpx.post(url, json=limits, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 400
            assert problem in answer.json()["error"]["message"]
        for wrong in ({}, {"authorization": f"Bearer {open_gateway.api_key}"}):
            assert httpx.post(url, json={"turns": 1}, headers=wrong, timeout=PATIENCE_S).status_code == 401
        for limits, counts in [
            ({"turns": 5}, {"turns": 2}),
            ({"turns": 1, "tokens": 900}, {"turns": 1, "tokens": 900}),
        ]:
            answer = httpx.post(url, json=limits, headers=headers, timeout=PATIENCE_S)
            assert (answer.status_code, answer.json()) == (200, counts)
        assert ask(open_gateway, "one").status_code == 200
        refusal_of(ask(open_gateway, "two"), "limits.turns")
        # The next rollout has its environment's again.
        open_gateway.lease = open_gateway.another_rollout()
        assert [ask(open_gateway, words).status_code for words in ("one", "two")] == [200, 200]


def test_tokens_cut_the_answer_and_refuse_the_next(tmp_path: Path, mock_binary: Path) -> None:
    answers = [("one", "a long answer that goes on and on")]
    with gateway(tmp_path, mock_binary, answers=answers, **limited(tokens=5)) as open_gateway:
        cut = ask(open_gateway, "one").json()
        assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 5)
        message = refusal_of(ask(open_gateway, "two", session="t"), "limits.tokens")
        assert "has sampled 5 tokens, and may sample 5 in all" in message
        assert reported(open_gateway, "s", "t") == [("limit_tokens", True)] * 2


def test_a_request_ends_when_the_time_is_up(tmp_path: Path, mock_binary: Path) -> None:
    """The engine answers a minute later than the test waits."""
    slow = ("--step-latency-ms", str(int(2000 * PATIENCE_S)))
    with gateway(tmp_path, mock_binary, flags=slow, **limited(time_s=0.5)) as open_gateway:
        message = refusal_of(ask(open_gateway, "one"), "limits.time_s")
        assert "has had the 0.5 s it may take in all" in message
        refusal_of(ask(open_gateway, "two"), "limits.time_s")
        # Its client names no session in the report.
        assert reported(open_gateway, "whatever") == [("limit_time", True)]


def test_limits_that_are_none_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    for limits, message in [
        ({"turns": 0}, r"train.env.task.limits.turns: is 0"),
        ({"time_s": -1.0}, r"train.env.task.limits.time_s: is -1"),
        ({"time_s": 600.0}, r"limits.time_s: is 600, .* timeouts.rollout_s = 600 .*lower it"),
        ({"seconds": 3}, "seconds"),
    ]:
        with pytest.raises(PrimerlError, match=message):
            Orchestrator(settings(model, tmp_path / "out", **limited(**limits)))
