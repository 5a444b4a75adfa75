"""One step of supervised fine-tuning of every family, from the folder it is loaded from to the one it is saved to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, MIXTURES, NOT_UNDERSTOOD, SMALL, WITH_STATE
from primerl.train import sft
from primerl.train.attended import COMPUTE_MORE
from primerl.train.flops import ModelShape
from primerl.train.memory import layers
from primerl.train.model import load_model
from sft_helpers import metrics, settings, write_rows

pytestmark = [
    pytest.mark.usefixtures("own_logging"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # which GPT-BigCode uses
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_trained_and_saved(family: str, folders: Any, tmp_path: Path) -> None:
    line = a_step(folders(family), tmp_path)
    assert ("perf/mfu" in line) == (family not in {*COMPUTE_MORE, *WITH_STATE})
    assert ("max_vio/mean" in line) == (family in set(MIXTURES) - NOT_UNDERSTOOD)


def test_a_model_that_also_reads_images_trains_as_its_text_model_does(folders: Any, tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    both = {
        "text_config": {**SMALL, **FAMILIES["gemma3_text"]},
        "vision_config": {**vision, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    }
    folder = folders("gemma3", **both)
    line = a_step(folder, tmp_path)
    model = load_model(folder)
    assert len(layers(model)) == 2
    # Matrices of the vision tower are none of the text's.
    text = ModelShape.of(load_model(folders("gemma3_text"))).flops([5], 3)
    assert ModelShape.of(model).flops([5], 3) == text
    assert line["perf/mfu"] > 0


def a_step(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Its metrics."""
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "xyz"[:n]} for n in (1, 2, 3)))
    values = settings(
        tmp_path,
        model={"path": str(folder)},
        data={"batch_size": 64, "seq_len": 64},
        optim={"lr": 1e-2, "warmup_steps": 0},
        max_steps=1,
        peak_tflops=1e-3,
    )
    assert sft.main(values) == 0
    (line,) = metrics(tmp_path / "run")
    assert math.isfinite(line["loss/mean"])
    assert line["optim/grad_norm"] > 0
    before = load_model(folder).state_dict()
    after = load_model(tmp_path / "run" / "weights" / "step_1").state_dict()
    assert before.keys() == after.keys()
    queries = [name for name in before if name.endswith("q_proj.weight") and "vision" not in name]
    assert not any(torch.equal(before[name], after[name]) for name in queries)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return line
