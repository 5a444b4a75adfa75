"""Classic environments (verifiers < 0.4), in the interpreter that has them: rollouts, groups, what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import classic_helpers
import pytest
from aiohttp import web
from env_orchestrator import Chat, Orchestrator, completion
from primerl.envs.generations import choice
from primerl.envs.interface import EnvironmentRefusedError

pytestmark = pytest.mark.processes
# Long enough for a loaded machine to import verifiers.
START_S = 180.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of every scenario of the driver, in one process."""
    driver = Path(__file__).parent / "classic_driver.py"
    done = classic_helpers.run(tmp_path_factory.mktemp("classic"), str(driver))
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"single"')))
    # verifiers tears everything down at the exit of the process: what the worker has torn down, not again.
    assert done.stdout.count("torn down") == 1
    return result


def test_a_single_turn_is_asked_of_the_rollouts_own_gateway(found: dict[str, Any]) -> None:
    (asked,) = found["single"]["asked"]
    assert asked["url"] == "http://h/rollouts/1/v1/chat/completions"
    assert asked["key"] == "k1"
    assert asked["body"] == {
        "model": "policy",
        "messages": [{"role": "user", "content": "train 4"}],
        "temperature": 1.0,
        "max_tokens": 8,
        "top_k": 5,
    }
    outcome = found["single"]["outcome"]
    assert outcome["ok"]
    assert outcome["error"] is None
    assert outcome["traces"] == [
        {
            "session": asked["session"],
            "trainable": True,
            "ok": True,
            "reward": 2.5,
            "metrics": {"words": 2.0, "half": 0.5, "num_turns": 1.0},
            "stop_condition": "max_turns_reached",
            "truncated": False,
        }
    ]


def test_turns_and_tools_extend_one_conversation(found: dict[str, Any]) -> None:
    for name, turns, stop in [("dialogue", 3, "heard_enough"), ("tool", 2, "no_tools_called")]:
        asked, outcome = found[name]["asked"], found[name]["outcome"]
        assert len(asked) == turns
        for earlier, later in itertools.pairwise(asked):
            before, after = earlier["body"]["messages"], later["body"]["messages"]
            assert after[: len(before)] == before
            assert later["session"] == earlier["session"] == outcome["traces"][0]["session"]
        assert outcome["ok"]
        assert outcome["traces"][0]["stop_condition"] == stop
    first, second = (asked["body"] for asked in found["tool"]["asked"])
    assert first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "t1", "content": "5"}
    # Nulls of the SDK's classes are no part of the conversation.
    assert set(second["messages"][1]) == {"role", "tool_calls"}


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("reward_raises", "environment", "raises: ZeroDivisionError: this reward cannot be computed"),
        ("reward_is_none", "environment", "says_nothing: TypeError"),
        ("reward_is_nan", "environment", "not a finite number"),
        ("engine_fails", "engine", "upstream 503"),
        ("empty_answer", "model", "EmptyModelResponseError"),
    ],
)
def test_what_fails_is_an_error_and_never_a_silent_zero(
    found: dict[str, Any], scenario: str, kind: str, words: str
) -> None:
    outcome = found[scenario]["outcome"]
    assert not outcome["ok"]
    assert not outcome["traces"][0]["ok"]
    assert outcome["error"]["kind"] == kind
    assert words in outcome["error"]["message"]


def test_a_metric_may_be_several_numbers_and_fails_nothing(found: dict[str, Any]) -> None:
    outcome = found["measures"]["outcome"]
    assert outcome["ok"], outcome["error"]
    assert outcome["traces"][0]["reward"] == 0.5
    measured = {"half": 0.5, "several/x": 1.0, "several/inner/y": 2.5, "num_turns": 1.0}
    assert outcome["traces"][0]["metrics"] == measured
    outcomes = found["group_measures"]["outcomes"]
    assert [outcome["traces"][0]["metrics"]["several_each/place"] for outcome in outcomes] == [0.0, 1.0, 2.0]
    assert all("several_each" not in outcome["traces"][0]["metrics"] for outcome in outcomes)


def test_a_prompt_that_is_too_long_ends_the_rollout_in_order(found: dict[str, Any]) -> None:
    outcome = found["overflow"]["outcome"]
    assert outcome["ok"]
    trace = outcome["traces"][0]
    assert (trace["stop_condition"], trace["truncated"], trace["metrics"]["num_turns"]) == ("prompt_too_long", True, 0)


def test_a_group_is_run_and_scored_together(found: dict[str, Any]) -> None:
    outcomes, asked = found["group"]["outcomes"], found["group"]["asked"]
    # The longest of the three answers wins.
    assert [outcome["traces"][0]["reward"] for outcome in outcomes] == [0.5, 0.5, 1.5]
    assert {(call["url"], call["key"]) for call in asked} == {
        (f"http://h/rollouts/{number}/v1/chat/completions", f"k{number}") for number in range(3)
    }
    assert len({call["session"] for call in asked}) == 3


def test_a_group_reward_that_fails_fails_all_of_it(found: dict[str, Any]) -> None:
    for outcome in found["group_reward_is_short"]["outcomes"]:
        assert not outcome["ok"]
        assert "1 scores for 3 rollouts" in outcome["error"]["message"]
    # The others of a group were waiting for the model when the first one raised.
    assert found["group_raises"] == {"raised": "the world is not there", "hung_up": 2, "asked": 2}


def test_a_cancelled_rollout_hangs_up(found: dict[str, Any]) -> None:
    assert found["cancelled"] == {"cancelled": True, "hung_up": 1, "left": 0}


def test_training_and_evaluation_have_their_own_examples_in_the_seeds_order(found: dict[str, Any]) -> None:
    splits = found["splits"]
    assert sorted(splits["a"]) == sorted(splits["b"]) == [f"train {number}" for number in range(6)]
    assert splits["a"] == splits["again"] != splits["b"]
    assert sorted(splits["eval"]) == [f"eval {number}" for number in range(4)]
    assert splits["fallback"] == splits["a"]
    *silent, said = splits["remarks"]
    assert silent == [None, None, None]
    assert "no evaluation split of its own" in said


def test_signal_handlers_stay_ours_and_teardown_happens_once(found: dict[str, Any]) -> None:
    assert found["teardown"] == {"times": 1, "handler_is_kept": True}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("group_of_one", "group_size is 1; raise it to 2 or more"),
        ("evaluated_once", "rollouts_per_example is 1; raise it to 2 or more"),
        ("group_too_large", "group_size (4) is above max_concurrent (3), and one worker runs all"),
        ("missing", "No module named 'no_such_environment'; install its package"),
        ("argument", "unexpected keyword argument 'colour'"),
        ("secret", "NO_SUCH_SECRET; set them by `primerl env secret set`"),
        ("v1", "is a v1 environment (its module has a taskset) and needs verifiers>=0.4,<0.5, but"),
        ("no_environment", "has neither a function `load_environment` nor a v1 taskset"),
    ],
)
def test_a_check_says_what_is_wrong(found: dict[str, Any], what: str, words: str) -> None:
    assert words in found["refusals"][what]


def test_a_check_finds_nothing_wrong_with_what_can_be_used(found: dict[str, Any]) -> None:
    assert found["refusals"]["fine"] is None
    assert "no evaluation split" in found["refusals"]["remark"]


def test_a_group_of_environments_is_one(found: dict[str, Any]) -> None:
    # Six examples of a single turn, and six of three.
    stops = ["heard_enough"] * 6 + ["max_turns_reached"] * 6
    assert found["env_group"] == {"stops": stops, "asked": 6 * 1 + 6 * 3}


def test_a_worker_brings_nothing_but_the_files_that_it_needs(found: dict[str, Any]) -> None:
    imports = found["imports"]
    assert "/package/primerl/envs/" in imports["file"]
    assert not imports["torch"]
    small = {
        "",
        "._core",
        ".forking",
        ".forking.exit_status",
        ".forking.request",
        ".launch",
        ".launch.supervise",
        ".launch.supervise.guard",
        ".launch.supervise.guard_watch",
        ".launch.supervise.guarded_forks",
        ".launch.supervise.log_filter",
        ".launch.supervise.plain_start",
        ".launch.supervise.trees",
        ".net",
        ".net.prometheus",
        ".net.requests",
        ".process",
        ".process.extras",
        ".process.import_path",
        ".process.imports",
        ".process.log_levels",
        ".process.plugins",
        ".process.problems",
        ".process.redaction",
        ".process.setting_checks",
        ".process.signals",
        ".run_key",
    }
    others = [name for name in imports["ours"] if not name.startswith("primerl.envs")]
    assert {name.removeprefix("primerl") for name in others} <= small
    v1 = {
        "primerl.envs.generations.v1",
        "primerl.envs.generations.harness",
        "primerl.envs.generations.interception",
        "primerl.envs.generations.documented",
    }
    assert not v1 & set(imports["ours"])


def test_a_classic_environment_is_told_from_the_verifiers_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(classic_helpers.ENVIRONMENTS)
    with pytest.raises(EnvironmentRefusedError) as refused:
        choice.chosen("owner/classic-trial@1.0")
    assert "is classic (`load_environment`) and needs verifiers>=0.1.14,<0.4" in str(refused.value)
    assert "a table `python`" in str(refused.value)


@pytest.mark.parametrize("version", ["0.1.13", "0.5.0", "1.0"])
def test_a_verifiers_of_neither_generation_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(EnvironmentRefusedError, match=f"verifiers {version} of .* is not supported; install"):
        choice.installed()


@pytest.fixture
def orchestrator() -> Iterator[Orchestrator]:
    with Orchestrator() as double:
        yield double


def test_the_worker_leases_whole_groups_and_gives_them_back_whole(orchestrator: Orchestrator, tmp_path: Path) -> None:
    answered: list[int] = []
    hold = asyncio.Event()

    async def longer_and_longer(chat: Chat) -> web.Response:
        answered.append(chat.rollout)
        return completion("word " * len(answered))

    async def never(chat: Chat) -> web.Response:
        await hold.wait()
        raise AssertionError

    orchestrator.reply = longer_and_longer
    group = orchestrator.add_group(4)
    settings = tmp_path / "worker.toml"
    settings.write_text(
        f'orchestrator_url = "{orchestrator.url}"\nenvironment = "trial"\nid = "classic-trial"\nmax_concurrent = 4\n'
        '[args]\nkind = "group"\n'
    )
    log = tmp_path / "worker.log"
    command = [classic_helpers.classic_python(), "-m", "primerl", "env-worker", "@", settings]
    with log.open("w") as file:
        worker = subprocess.Popen(
            command, env=classic_helpers.variables(tmp_path), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        outcomes = [orchestrator.result(rollout, START_S) for rollout in group]
        [registration] = orchestrator.registrations
        assert (registration["whole_groups"], registration["examples"]) == (True, 6)
        # The group was scored as one: exactly one answer was the longest.
        rewards = {rollout: outcome["traces"][0]["reward"] for rollout, outcome in zip(group, outcomes, strict=True)}
        assert rewards == {rollout: 1.5 if rollout == answered[-1] else 0.5 for rollout in group}
        sessions = {chat.rollout: chat.session for chat in orchestrator.chats}
        assert sessions == {rollout: one["traces"][0]["session"] for rollout, one in zip(group, outcomes, strict=True)}

        # Cancelling one of a group stops all of it, and nothing is reported.
        orchestrator.reply = never
        cancelled = orchestrator.add_group(3)
        orchestrator.wait("chats", lambda: len(orchestrator.chats) == 7, START_S)
        orchestrator.cancel(cancelled[1])
        orchestrator.wait("disconnects", lambda: sorted(orchestrator.hung_up) == cancelled)
        orchestrator.wait("heartbeat without it", lambda: orchestrator.heartbeats[-1][1]["running"] == [])

        # One that does not end within its lease fails as a whole.
        late = [orchestrator.result(rollout) for rollout in orchestrator.add_group(2, deadline_s=0.5)]
        assert [outcome["error"]["kind"] for outcome in late] == ["timeout", "timeout"]

        # Stopped while one runs: it says goodbye, although the environment had set handlers of its own.
        last = orchestrator.add_group(2)
        orchestrator.wait("chats", lambda: {chat.rollout for chat in orchestrator.chats} >= set(last))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0, log.read_text()
        assert len(orchestrator.left) == 1
        assert not {*cancelled, *last} & set(orchestrator.results)
        assert log.read_text().count("INFO primerl.envs: registered as worker") == 1
    finally:
        worker.kill()
        worker.wait()
