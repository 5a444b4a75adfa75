"""Estimated memory against the peak of a step that runs, on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.loss import logprobs
from primerl.train.model import memory
from rank_helpers import Case, run_cases

SHAPE = TinyConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    initializer_range=0.02,
)
TOKENS = 1024
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"checkpointing": "none", "adapter": False, "half": True}),
    "recomputed": (1, {"checkpointing": "full", "adapter": False, "half": True}),
    "adapter": (1, {"checkpointing": "none", "adapter": True, "half": True}),
    "divided": (2, {"checkpointing": "full", "adapter": False, "half": True}),
}
OFF = 0.12
"""Largest error, as a share of what is measured."""
PROGRAM = f"""
import json, os, sys
sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
from memory_helpers import measured
rank = int(os.environ["RANK"])
for case in json.load(sys.stdin):
    if rank < case["ranks"]:
        os.environ |= {{"WORLD_SIZE": str(case["ranks"])}} | case["places"]
        print("peak", json.dumps([case["values"]["name"], measured(case["values"])]))
"""


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_estimates_are_near_what_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, SHAPE, seed=1)
    config = json.loads((folder / "config.json").read_text())
    cases = [
        Case("memory", ranks, {"name": name, "folder": str(folder), "tokens": TOKENS, "output_dir": "", **given})
        for name, (ranks, given) in LAYOUTS.items()
    ]
    said = [json.loads(line[5:]) for line in run_cases(cases, PROGRAM).splitlines() if line.startswith("peak ")]
    found: dict[str, int] = {}
    for name, peak in said:
        found[name] = max(peak, found.get(name, 0))
    errors = {}
    for name, (ranks, given) in LAYOUTS.items():
        estimated = memory.training(config, ranks, TOKENS, on_gpu=False, **given)
        assert estimated is not None
        errors[name] = round(estimated.total / found[name] - 1, 3)
    print({name: (peak, errors[name]) for name, peak in found.items()})
    assert all(abs(error) < OFF for error in errors.values()), errors


def test_logits_of_a_chunk_are_counted_as_they_are_computed() -> None:
    assert memory.CHUNK_ELEMENTS == logprobs.CHUNK_ELEMENTS
