"""Hosted models as tiny folders with random weights, laid out as the hub has them: vision towers, MTP layers, and
experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from hosted_models import HOSTED
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.weights.mxfp4 import GROUP, VALUES
from safetensors.torch import load_file, save_file
from torch import Tensor

PICTURES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
"""vLLM reads how pictures are cut where a model has a vision tower, also where it is asked about none."""
PROCESSORS = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MTP = {
    "GLM-4.7": ("model.layers.4.eh_proj.weight", "model.layers.4.shared_head.head.weight"),
    "Qwen3.5-0.8B": ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"),
}


def write_hub_folder(folder: Path, name: str) -> Path:
    """The whole model, bfloat16 as on the hub, with tokenizer and template."""
    write_model(folder, TinyConfig(), seed=0)
    for left in ("model.safetensors", "generation_config.json", "config.json"):
        (folder / left).unlink(missing_ok=True)
    facts = {key: value for key, value in HOSTED[name].items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(**facts)
    torch.manual_seed(0)
    model: Any = getattr(transformers, facts["architectures"][0])(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _add_mtp(folder, MTP.get(name, ()))
    if "vision_config" in facts:
        for file, kind in PROCESSORS.items():
            (folder / file).write_text(json.dumps(PICTURES | kind), encoding="utf-8")
    if "quantization_config" in HOSTED[name]:
        _quantise(folder)
    return folder


def _add_mtp(folder: Path, names: tuple[str, ...]) -> None:
    (file,) = folder.glob("*.safetensors")
    extra = {name: torch.randn(8, 4).bfloat16() for name in names}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of weights [E, K, N]; the largest of 32 becomes 4 to 6."""
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, GROUP))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-100))) - 2
    scaled = groups * torch.exp2(-exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - torch.tensor(VALUES)).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def _quantise(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = quantised(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    (folder / "config.json").write_text(json.dumps(config))
