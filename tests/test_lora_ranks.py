"""An adapter of a model that is divided among ranks: trained, published and saved as by one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from primerl.models.tiny import TinyConfig, write_model
from primerl.train import sft
from rank_helpers import Case, load_shards, run_cases
from sft_helpers import settings, write_rows

pytestmark = pytest.mark.usefixtures("own_logging")


def test_two_ranks_train_the_adapter_that_one_trains(tmp_path: Path) -> None:
    write_model(tmp_path / "model", TinyConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2), seed=1)
    generator = random.Random(1)
    words = ["x" * generator.randint(1, 12) for _ in range(23)]
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": word} for word in words))

    def values(output: str) -> dict[str, Any]:
        return settings(
            tmp_path,
            output_dir=str(tmp_path / output),
            max_steps=4,
            model={"path": str(tmp_path / "model"), "lora": {"rank": 4}},
            data={"batch_size": 150, "seq_len": 75},
            ckpt={"interval": 2, "weights": {"save_adapter_separately": True}},
        )

    assert sft.main(values("one")) == 0
    run_cases([Case("sft", 2, values("two"))])
    for step in (2, 4):
        for part in (".", "lora_adapters"):
            one, two = (load_shards(tmp_path / name / "weights" / f"step_{step}" / part) for name in ("one", "two"))
            assert sorted(one) == sorted(two)
            assert max((one[name] - two[name]).abs().max().item() for name in one) <= 1e-5
    # One rank goes on from what two have saved.
    given = values("two")
    given["max_steps"] = 5
    given["ckpt"]["resume_step"] = -1
    assert sft.main(given) == 0
