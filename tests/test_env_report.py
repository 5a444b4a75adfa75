"""A rollout's report comes to the orchestrator, whatever its environment put into it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from primerl.envs import rollouts
from primerl.envs.interface import failure, is_overflow, numbers, sendable
from primerl.envs.listing import listing_of

HALF = "half \ud800 pair"
SHOWN = "half \\ud800 pair"


class Client:
    """Takes what can be sent, as UTF-8 and without what JSON has no word for."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, Any]] = []

    def report(self, rollout: int, outcome: Any) -> None:
        json.dumps(outcome, ensure_ascii=False, allow_nan=False).encode()
        self.reported.append((rollout, outcome))


@pytest.fixture
def client() -> Client:
    return Client()


def report(client: Client, outcome: dict[str, Any]) -> Any:
    lease: Any = SimpleNamespace(rollout=7, group=2, example=1)
    rollouts.Rollouts(client, [], SimpleNamespace())._report(lease, outcome)  # type: ignore[arg-type]
    ((rollout, reported),) = client.reported
    assert rollout == 7
    return reported


def test_half_of_a_surrogate_pair_loses_no_report(client: Client) -> None:
    trace = {"session": "t", "seat": HALF, "metrics": {HALF: 1.0}, "reward": 0.5}
    outcome = {"ok": True, "traces": [trace], "error": failure("environment", HALF)["error"]}
    reported = report(client, outcome)
    assert reported["traces"] == [{"session": "t", "seat": SHOWN, "metrics": {SHOWN: 1.0}, "reward": 0.5}]
    assert reported["error"]["message"] == SHOWN


def test_a_report_that_cannot_be_sent_is_a_failure_of_its_rollout(client: Client) -> None:
    reported = report(client, {"ok": True, "traces": [{"reward": object()}], "error": None})
    assert not reported["ok"]
    assert reported["error"]["kind"] == "environment"
    assert "its report cannot be sent: TypeError" in reported["error"]["message"]


def test_what_has_a_form_in_utf_8_is_sent_as_it_is() -> None:
    text = "日本語 😀 é \u0000 plain"
    assert sendable({"a": [text, 1, None, 2.5], text: (True,)}) == {"a": [text, 1, None, 2.5], text: [True]}


def test_an_example_with_half_of_a_pair_is_listed() -> None:
    listing = listing_of("reverse-text", ["a", "b"], lambda example: HALF + example)
    assert (listing["first"], listing["last"]) == (SHOWN + "a", SHOWN + "b")


def test_a_dictionary_of_metrics_is_several() -> None:
    measured = numbers({"plain": True, "several": {"x": 1, "word": "no", "inner": {"y": 2.5}}, "none": None})
    assert measured == {"plain": 1.0, "several/x": 1.0, "several/inner/y": 2.5}


def test_a_full_context_is_known_by_its_code_and_by_words_of_others() -> None:
    for answer in (
        '{"error": {"code": "context_length_exceeded", "message": "x"}}',
        "This model's maximum context length is 64 tokens",
    ):
        assert is_overflow(400, answer)
        assert not is_overflow(500, answer)
    for answer in ("", "[1]", '{"error": "no"}', "[" * 100_000):
        assert not is_overflow(400, answer)
