"""`scripts/gpu_check.sh`, rehearsed without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def stages(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("REHEARSAL", "1")
    spec = importlib.util.spec_from_file_location("gpu_stages", repository / "scripts" / "gpu_stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stages_line_tells_how_it_has_ended(stages: ModuleType) -> None:
    line = json.loads(stages.line("step", "0", "7", '{"ok": true, "bf16_gradient": 0.01}'))
    assert line == {"stage": "step", "ok": True, "code": 0, "seconds": 7, "bf16_gradient": 0.01}
    assert json.loads(stages.line("step", "124", "60", "")) == {
        "stage": "step",
        "ok": False,
        "code": 124,
        "seconds": 60,
    }
    assert not json.loads(stages.line("step", "1", "3", '{"ok": false}'))["ok"]


def test_attention_is_compared_with_exact_attention(stages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.attention()["ok"]
    monkeypatch.setattr(stages, "written_out", lambda q, k, v, *_: q * 0 + k.sum() + v.sum())
    assert not stages.attention()["ok"]


def test_trees_are_compared_with_their_sequences(stages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stages.trees()
    assert found["ok"], found
    computed = stages.computed

    def wrong(*given: Any, **more: Any) -> Any:
        logprobs, gradient = computed(*given, **more)
        return logprobs, gradient if more.get("tree") is False else 1.2 * gradient

    monkeypatch.setattr(stages, "computed", wrong)
    assert not stages.trees()["ok"]


@pytest.mark.processes
def test_stages_are_lines_and_a_machine_without_a_gpu_is_told(repository: Path, tmp_path: Path) -> None:
    def check(rehearsal: str) -> subprocess.CompletedProcess[str]:
        variables = {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "REHEARSAL": rehearsal}
        return subprocess.run(
            ["bash", "scripts/gpu_check.sh", "features"],
            cwd=repository,
            env={**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=200,
        )

    done = check("1")
    assert done.returncode == 0, done.stderr
    [line] = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert (json.loads(line)["stage"], json.loads(line)["ok"]) == ("features", True)
    done = check("")
    assert (done.returncode, "REHEARSAL=1 tries the check on the CPU" in done.stderr) == (2, True)


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_tinker_server_is_compared_with_one_on_the_cpu(repository: Path, tmp_path: Path) -> None:
    variables = {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "REHEARSAL": "1"}
    command = ["bash", "scripts/gpu_check.sh", "tinker"]
    environment = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert line["ok"]
    assert line["fp32"]["computes"] == ["float32 on cpu"] * 3
    assert line["bf16"]["computes"][0] == "bfloat16 on cpu"
    assert line["fp32"]["same_sample"]
    assert 0 < line["bf16"]["trained_by_cpu"] < 0.05
