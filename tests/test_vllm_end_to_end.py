"""Whole runs with vLLM as the engine: what is learnt, that it is token-exact, and that a killed engine comes back."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import tomli_w
from docs_pages import shown
from end_to_end import EXAMPLE, Started, column, has_learnt, launch, primerl, until
from engine_helpers import VLLM_PYTHON, need_vllm
from primerl.launch.supervise.trees import marked
from primerl.run_key import run_key

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.end_to_end,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    need_vllm()


@pytest.fixture(scope="module")
def trained(imitator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "vllm"
    overrides = ["--model.path", str(imitator), "--output-dir", str(output), "--inference.python", str(VLLM_PYTHON)]
    meant = {"examples/reverse-text/rl-vllm.toml": str(EXAMPLE / "rl-vllm.toml")}
    [[_, *command]] = shown(__file__, "docs/vllm.md", meant)
    primerl(*command, *overrides)
    return output


def test_reward_rises(trained: Path) -> None:
    has_learnt(trained)


def test_every_trained_token_is_exact_also_over_updates(trained: Path) -> None:
    said = primerl("verify", str(trained))
    assert "token-exact" in said
    assert " 0 turns that crossed" not in said


def test_engine_says_what_it_loaded(trained: Path) -> None:
    log = (trained / "logs" / "inference.log").read_text()
    loaded = [line for line in log.splitlines() if "loaded policy" in line]
    assert len(loaded) >= 10
    # Nothing of the model is taken on trust.
    assert all("24 of 24 tensors compared with the model" in line for line in loaded)


@pytest.mark.long
def test_the_trained_model_is_measured_apart_from_the_run_as_it_was_in_it(trained: Path, tmp_path: Path) -> None:
    *_, last = [json.loads(line) for line in (trained / "evals.jsonl").read_text().splitlines()]
    settings = tomllib.loads((EXAMPLE / "rl-vllm.toml").read_text())
    (environment,) = settings["orchestrator"]["eval"]["env"]
    (weights,) = (trained / "weights").glob("step_*")
    evaluation = {
        "model": os.fspath(weights),
        "output_dir": os.fspath(tmp_path / "out"),
        "max_tokens": settings["orchestrator"]["sampling"]["max_tokens"],
        "env": [environment],
        "inference": {**settings["inference"], "python": os.fspath(VLLM_PYTHON)},
    }
    (tmp_path / "eval.toml").write_text(tomli_w.dumps(evaluation))
    primerl("eval", "@", str(tmp_path / "eval.toml"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["environments"][environment["name"]]
    assert summary["measured"] == environment["num_examples"]
    assert summary["errors"] == {}
    # Greedily both times; two words that are as likely may change places with the batch that they were sampled in.
    assert summary["scores"]["avg@1"] == pytest.approx(last["avg@1"], abs=0.04)


@pytest.fixture(scope="module")
def adapted(imitator: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run with an adapter, whose engine process was killed on the way; how many adapters its server had at once."""
    output = tmp_path_factory.mktemp("runs") / "lora"
    both = ["@", str(EXAMPLE / "rl-vllm.toml"), "@", str(EXAMPLE / "lora.toml")]
    overrides = ["--model.path", str(imitator), "--output-dir", str(output), "--inference.python", str(VLLM_PYTHON)]
    run = launch(imitator, output, *both, *overrides)
    most = 0

    def killed_after(steps: int) -> bool:
        nonlocal most
        most = max(most, len(served_adapters(output)))
        return run.steps() >= steps or run.launcher.poll() is not None

    try:
        run.note_mark()
        until(lambda: killed_after(12), 400, "twelve steps")
        assert run.launcher.poll() is None, run.ended(5)
        kill_the_engines_process(run)
    finally:
        run.kill()
    return output, most


def kill_the_engines_process(run: Started) -> None:
    """The one that computes; the run ends well nevertheless."""
    (computes,) = [pid for pid in marked(run.mark) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(computes, signal.SIGKILL)
    code, said = run.ended(500)
    assert code == 0, said
    assert "inference was killed by SIGABRT; it is started again" in said
    assert run.left() == []


def served_adapters(output: Path) -> list[str]:
    """Of the run's engine, while it answers."""
    try:
        orchestrator = json.loads((output / "run" / "orchestrator.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {run_key(output)}"}
        engines = httpx.get(f"{orchestrator}/status", headers=headers, timeout=5).json()["engines"]
        cards = [card for engine in engines for card in httpx.get(f"{engine['url']}/v1/models").json()["data"]]
    except (OSError, httpx.HTTPError):
        return []
    return [card["id"] for card in cards if card["parent"]]


def test_an_adapter_is_learnt_on_vllm(adapted: tuple[Path, int]) -> None:
    output, most = adapted
    has_learnt(output)
    log = (output / "logs" / "inference.log").read_text()
    loaded, removed = log.count("Loaded new LoRA adapter: name 'reverse-text@"), log.count("Removed LoRA adapter: name")
    # Each version is loaded by itself, and those that nobody uses are unloaded, by either of the two servers.
    assert loaded >= 20
    assert loaded - removed <= 2 * 4
    assert 1 <= most <= 8
    assert "loaded policy" not in log, "whole weights were sent"


def test_every_token_of_an_adapter_is_exact(adapted: tuple[Path, int]) -> None:
    output, _ = adapted
    said = primerl("verify", str(output))
    assert "token-exact" in said
    # Each answer is of the adapter that its request named, from its first token to its last.
    assert " 0 turns that crossed" in said


@pytest.mark.long
def test_weights_go_from_memory_to_memory(imitator: Path, tmp_path: Path) -> None:
    output = tmp_path / "collective"
    overrides = ["--model.path", str(imitator), "--output-dir", str(output), "--inference.python", str(VLLM_PYTHON)]
    short = ["--max-steps", "6", "--orchestrator.eval.env", "[]", "--trainer.weights.transport", "collective"]
    primerl("rl", "@", str(EXAMPLE / "rl-vllm.toml"), *overrides, *short)
    log = (output / "logs" / "inference.log").read_text()
    # Where the trainer has copied its next weights by then, the file is read.
    assert log.count(", 24 tensors received from the trainer") >= 3
    assert log.count("loaded policy") == log.count(", 24 tensors received") + log.count("is read from its file: ")
    # What it computes was compared with what the trainer does, before any answer was taken.
    assert "probe" in json.loads((output / "broadcasts" / "step_3" / "manifest.json").read_text())
    assert "token-exact" in primerl("verify", str(output))


@pytest.mark.long
def test_vllm_that_renders_is_trained_exactly(imitator: Path, tmp_path: Path) -> None:
    output = tmp_path / "rendered"
    overrides = ["--model.path", str(imitator), "--output-dir", str(output), "--inference.python", str(VLLM_PYTHON)]
    short = ["--max-steps", "6", "--orchestrator.eval.env", "[]", "--orchestrator.sampling.temperature", "0.7"]
    renders = ["--orchestrator.client-type", "openai_chat_completions_token"]
    primerl("rl", "@", str(EXAMPLE / "rl-vllm.toml"), *overrides, *short, *renders)
    assert len(column(output, "reward/all/mean")) == 6
    assert "token-exact" in primerl("verify", str(output))


@pytest.mark.long
def test_run_goes_on_when_the_engine_process_is_killed(imitator: Path, tmp_path: Path) -> None:
    vllm = ["--inference.backend", "vllm", "--inference.python", str(VLLM_PYTHON)]
    short = ["--max-steps", "12", "--keep-broadcasts", "--orchestrator.eval.env", "[]"]
    run = launch(imitator, tmp_path / "run", *vllm, *short)
    try:
        run.note_mark()
        until(lambda: run.steps() >= 3 or run.launcher.poll() is not None, 300, "three steps")
        assert run.launcher.poll() is None, run.ended(5)
        kill_the_engines_process(run)
        assert run.steps() == 12
        assert "token-exact" in primerl("verify", str(run.output))
    finally:
        run.kill()
