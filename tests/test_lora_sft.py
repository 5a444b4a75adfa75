"""Supervised fine-tuning of an adapter: it learns, it goes on bit by bit, and what it saves can be begun with."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import tomli_w
import torch
from primerl.train.adapters.merging import is_adapter
from rank_helpers import saved_tensors
from safetensors.torch import load_file
from settings_helpers import run_sft
from sft_helpers import metrics, settings, write_rows
from test_sft_checkpoint import curve, final_weights, killed_after
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("own_logging")

STEPS = 30
LORA = {"rank": 4, "alpha": 16, "dropout": 0.1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to answer with other letters than the rows beside it."""
    folder = tmp_path_factory.mktemp("base")
    generator = random.Random(1)
    for letter, file in (("y", "before.jsonl"), ("x", "rows.jsonl")):
        words = [letter * generator.randint(1, 12) for _ in range(23)]
        write_rows(folder / file, *({"prompt": "a", "completion": word} for word in words))
    first = settings(folder, data={"path": str(folder / "before.jsonl"), "batch_size": 150, "seq_len": 100})
    assert run_sft(first) == 0
    saved = folder / "run" / "weights" / "step_40"
    return saved.rename(folder / "model")


def values(base: Path, output: Path, steps: int = STEPS, **ckpt: Any) -> dict[str, Any]:
    return settings(
        base.parent,
        output_dir=str(output),
        max_steps=steps,
        model={"path": str(base), "lora": LORA},
        data={"batch_size": 150, "seq_len": 100},
        optim={"lr": 2e-2, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        val={"interval": 10, "data": {"path": str(base.parent / "rows.jsonl")}},
        ckpt={"interval": 3, "weights": {"save_adapter_separately": True}, **ckpt},
    )


@pytest.fixture(scope="module")
def uninterrupted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "whole"
    assert run_sft(values(base, output)) == 0
    return output


def test_an_adapter_learns(uninterrupted: Path, base: Path) -> None:
    losses = [line["val/loss"] for line in metrics(uninterrupted) if "val/loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    saved = uninterrupted / "weights" / f"step_{STEPS}"
    adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved / "lora_adapters")
    merged = AutoModelForCausalLM.from_pretrained(saved)
    token_ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        difference = (adapter.eval()(input_ids=token_ids).logits - merged(input_ids=token_ids).logits).abs().max()
    assert difference <= 1e-4
    own, trained = load_file(base / "model.safetensors"), load_file(saved / "model.safetensors")
    assert torch.equal(own["model.embed_tokens.weight"], trained["model.embed_tokens.weight"])
    assert not torch.equal(own["model.layers.0.mlp.up_proj.weight"], trained["model.layers.0.mlp.up_proj.weight"])


def test_a_checkpoint_is_of_the_adapter_only(uninterrupted: Path) -> None:
    names = list(saved_tensors(uninterrupted / "checkpoints" / f"step_{STEPS}"))
    weights = [name for name in names if name.startswith("model.")]
    assert len(weights) == 2 * 7
    assert all(map(is_adapter, names))


@pytest.mark.processes
@pytest.mark.timeout(600)  # starts what imports torch
def test_a_killed_run_goes_on_bit_by_bit(uninterrupted: Path, base: Path, tmp_path: Path) -> None:
    """With dropout, whose draws go on where they were."""
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(values(base, tmp_path / "run")))
    command = [sys.executable, "-m", "primerl", "sft", "@", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    lines = random.Random(int(os.environ.get("PRIMERL_TEST_SEED", "1"))).randint(5, 20)
    killed_after(lines, process, tmp_path / "run")
    assert run_sft(values(base, tmp_path / "run", resume_step=-1)) == 0
    assert curve(tmp_path / "run") == curve(uninterrupted)
    assert final_weights(tmp_path / "run", STEPS) == final_weights(uninterrupted, STEPS)


def test_begins_with_a_saved_adapter(uninterrupted: Path, base: Path, tmp_path: Path) -> None:
    given = values(base, tmp_path / "run", steps=1)
    saved = uninterrupted / "weights" / f"step_{STEPS}" / "lora_adapters"
    given["model"]["lora"] = {**LORA, "adapter_path": str(saved)}
    assert run_sft(given) == 0
    assert metrics(tmp_path / "run")[0]["val/loss"] == pytest.approx(metrics(uninterrupted)[-1]["val/loss"], rel=1e-6)


def test_another_adapter_than_the_checkpoints_is_refused(
    uninterrupted: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sft(values(base, tmp_path / "run", steps=3)) == 0
    given = values(base, tmp_path / "run", resume_step=-1)
    for lora in ({**LORA, "rank": 2}, None):
        given["model"] = {"path": str(base), **({"lora": lora} if lora else {})}
        if lora is None:
            given["ckpt"].pop("weights")
        assert run_sft(given) == 2
        assert "is of another model: " in capsys.readouterr().out


@pytest.mark.processes
def test_the_command_refuses_what_does_not_fit_before_it_starts(base: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(values(base, tmp_path / "run")))
    command = [sys.executable, "-m", "primerl", "sft", "@", str(config), "--model.lora.target-modules", '["q"]']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "model.lora.target_modules (on the command line): no layer of the model in" in done.stderr
    assert not (tmp_path / "run").exists()
