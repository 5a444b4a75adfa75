"""An adapter of a model that is divided among ranks: trained, published and saved as by one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from primerl.models.tiny import TinyConfig, write_model
from rank_helpers import Case, load_shards, run_cases
from settings_helpers import run_sft
from sft_helpers import settings, write_rows
from test_sft_checkpoint import curve

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_logging")]


def write_inputs(folder: Path, family: str | None = None) -> None:
    if family is None:
        write_model(folder / "model", TinyConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2), seed=1)
    else:
        write_family(folder / "model", family)
    generator = random.Random(1)
    words = ["x" * generator.randint(1, 12) for _ in range(23)]
    write_rows(folder / "rows.jsonl", *({"prompt": "a", "completion": word} for word in words))


def values_of(folder: Path, output: str, steps: int = 4, **lora: Any) -> dict[str, Any]:
    return settings(
        folder,
        output_dir=str(folder / output),
        max_steps=steps,
        model={"path": str(folder / "model"), "lora": {"rank": 4, **lora}},
        data={"batch_size": 150, "seq_len": 75},
        ckpt={"interval": 2, "weights": {"save_adapter_separately": True}},
    )


@pytest.mark.parametrize("family", [None, pytest.param("qwen3_5_moe_text", marks=pytest.mark.long)])
def test_two_ranks_train_the_adapter_that_one_trains(family: str | None, tmp_path: Path) -> None:
    """Of the tiny model, and of a mixture with its experts and linear attention."""
    write_inputs(tmp_path, family)
    assert run_sft(values_of(tmp_path, "one")) == 0
    run_cases([Case("sft", 2, values_of(tmp_path, "two"))])
    for step in (2, 4):
        for part in (".", "lora_adapters"):
            one, two = (load_shards(tmp_path / name / "weights" / f"step_{step}" / part) for name in ("one", "two"))
            assert sorted(one) == sorted(two)
            assert max((one[name] - two[name]).abs().max().item() for name in one) <= 1e-5
    # One rank goes on from what two have saved.
    given = values_of(tmp_path, "two", steps=5)
    given["ckpt"]["resume_step"] = -1
    assert run_sft(given) == 0


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    whole, again = values_of(tmp_path, "whole", dropout=0.3), values_of(tmp_path, "again", dropout=0.3)
    again["ckpt"]["resume_step"] = 2
    run_cases([Case("sft", 2, whole), Case("sft", 2, again, copied_from=str(tmp_path / "whole"))])
    assert curve(tmp_path / "again") == curve(tmp_path / "whole")
    one, two = (load_shards(tmp_path / name / "weights" / "step_4") for name in ("whole", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)
