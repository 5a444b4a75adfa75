"""`primerl eval`: an endpoint or a checkpoint on environments, apart from training."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from certificates import Authority
from docs_pages import page_of, shown
from end_to_end import measured, read_lines, until
from eval_endpoint import KEY, Endpoint, command, config, evaluate, of_endpoint, run_with_key, serving
from primerl._core import PageServer, inspect_run
from primerl.cli.evaluation_arguments import written_out
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import run_file
from primerl.config.process_files.evaluation import model_name, orchestrator
from primerl.config.schema.evaluation import EvalConfig
from primerl.evals import endpoint, results
from primerl.evals.preflight import same_evaluation
from primerl.forking import servers
from primerl.launch.evaluation import Evaluation
from primerl.launch.placement.protocol import Process
from primerl.launch.supervise.watching import Interrupted
from primerl.models.tiny import TinyConfig, write_model
from primerl.process.redaction import MARK
from primerl.runs.registry import Registry
from primerl.runs.standing import standing


def test_names_and_short_flags_stand_for_the_long_ones() -> None:
    given = written_out(["one", "owner/two", "-m", "x", "-n", "3", "-k", "2", "-o", "out"])
    loaded = load(EvalConfig, given, program="primerl eval")
    assert [entry.id for entry in loaded.env] == ["one", "owner/two"]
    assert (loaded.model, loaded.num_examples, loaded.rollouts_per_example, loaded.output_dir) == ("x", 3, 2, "out")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"env": []}, "at least 1 item"),
        ({"base_url": "nowhere"}, "base_url is no URL"),
        ({"base_url": "ftp://host/v1"}, "base_url is no URL"),
        ({"base_url": "http://u:p@h/v1"}, "has a user"),
        ({"base_url": None, "api_key_env": "KEY"}, "api_key_env is the key of an endpoint"),
        ({"api_key_env": "sk-123"}, "pattern"),
        ({"inference": {"threads": 2}}, "inference is of a checkpoint"),
        ({"seq_len": 4096}, "seq_len is of a checkpoint"),
        ({"base_url": None, "seq_len": 512}, "max_tokens (512) must be below seq_len (512)"),
        ({"base_url": None, "inference": {"replicas": 0}}, "base_url names no endpoint"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"env": [{"id": "a"}, {"id": "a"}]}, "two environments are called 'a'"),
        ({"env": [{"id": "a", "num_workers": 0}]}, "no worker would run its rollouts"),
        ({"num_examples": -1}, "greater than 0"),
        ({"dry_run": True, "clean_output_dir": True}, "a dry run deletes nothing"),
        ({"pass_threshold": float("inf")}, "finite number"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        config(**values)
    assert said in str(refused.value)


def test_settings_of_an_environment_come_before_those_of_the_whole() -> None:
    given = config(
        num_examples=9,
        max_tokens=5,
        temperature=0.5,
        pass_threshold=0.5,
        env=[{"id": "a"}, {"id": "b", "num_examples": 2, "max_tokens": 7, "pass_threshold": 0.9}],
    )
    first, second = orchestrator(given).config.model_dump()["eval"]["env"]
    assert (first["num_examples"], first["sampling"]["max_tokens"]) == (9, 5)
    assert (second["num_examples"], second["sampling"]["max_tokens"]) == (2, 7)
    assert first["sampling"]["temperature"] == second["sampling"]["temperature"] == 0.5
    assert (first["pass_threshold"], second["pass_threshold"]) == (0.5, 0.9)
    assert model_name(config(model="org/a model:free")) == "org-a-model-free"


def test_another_evaluation_in_the_folder_is_named_by_its_field(tmp_path: Path) -> None:
    begun = config(output_dir=str(tmp_path), env=[{"id": "a"}, {"id": "b", "taskset": {"split": "x"}}])
    run_file.write(begun)
    same_evaluation(begun)
    workers = [{"id": "a", "num_workers": 3}, {"id": "b", "taskset": {"split": "x"}}]
    same_evaluation(config(output_dir=str(tmp_path), env=workers, timeouts={"rollout_s": 5}, api_key_env="OTHER"))
    for changed, said in [
        ({"temperature": 0.5}, "temperature is 0.5, but the evaluation in"),
        ({"base_url": "http://e:2/v1"}, "base_url is 'http://e:2/v1'"),
        ({"num_examples": 3}, "num_examples is 3, but"),
        ({"env": [{"id": "a"}, {"id": "b"}]}, "env[1].taskset"),
    ]:
        with pytest.raises(ConfigError) as refused:
            same_evaluation(config(**{"output_dir": str(tmp_path), "env": begun.model_dump()["env"], **changed}))
        assert said in str(refused.value)


def test_a_lost_fork_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_current", SimpleNamespace(lost=lambda: ["torch"]))
    said: list[str] = []
    console: Any = SimpleNamespace(say=said.append)
    orchestrator = Process("orchestrator", tmp_path / "log")
    placement: Any = SimpleNamespace(watch=lambda _: [], lost=None, by_name={"orchestrator": orchestrator})
    evaluation = Evaluation(config(output_dir=str(tmp_path)), tmp_path, console, {}, placement)

    def interrupted(_: float) -> None:
        raise Interrupted

    monkeypatch.setattr(evaluation, "_look", interrupted)
    with pytest.raises(Interrupted):
        evaluation._watch()
    assert said == ["the fork server of torch has ended; its processes continue, and new ones start without it"]


def test_an_endpoint_is_asked_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_TEST_KEY", KEY)

    def said(url: str, **values: Any) -> str:
        client = config(base_url=url, model="served", **values).client()
        assert client is not None
        with pytest.raises(ConfigError) as refused:
            endpoint.check(client)
        return str(refused.value)

    keyed = {"api_key_env": "PRIMERL_TEST_KEY"}
    with serving(Endpoint()) as served:
        client = config(base_url=served.url, model="served", **keyed).client()
        other = config(base_url=served.url, model="another", **keyed).client()
        assert client is not None
        assert other is not None
        assert endpoint.check(client) is None
        assert "does not list a model 'another'; it lists served" in (endpoint.check(other) or "")
        assert "wants a key (status 401" in said(served.url)
        monkeypatch.setenv("PRIMERL_TEST_KEY", "sk-another")
        refusal = said(served.url, **keyed)
        assert "refuses the key of PRIMERL_TEST_KEY" in refusal
        assert "sk-another" not in refusal
        assert MARK in refusal
        monkeypatch.delenv("PRIMERL_TEST_KEY")
        assert "PRIMERL_TEST_KEY is not set" in said(served.url, **keyed)
    assert "no answer from" in said(served.url)
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "has not answered for" in said(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")


def test_an_endpoint_that_cannot_be_trusted_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_TEST_KEY", KEY)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    authority = Authority(tmp_path)

    def said(url: str) -> str:
        client = config(base_url=url, model="served", api_key_env="PRIMERL_TEST_KEY").client()
        assert client is not None
        with pytest.raises(ConfigError) as refused:
            endpoint.check(client)
        assert KEY not in str(refused.value)
        assert refused.value.keys == ("base_url",)
        return str(refused.value)

    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with serving(Endpoint(), authority.server(name="elsewhere.org")) as served:
        refusal = said(served.url)
        assert f"no answer from {served.url}" in refusal
        assert "only valid for" in refusal
        assert "subjectAltName" in refusal
    with serving(Endpoint(), authority.server(expired=True)) as served:
        assert "expired" in said(served.url)
    with serving(Endpoint(), authority.server()) as served:
        assert "need https:// instead of http://" in said(served.url.replace("https", "http"))
        other = tmp_path / "other"
        other.mkdir()
        monkeypatch.setenv("SSL_CERT_FILE", str(Authority(other).file))
        assert f"none of the authorities in SSL_CERT_FILE ({other / 'authority.pem'}) has signed it" in said(served.url)
        for unusable in (tmp_path / "absent.pem", Path(__file__)):
            monkeypatch.setenv("SSL_CERT_FILE", str(unusable))
            refusal = said(served.url)
            assert refusal.startswith(f"base_url: `{served.url}` is https, and no certificates")
            assert f"SSL_CERT_FILE ({unusable})" in refusal
    with serving(Endpoint()) as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert "need http:// instead of https://" in said(served.url.replace("http", "https"))


def summary_of(lines: list[dict[str, Any]], scores: dict[str, float] | None) -> dict[str, Any]:
    tally = results.Tally()
    for line in lines:
        tally.count(line)
    return tally.summary(scores)


class Rollout(dict[str, Any]):
    """One that says when nobody holds it any more."""

    held: ClassVar[int] = 0

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        Rollout.held += 1
        weakref.finalize(self, self.let_go)

    @staticmethod
    def let_go() -> None:
        Rollout.held -= 1


def test_what_was_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def rollouts(_: Path) -> Iterator[Rollout]:
        nonlocal most
        turn = {"session": "s", "parent": None, "finish": "stop", "message": '{"content": "yes"}'}
        turns = [{**turn, "prompt_tokens": 3, "completion_tokens": 5}] * 2
        for number in range(20):
            error = {"kind": "timeout", "message": "late"} if number == 7 else None
            yield Rollout(
                environment="ab"[number // 10],
                example=number,
                slot=0,
                rollout=number,
                turns=turns,
                reward=None if error else 1.0,
                metrics={} if error else {"exact": number},
                error=error,
                error_kind=error and error["kind"],
                attempts_before=0,
                truncated=number == 3,
                stop_condition=None,
                leased_s=1.0,
                ended_s=2.5,
            )
            most = max(most, Rollout.held)

    monkeypatch.setattr(results, "evaluated_rollouts", rollouts)
    monkeypatch.setattr(results, "holds_run", lambda _: True)
    told = results.write(tmp_path, ["a", "b", "c"], {"model": "m"}, None)["environments"]
    assert most <= 2, "the one that is written, and the next"
    lines = read_lines(tmp_path / results.RESULTS)
    assert [line["example"] for line in lines] == list(range(20))
    assert lines[7]["error"] == "timeout"
    assert (told["a"]["rollouts"], told["a"]["measured"], told["a"]["errors"]) == (10, 9, {"timeout": 1})
    assert told["a"]["metrics"] == {"exact": (45 - 7) / 9}
    assert (told["a"]["examples"], told["a"]["truncated"]) == (10, 1)
    assert (told["b"]["prompt_tokens"], told["b"]["completion_tokens"], told["b"]["turns"]) == (6.0, 10.0, 2.0)
    assert (told["c"]["rollouts"], told["c"]["metrics"], told["c"]["turns"]) == (0, {}, None)
    assert results.errors_of(tmp_path) == "timeout: late"


def test_the_table_has_scores_in_order_and_what_failed() -> None:
    lines = [
        {"environment": "a", "example": i, "error": None, "metrics": {"exact": 1.0}, "prompt_tokens": 3, "turns": 1}
        | {"completion_tokens": 4, "truncated": False}
        for i in range(2)
    ]
    failed = {**lines[0], "error": "timeout", "metrics": {}}
    scores = {"pass@1": 0.75, "avg@2": 0.75, "avg@2/low": 0.5, "avg@2/high": 1.0}
    summary = {"environments": {"a": summary_of([*lines, failed], scores)}}
    shown = results.table(summary).splitlines()
    assert shown[2].split() == ["a", "avg@2", "0.750", "0.500", "to", "1.000", "3", "1", "timeout", "4.0"]
    assert shown[3].split() == ["pass@1", "0.750", "-"]
    assert results.is_measured(summary)
    assert not results.is_measured({"environments": {"a": summary_of([failed], None)}})


@pytest.mark.processes
def test_an_endpoint_is_measured_and_what_is_measured_survives_kill_9(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with serving(Endpoint(answers=2)) as served:
        variables = {**os.environ, "PRIMERL_TEST_KEY": KEY}
        arguments = command(output, *of_endpoint(served), "-k", "2", "--concurrency", "3")
        first = subprocess.Popen(arguments, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            until(lambda: measured(output) == 2, 120, "two rollouts")
        finally:
            first.send_signal(signal.SIGKILL)
            first.communicate()
        with Registry() as registry:
            (run,) = [run for run in registry.all() if run.output_dir == output]
        assert (run.kind, run.model, run.environments, standing(run).status) == (
            "eval",
            "served",
            ["reverse-text"],
            "FAILED",
        )
        done = inspect_run(output, "evaluated")["rollouts"]
        before = len(served.asked)
        served.open.set()
        again = evaluate(output, *of_endpoint(served), "-k", "2", "--concurrency", "3")
        assert again.returncode == 0, again.stdout + again.stderr
        assert "resuming the evaluation" in again.stdout
        # Its env worker had ended with the first launcher.
        assert "sent nothing for" not in (output / "logs" / "orchestrator.log").read_text()
        lines = read_lines(output / results.RESULTS)
        places = [(line["example"], line["number"]) for line in lines]
        assert sorted(places) == [(example, number) for example in range(4) for number in range(2)]
        assert [line["reward"] for line in lines] == [1.0] * 8
        assert {rollout["rollout"] for rollout in done} <= {line["rollout"] for line in lines}
        # What was in flight is asked for again, what was measured is not.
        assert len(served.asked) - before == 8 - len(done)
        assert lines[0]["messages"][0]["answer"]["content"]
        assert lines[0]["completion_tokens"] == 5
        summary = json.loads((output / results.SUMMARY).read_text())
        assert summary["environments"]["reverse-text"]["scores"]["pass@2"] == 1.0
        asked = len(served.asked)
    # The server is gone, and there is nothing to ask it.
    once_more = evaluate(output, *of_endpoint(served), "-k", "2", "--concurrency", "3")
    assert once_more.returncode == 0
    assert "pass@2  1.000" in once_more.stdout
    assert len(served.asked) == asked
    # A report that was lost between the journal and its file is written by the next start.
    (output / results.EVALS).unlink()
    resume = [sys.executable, "-m", "primerl", "run", "resume", run.id]
    mended = subprocess.run(resume, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert mended.returncode == 0
    assert "pass@2  1.000" in mended.stdout
    with Registry() as registry:
        assert standing(registry.find(run.id)).status == "COMPLETED", "under the id that it had"
    assert not [path for path in output.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.processes
def test_an_endpoint_is_measured_over_https_if_its_authority_is_trusted(tmp_path: Path) -> None:
    output, authority = tmp_path / "out", Authority(tmp_path)
    with serving(Endpoint(), authority.server()) as served:
        refused = evaluate(output, *of_endpoint(served))
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert f"no answer from {served.url}" in refused.stderr or "no certificates of authorities" in refused.stderr
        assert "SSL_CERT_FILE" in refused.stderr
        assert KEY not in refused.stdout + refused.stderr
        assert served.asked == []
        done = evaluate(output, *of_endpoint(served), trusted=authority.file)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [line["reward"] for line in read_lines(output / results.RESULTS)] == [1.0] * 4


@pytest.mark.processes
@pytest.mark.timeout(900)  # each imports verifiers
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny", TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16))
    [config] = [block.text for block in page_of("docs/evals.md").blocks if block.file == "eval.toml"]
    Path("eval.toml").write_text(config)
    with serving(Endpoint()) as served:
        checkpoint, asked, of_file, again = shown(
            __file__,
            "docs/evals.md",
            {
                "outputs/rl/weights/step_100": "tiny",
                "outputs/rl/weights/step_200": "tiny",
                "my-model": "served",
                "http://127.0.0.1:8000/v1": served.url,
                "MY_KEY": "PRIMERL_TEST_KEY",
                # So many examples, rollouts and tokens are enough.
                "64": "3",
                "4": "2",
                "1024": "16",
            },
        )
        few = ["--num-examples", "2", "--env.1.num-examples", "1"]
        for words, more, output, rollouts in (
            (asked, ["-o", "of-endpoint"], "of-endpoint", 3),
            # Nothing has failed: nothing is measured again.
            (again, ["-o", "of-endpoint"], "of-endpoint", 3),
            (checkpoint, ["-o", "of-checkpoint", "--max-tokens", "16"], "of-checkpoint", 6),
            # Of the file, four rollouts of three examples.
            (of_file, [*few, "--max-tokens", "16"], "outputs/eval-step-200", 12),
        ):
            done = run_with_key([sys.executable, "-m", *words, *more])
            assert done.returncode == 0, done.stdout + done.stderr
            assert len(read_lines(Path(output) / results.RESULTS)) == rollouts
        assert len(served.asked) == 3


@pytest.mark.processes
def test_a_checkpoint_is_served_and_measured(tmp_path: Path) -> None:
    model, output = tmp_path / "tiny", tmp_path / "out"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    done = evaluate(output, "--model", str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(output / results.RESULTS)
    assert [line["example"] for line in lines] == [0, 1, 2, 3]
    prompt = lines[0]["messages"][0]["prompt"]
    assert prompt.startswith("<|im_start|>user\nReverse: ")
    assert lines[0]["completion_tokens"] == 16
    manifest = json.loads((output / "broadcasts" / "step_0" / "manifest.json").read_text())
    assert manifest["policy_version"] == 0
    assert "lm_head.weight" not in {entry["name"] for entry in manifest["tensors"]}
    server = PageServer(output, model)
    try:
        now = httpx.get(f"{server.url}/page/now", timeout=60).json()
    finally:
        server.stop()
    assert now["only_evaluates"]
