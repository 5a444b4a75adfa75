"""`primerl run models`: which folders are listed, and what is said of those that cannot be trained."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from primerl.models.tiny import write_model
from primerl.runs import memory
from primerl.runs.memory import Machine
from primerl.runs.models import look
from run_helpers import begin, told
from store_helpers import adapter

LARGE = Machine(10**12, "this machine")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(memory, "machine", lambda: LARGE)
    monkeypatch.chdir(tmp_path)


def listed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    found = json.loads(told("run", "models", *arguments, "--json", capsys=capsys))
    return {Path(model["path"]).name: model for model in found}


@pytest.mark.processes
def test_models_are_listed_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "outputs" / "sft" / "weights" / "step_5", seed=0)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0"
    write_model(snapshot, seed=0)
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((snapshot / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    other = tmp_path / "given" / "gemma"
    write_model(other, seed=0)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    found = listed("given", capsys=capsys)
    assert (found["step_5"]["trainable"], found["step_5"]["engine"], found["step_5"]["reason"]) == (True, "torch", "")
    assert not found["0"]["trainable"]
    assert "chat template" in found["0"]["reason"]
    assert (found["gemma"]["trainable"], found["gemma"]["engine"]) == (True, "transformers")
    assert found["gemma"]["reason"] == "it computes as transformers does, many times slower than vLLM"
    shown = told("run", "models", "given", capsys=capsys)
    assert [line.split("  ")[-1] for line in shown.splitlines() if "step_5" in line] == ["yes"]
    assert "with the embedded engine over transformers  " in shown
    assert "no folder nowhere" in told("run", "models", "nowhere", code=2, capsys=capsys)


def test_an_encoder_is_told_by_its_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    found = listed("bert", capsys=capsys)["bert"]
    assert (found["kind"], found["trainable"]) == ("bert", False)
    assert found["reason"] == "it is a BertForMaskedLM, which does not generate text; give a model ..ForCausalLM"


def test_what_was_asked_for_is_told_whatever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "given" / "broken"
    write_model(broken, seed=0)
    (broken / "config.json").write_text("{")
    lora = adapter(tmp_path / "given" / "lora")
    settings = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "/models/base"}))
    (tmp_path / "given" / "other").mkdir()
    (tmp_path / "given" / "other" / "config.json").write_text("{}")  # of something else
    for arguments in (["given"], ["given/broken", "given/lora"]):
        found = listed(*arguments, capsys=capsys)
        assert set(found) == {"broken", "lora"}
        assert "config.json cannot be read" in found["broken"]["reason"]
        assert found["lora"]["kind"] == "adapter"
        assert (
            "it is an adapter to /models/base: trainer.model.lora.adapter_path begins with" in found["lora"]["reason"]
        )
    (tmp_path / "empty").mkdir()
    from primerl.cli import main

    assert main(["run", "models", "empty"]) == 0
    assert "there is no model in empty: no folder there has a config.json" in capsys.readouterr().err


def test_what_an_evaluation_of_an_endpoint_keeps_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "outputs" / "measured"
    (folder / "journal").mkdir(parents=True)
    write_model(folder / "run" / "text", seed=0)
    write_model(folder / "weights" / "step_1", seed=0)
    begin(folder)
    assert set(listed(capsys=capsys)) == {"step_1"}


def test_memory_is_estimated_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    write_model(folder, seed=0)
    parameters = (folder / "model.safetensors").stat().st_size / 4  # fp32, and a header
    whole = look(folder, LARGE)
    assert whole.memory == pytest.approx(16 * parameters, rel=0.05)
    assert whole.memory_lora < 0.3 * whole.memory
    on_gpu = look(folder, Machine(LARGE.bytes, "this machine's GPU", half=True))
    assert on_gpu.memory == pytest.approx(18 * parameters, rel=0.05)  # in bf16 beside fp32
    assert on_gpu.memory_lora == pytest.approx(2.32 * parameters, rel=0.05)  # in bf16 alone
    assert (whole.fits, whole.trainable, whole.reason) == ("all", True, "")
    part = look(folder, Machine((whole.memory + whole.memory_lora) // 2, "this machine"))
    assert (part.fits, part.trainable) == ("adapter", True)
    assert "all of it takes about " in part.reason
    none = look(folder, Machine(whole.memory_lora // 2, "this machine's 2 GPUs"))
    assert (none.fits, none.trainable) == ("nothing", False)
    assert ", and this machine's 2 GPUs has " in none.reason
    shutil.rmtree(folder)


def test_the_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(memory, "_gpus", list)
    own = memory.machine()
    assert own.what == "this machine"
    limit = tmp_path / "memory.max"
    for text, expected in (("max\n", own.bytes), ("1000000\n", 1_000_000)):
        limit.write_text(text)
        monkeypatch.setattr(memory, "LIMITS", (*memory.LIMITS, limit))
        assert memory.machine().bytes == expected
    monkeypatch.undo()
    done = subprocess.CompletedProcess([], 0, "81559\n81559\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert memory.machine() == Machine(2 * 81559 * 2**20, "this machine's 2 GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert memory.machine() == Machine(81559 * 2**20, "this machine's GPU", half=True)
