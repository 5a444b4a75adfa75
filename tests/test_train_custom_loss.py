"""The example of docs/custom-losses.md, as it is printed there, trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from end_to_end import launch
from primerl.models.tiny import TinyConfig, write_model
from settings_helpers import TRAINER, trainer_json
from test_train_rl import sequences, settings, whole_batch
from train_helpers import OrchestratorDouble

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "custom-losses.md"


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, language
    return found[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny", TinyConfig(hidden_size=32, num_hidden_layers=1), seed=3)
    return tmp_path / "tiny"


def run(values: dict[str, object], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAINER, trainer_json(values)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def test_the_example_of_the_documentation(folder: Path, tmp_path: Path) -> None:
    python = block("python")
    path = re.match(r"# (\S+\.py)\n", python)
    assert path is not None
    file = tmp_path / "project" / path[1]
    file.parent.mkdir(parents=True)
    file.write_text(python)
    loss = tomllib.loads(block("toml"))["trainer"]["loss"]
    output = tmp_path / "out"
    with OrchestratorDouble(whole_batch) as double:
        done = run(settings(double.url, folder, output, max_steps=2, loss=loss), tmp_path / "project")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    tokens = [(len(s.sampled), s.version < 1) for s in sequences(2)]
    stale = sum(count for count, is_stale in tokens if is_stale) / sum(count for count, _ in tokens)
    assert lines[1]["stale_share/all/mean"] == pytest.approx(stale, rel=1e-6)
    assert lines[1]["loss/mean"] != 0.0


@pytest.mark.timeout(300)
def test_a_run_whose_loss_never_returns_ends_by_name(tmp_path: Path) -> None:
    """The trainer's heartbeat goes on; what does not is the run, and the launcher says what it waits for."""
    write_model(tmp_path / "tiny", TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2), seed=3)
    (tmp_path / "hanging_loss.py").write_text("import threading\n\n\ndef f(tokens):\n    threading.Event().wait()\n")
    small = ("--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "16", "--orchestrator.max-async-level", "1")
    given = ("--trainer.loss.custom", "hanging_loss:f", "--timeouts.no-progress-s", "10")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    started = launch(tmp_path / "tiny", tmp_path / "run", *small, *given, variables={"PYTHONPATH": path})
    try:
        code, output = started.ended(200)
    finally:
        started.kill()
    assert code == 1, output
    said = " ".join(output.split())
    assert "nothing has moved for timeouts.no_progress_s = 10 s" in said, output
    assert "waits for the trainer to publish the weights of version 1" in said, output


def test_a_function_that_is_not_there_ends_before_anything_is_loaded(tmp_path: Path) -> None:
    done = run(
        settings("http://127.0.0.1:1", tmp_path / "no-model", tmp_path, loss={"custom": "no_such_module:f"}), tmp_path
    )
    assert done.returncode == 2
    assert "loss.custom is 'no_such_module:f': ModuleNotFoundError" in done.stdout
