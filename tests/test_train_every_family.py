"""One step of supervised fine-tuning of every family, from the folder it is loaded from to the one it is saved to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, MIXTURES, NOT_UNDERSTOOD, SMALL, UNCOUNTED
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.model.flops import COMPUTE_MORE, ModelShape
from primerl.train.model.layers import layers
from primerl.train.model.packed_model import ModelError, load_model
from primerl.train.weights.frozen import names_in
from safetensors.torch import load_file
from settings_helpers import run_sft
from sft_helpers import metrics, settings, write_rows
from transformers import AutoConfig, AutoModelForImageTextToText

pytestmark = [
    pytest.mark.usefixtures("own_logging"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # which GPT-BigCode uses
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_trained_and_saved(family: str, folders: Any, tmp_path: Path) -> None:
    line = a_step(folders(family), tmp_path)
    assert ("perf/mfu" in line) == (family not in {*COMPUTE_MORE, *UNCOUNTED})
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


VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
TOWER = {**VISION, "out_hidden_size": 32, "num_position_embeddings": 16}
IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_interleaved": True}


def whole(folder: Path, family: str, **text: Any) -> Path:
    """As the hub has them: text model and vision tower."""
    given = {**SMALL, "hidden_size": 32, **text}
    config = AutoConfig.for_model(family, text_config=given, vision_config=dict(TOWER), **IDS)
    if family == "qwen3_vl":
        config.vision_config.deepstack_visual_indexes = [0]
    write_model(folder, TinyConfig(), seed=0)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    return folder


def test_a_model_of_text_and_images_is_trained_on_text_and_saved_whole(tmp_path: Path) -> None:
    """One that `transformers` has as a whole only."""
    folder = whole(tmp_path / "whole", "qwen3_vl", rope_parameters={**ROPE, "mrope_section": [2, 1, 1]})
    a_step(folder, tmp_path, weight_decay=0.1)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "run" / "weights" / "step_1"))
    assert before.keys() == after.keys()
    unchanged = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    vision = {name for name in before if ".visual." in name}
    assert vision
    assert vision <= unchanged
    assert len(unchanged - vision) < 0.2 * len(before)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "run" / "weights" / "step_1" / name).is_file()


def test_the_text_model_is_trained_and_the_whole_saved(tmp_path: Path) -> None:
    text = {**FAMILIES["qwen3_5_text"], "rope_parameters": {**ROPE, "mrope_section": [1, 0, 0]}}
    folder = whole(tmp_path / "whole", "qwen3_5", **text)
    a_step(folder, tmp_path)
    saved = tmp_path / "run" / "weights" / "step_1"
    assert AutoConfig.from_pretrained(saved).model_type == "qwen3_5"
    assert sorted(names_in(saved)) == sorted(names_in(folder))


def test_a_model_that_continues_no_text_is_refused_with_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    AutoConfig.for_model("clip").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"clip: transformers has no model of type 'clip' that continues a text; give"):
        load_model(folder)


def a_step(folder: Path, tmp_path: Path, **optim: float) -> dict[str, Any]:
    """Its metrics."""
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "xyz"[:n]} for n in (1, 2, 3)))
    values = settings(
        tmp_path,
        model={"path": str(folder)},
        data={"batch_size": 64, "seq_len": 64},
        optim={"lr": 1e-2, "warmup_steps": 0, **optim},
        max_steps=1,
        peak_tflops=1e-3,
    )
    assert run_sft(values) == 0
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
