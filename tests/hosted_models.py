"""The hosted models as tiny `config.json` files of the same architectures, laid out as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from primerl.models.tiny import TinyConfig, write_model

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_RULE: dict[str, Any] = {
    "linear_key_head_dim": 64,  # as few as vLLM takes on a CPU
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
IMAGES = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


def rope(*sections: int, share: float = 1.0) -> dict[str, Any]:
    own = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), "mrope_interleaved": True}
    return {"rope_parameters": own | {"partial_rotary_factor": share}}


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SIZES, "tie_word_embeddings": True}
QWEN3_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **SIZES, **ROUTED}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, "tie_word_embeddings": True}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **IMAGES,
    "text_config": {"model_type": "qwen3_vl_text", **SIZES, **rope(6, 5, 5), "tie_word_embeddings": True},
    "vision_config": {"model_type": "qwen3_vl", **TOWER, "deepstack_visual_indexes": [0]},
    "tie_word_embeddings": True,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    **SIZES,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    **SIZES,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
}


def qwen3_5(*, tied: bool = False, mixture: bool = False) -> dict[str, Any]:
    kind, name = ("qwen3_5_moe", "Qwen3_5Moe") if mixture else ("qwen3_5", "Qwen3_5")
    routed = {**ROUTED, "shared_expert_intermediate_size": 32} if mixture else {}
    text = {"model_type": f"{kind}_text", **SIZES, **DELTA_RULE, **routed, **rope(2, 1, 1, share=0.25)}
    return {
        "model_type": kind,
        "architectures": [f"{name}ForConditionalGeneration"],
        **IMAGES,
        "text_config": text | {"tie_word_embeddings": tied},
        "vision_config": {"model_type": kind, **TOWER},
        "tie_word_embeddings": tied,
    }


def nemotron(latent: int | None = None) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_latent_size": latent,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    }


HOSTED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B-Instruct-2507": QWEN3_MOE,
    "Qwen3-30B-A3B-Thinking-2507": QWEN3_MOE,
    "Qwen3-4B-Instruct-2507": QWEN3,
    "Qwen3-4B-Thinking-2507": QWEN3,
    "Qwen3-VL-4B-Instruct": QWEN3_VL,
    "Qwen3.5-0.8B": qwen3_5(tied=True),
    "Qwen3.5-2B": qwen3_5(tied=True),
    "Qwen3.5-4B": qwen3_5(tied=True),
    "Qwen3.5-9B": qwen3_5(),
    "Qwen3.5-35B-A3B": qwen3_5(mixture=True),
    "Qwen3.5-122B-A10B": qwen3_5(mixture=True),
    "Qwen3.5-397B-A17B": qwen3_5(mixture=True),
    "Llama-3.2-1B-Instruct": LLAMA,
    "Llama-3.2-3B-Instruct": LLAMA,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": nemotron(),
    "NVIDIA-Nemotron-3-Super-120B-A12B-BF16": nemotron(latent=32),
    # As `openai` publishes them, in MXFP4.
    "gpt-oss-20b": GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
    "gpt-oss-120b": GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
    "GLM-4.7": GLM,
}


def write_hosted(folder: Path, name: str) -> Path:
    """A folder with the model's config, a tokenizer and a chat template, before its weights are downloaded."""
    write_model(folder, TinyConfig(), seed=0)
    for other in ("model.safetensors", "generation_config.json"):
        (folder / other).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(HOSTED[name]))
    return folder
