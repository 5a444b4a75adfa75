"""Estimated memory against the peak of a step that runs, on the CPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from families import write_family
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.model import memory
from primerl.train.objective import logprobs
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
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
WITH_STATE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_hidden_layers": 3,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
        "ssm_state_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "chunk_size": 128,
    },
}
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


@dataclass(frozen=True)
class Measured:
    """A layout of the model in `folder`."""

    folder: Path
    ranks: int
    given: dict[str, Any]


def errors_of(cases: dict[str, Measured]) -> dict[str, float]:
    """How far the estimate is off, as a share of the measured peak."""
    values = [
        Case(
            "memory",
            one.ranks,
            {"name": name, "folder": str(one.folder), "tokens": TOKENS, "output_dir": "", **one.given},
        )
        for name, one in cases.items()
    ]
    said = [json.loads(line[5:]) for line in run_cases(values, PROGRAM).splitlines() if line.startswith("peak ")]
    found: dict[str, int] = {}
    for name, peak in said:
        found[name] = max(peak, found.get(name, 0))
    errors = {}
    for name, one in cases.items():
        config = json.loads((one.folder / "config.json").read_text())
        estimated = memory.training(config, one.ranks, TOKENS, on_gpu=False, **one.given)
        assert estimated is not None
        errors[name] = round(estimated.total / found[name] - 1, 3)
    print({name: (peak, errors[name]) for name, peak in found.items()})
    return errors


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_estimates_are_near_what_is_measured(tmp_path: Path) -> None:
    write_model(tmp_path / "model", SHAPE, seed=1)
    errors = errors_of({name: Measured(tmp_path / "model", *layout) for name, layout in LAYOUTS.items()})
    assert all(abs(error) < OFF for error in errors.values()), errors


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_estimates_of_layers_with_a_state(tmp_path: Path) -> None:
    """Computed by torch code, they keep several times what other layers do."""
    sizes = {key: getattr(SHAPE, key) for key in SIZES}
    folders = {
        family: write_family(tmp_path / family, family, **sizes, **changes) for family, changes in WITH_STATE.items()
    }
    layouts = {name: LAYOUTS[name] for name in ("one rank", "recomputed")}
    errors = errors_of(
        {
            f"{family}, {name}": Measured(folder, *layout)
            for family, folder in folders.items()
            for name, layout in layouts.items()
        }
    )
    assert all(abs(error) < OFF for error in errors.values()), errors


def test_logits_of_a_chunk_are_counted_as_they_are_computed() -> None:
    assert memory.CHUNK_ELEMENTS == logprobs.CHUNK_ELEMENTS
