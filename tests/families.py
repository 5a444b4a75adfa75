"""Tiny random models of the architectures that are trained, and their loss over sequences, packed and one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.model.packed_model import PackedSequences, output_head, predicted_hidden
from primerl.train.objective.logprobs import token_logprobs
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 264,  # of the tiny model's tokenizer
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
TOP_2 = {"num_experts_per_tok": 2, "output_router_logits": False}
EXPERTS = {**TOP_2, "num_experts": 4, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {**TOP_2, "num_local_experts": 4}
# The first layer is dense, as in DeepSeek's.
SHARED_EXPERT = {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
ROUTED_EXPERTS = {**TOP_2, **SHARED_EXPERT, "n_routed_experts": 4, "n_shared_experts": 1}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
BY_LAYER = {"vocab_size_per_layer_input": 264, "hidden_size_per_layer_input": 8}

DENSE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {**MAMBA_2, "attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**ALTERNATING, "logit_scale": 0.25},
    "ctrl": {},
    "cwm": ALTERNATING,
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": ALTERNATING,
    "falcon_h1": {**MAMBA_2, "mamba_d_head": 8, "mamba_d_ssm": 32},
    "gemma": {},
    "gemma2": {
        **ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 16},
    # The last layer of each kind computes with the keys and values of one before.
    "gemma3n_text": {
        **BY_LAYER,
        "num_hidden_layers": 4,
        "layer_types": 2 * ALTERNATING["layer_types"],
        "sliding_window": 8,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
    },
    # Heads of another size where attention is full.
    "gemma4_text": {
        **BY_LAYER,
        "num_hidden_layers": 4,
        "layer_types": 2 * ALTERNATING["layer_types"],
        "sliding_window": 8,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    },
    "gemma4_unified_text": {**ALTERNATING, **BY_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 0},
    "glm": {},
    "glm4": {},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "granite_swa": ALTERNATING,
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "jais2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "minicpm3": {**LATENT_ATTENTION, "head_dim": 12, "scale_emb": 1.0},
    "ministral": {"sliding_window": 8},
    "ministral3": {},
    "mistral": {"sliding_window": 8},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmo_hybrid": DELTA_RULE,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_5_text": DELTA_RULE,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"use_bias": True},
    "vaultgemma": {**ALTERNATING, "query_pre_attn_scalar": 16},
    "youtu": LATENT_ATTENTION,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "attention_head_dim": 16,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **ALTERNATING, "num_shared_experts": 1, "num_dense_layers": 1},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {**ROUTED_EXPERTS, **LATENT_ATTENTION},
    "cohere2_moe": {**TOP_2, **ALTERNATING, "num_experts": 4, "logit_scale": 0.25},
    "deepseek_v2": {**ROUTED_EXPERTS, **LATENT_ATTENTION, "topk_method": "greedy"},
    "deepseek_v3": {**ROUTED_EXPERTS, **LATENT_ATTENTION, "n_group": 2},
    "dots1": ROUTED_EXPERTS,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone_moe": {**EXPERTS, **SHARED_EXPERT, **ALTERNATING, "num_shared_experts": 1},
    "flex_olmo": {**TOP_2, "num_experts": 4},
    "glm4_moe": ROUTED_EXPERTS,
    "glm4_moe_lite": {**ROUTED_EXPERTS, **LATENT_ATTENTION},
    "gpt_oss": {**LOCAL_EXPERTS, **ALTERNATING},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoe_swa": {**LOCAL_EXPERTS, **ALTERNATING},
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        **MAMBA_2,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {**TOP_2, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**EXPERTS, "first_k_dense_replace": 1, "num_shared_experts": 1},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "kimi_linear": {
        **ROUTED_EXPERTS,
        **LATENT_ATTENTION,
        "num_local_experts": 4,
        "layer_types": DELTA_RULE["layer_types"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "laguna": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    # Queries in chunks of 8 tokens, and in the other layer scaled by their place.
    "llama4_text": {
        **LOCAL_EXPERTS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
    },
    "longcat_flash": {
        **LATENT_ATTENTION,
        "num_layers": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "ffn_hidden_size": 48,
    },
    "mellum": EXPERTS,
    "mimo_v2_flash": {**ROUTED_EXPERTS, **ALTERNATING},
    "minimax_m2": LOCAL_EXPERTS,
    "minimax_m3_vl_text": LOCAL_EXPERTS,
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": None},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmoe": {**TOP_2, "num_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_RULE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "qwen3_next": {**EXPERTS, **DELTA_RULE, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "solar_open": ROUTED_EXPERTS,
}
FAMILIES = DENSE | MIXTURES

WITH_STATE = {
    *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "mamba2", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2"),
}
"""Families with layers that carry a state from token to token."""

UNCOUNTED = {"falcon_h1", "mamba2", "zamba2"}
"""Those of them whose configs do not tell what each layer computes: some have attention as well."""

NOT_UNDERSTOOD = {"jetmoe", "llama4_text"}
"""Mixtures whose routers do not answer with logits, weights and chosen experts."""


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """A model folder, with the tiny model's tokenizer and template."""
    write_model(folder, TinyConfig(), seed=0)
    for left in ("model.safetensors", "generation_config.json"):
        (folder / left).unlink(missing_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(family, {**FAMILIES.get(family, {}), **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Zeros and ones, which norms, biases and sinks begin with, would hide what is left out.
            parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.dtype == torch.float32, name
    model.save_pretrained(folder)
    return folder


def _config(family: str, given: dict[str, Any]) -> Any:
    try:
        return AutoConfig.for_model(family, **{**SMALL, **given})
    except (AttributeError, ValueError):  # where it is computed from others, and cannot be set
        return AutoConfig.for_model(family, **{name: SMALL[name] for name in SMALL if name != "head_dim"}, **given)


LENGTHS = [30, 5, 21, 8, 9, 2, 33]


def sequences(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, SMALL["vocab_size"], (length,), generator=generator) for length in lengths]


def packed_loss(model: Any, lengths: list[int] = LENGTHS) -> Tensor:
    packed, token_ids = PackedSequences.from_lengths(lengths), torch.cat(sequences(lengths))
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    hidden = predicted_hidden(model, token_ids, packed, targets)
    logprobs, _ = token_logprobs(hidden, output_head(model), token_ids[targets], chunk_tokens=16)
    return -logprobs.mean()


def single_loss(model: Any, lengths: list[int] = LENGTHS) -> Tensor:
    losses = []
    for row in sequences(lengths):
        logits = model(input_ids=row.unsqueeze(0)).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return torch.stack(losses).sum() / sum(length - 1 for length in lengths)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
