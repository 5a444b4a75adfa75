"""What `config.json` alone says of a model whose layers carry a state from token to token: whether it can be trained,
and which package it needs on a GPU. The checks before a start, `primerl run models` and the trainer ask here; imports
no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

MAMBA_1 = "the scan of its Mamba-1 layers"
REFUSED = {
    "falcon_mamba": MAMBA_1,
    "jamba": MAMBA_1,
    "mamba": MAMBA_1,
    "minimax": "its lightning attention",
    "recurrent_gemma": "its recurrence",
    "rwkv": "its recurrence",
    "xlstm": "its recurrence",
    "zamba": MAMBA_1,
}
"""`model_type` -> what of it cannot be told where packed sequences begin."""

FLASH_LINEAR_ATTENTION = ("flash-linear-attention", "fla")
MAMBA_SSM = ("mamba-ssm", "mamba_ssm")
ON_GPUS = {
    "bamba": MAMBA_SSM,
    "falcon_h1": MAMBA_SSM,
    "granitemoehybrid": MAMBA_SSM,
    "kimi_linear": FLASH_LINEAR_ATTENTION,
    "mamba2": MAMBA_SSM,
    "nemotron_h": MAMBA_SSM,
    "olmo_hybrid": FLASH_LINEAR_ATTENTION,
    "qwen3_5_moe_text": FLASH_LINEAR_ATTENTION,
    "qwen3_5_text": FLASH_LINEAR_ATTENTION,
    "qwen3_next": FLASH_LINEAR_ATTENTION,
    "zamba2": MAMBA_SSM,
}
"""`model_type` -> the package that its layers need on a GPU, as it is installed and as it is imported."""


def refusal(model_type: str) -> str | None:
    """Why a model of this type is not trained, where that is for its state."""
    what = REFUSED.get(model_type)
    if what is None:
        return None
    return (
        f"{what} cannot be told where packed sequences begin, so this architecture ({model_type}) is not supported; "
        "docs/models.md lists what is supported"
    )


def missing_package(config: Mapping[str, Any]) -> str | None:
    """What is wrong with training a model with this `config.json` on a GPU, where a package is not installed."""
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
    needed = ON_GPUS.get(str(own.get("model_type")))
    kinds = own.get("layer_types")
    if isinstance(kinds, list) and not {"linear_attention", "mamba", "hybrid"} & set(map(str, kinds)):
        return None  # Granite 4 without Mamba
    if needed is None or find_spec(needed[1]) is not None:
        return None
    return needs(needed[0], f"no module {needed[1]}")


def needs(package: str, problem: str) -> str:
    return (
        f"this model's layers of linear attention need the package {package} on a GPU ({problem}); install it "
        f"(`pip install {package}`), or train on the CPU with an empty CUDA_VISIBLE_DEVICES"
    )
