"""What is known of families of models, by the `model_type` of their `config.json`; `support` judges models by it."""

from __future__ import annotations

ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
}
"""Keys of older families with the same meaning."""

WITH_STATE = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
"""Values of `layer_types`: layers that carry a state from token to token, or mix neighbours by a convolution."""

MAMBA_1 = "the scan of its Mamba-1 layers cannot be given the starts of packed sequences"
RECURRENCE = "its recurrence cannot be given the starts of packed sequences"
INDEXER = "its indexer picks the tokens that are attended to, over the whole packed row"
OWN_ATTENTION = (
    "transformers has this architecture with attention of its own, which cannot be given the starts of packed sequences"
)
REFUSED = {
    # Layers with a state.
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), MAMBA_1),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), RECURRENCE),
    "minimax": "its lightning attention cannot be given the starts of packed sequences",
    # Attention.
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4"), INDEXER),
    **dict.fromkeys(
        (
            *("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "xglm"),
            *("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
        ),
        OWN_ATTENTION,
    ),
    "doge": "its attention computes its own mask",
    # The rest of the model.
    "phimoe": "its router computes with random numbers while it is trained, and engines do not",
    "modernbert-decoder": "its output layer has arithmetic that its config does not name",
}
"""`model_type` -> why models of that type are not trained. Others are proved when they are loaded."""

ENCODERS = frozenset({"bert", "camembert", "electra", "ernie", "megatron-bert", "rembert", "roberta", "xlm-roberta"})
"""Types whose tokens see later ones, unless `is_decoder` is set."""

FLASH_LINEAR_ATTENTION = ("flash-linear-attention", "fla")
MAMBA_SSM = ("mamba-ssm", "mamba_ssm")
GPU_PACKAGES = {
    **dict.fromkeys(
        ("kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), FLASH_LINEAR_ATTENTION
    ),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), MAMBA_SSM),
}
"""`model_type` -> the package that computes its layers with a state on a GPU, as it is installed and imported."""

WITHOUT_LAYERS = frozenset({"ctrl"})
"""Types without a list of layers, which several ranks and `compile` need."""

GATED_FAMILIES = (
    *("aria_text", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "exaone_moe", "gemma", "gemma2", "gemma3_text", "gemma4_unified_text", "glm4_moe"),
    *("granite", "granite_swa", "helium", "hrm_text", "hunyuan_v1_dense", "hy_v3", "hyperclovax", "llama"),
    *("mimo_v2_flash", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma"),
)
"""Families with the usual attention, and a gate in their dense feed-forward layers and shared experts."""
EXPERTS_ONLY = (
    *("cohere2_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa", "mellum", "minimax_m2"),
    *("mixtral", "olmoe", "qwen3_moe"),
)
"""Families whose feed-forward layers are all experts."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
PLAIN = ("up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DELTA_RULE = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
PROJECTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GATED_FAMILIES, (*ATTENTION, *GATED)),
    **dict.fromkeys(EXPERTS_ONLY, ATTENTION),
    **dict.fromkeys(("apertus", "arcee", "jais2", "nemotron"), (*ATTENTION, *PLAIN)),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),
        (*LATENT, *GATED),
    ),
    "qwen3_5_text": (*ATTENTION, *GATED, *DELTA_RULE),
    "qwen3_5_moe_text": (*ATTENTION, *GATED, *DELTA_RULE, "shared_expert_gate"),
    "qwen3_vl_text": (*ATTENTION, *GATED),
    "nemotron_h": (*ATTENTION, *PLAIN, "in_proj"),
    "gpt2": (),
}
"""`model_type` -> last names of the linear layers that an adapter of `all-linear` reaches; others are known by their
weights."""

EMBEDDED_TYPES = ("llama", "qwen2", "qwen3")
"""Types that the embedded engine computes."""

NOT_CACHED = {
    "hrm_text": "a checkpoint's tensors lie in the model's in pieces, which new weights cannot be loaded into"
}
"""`model_type` -> why the embedded engine over `transformers` does not serve it."""

MXFP4 = "mxfp4"
IN_MXFP4 = ("gpt_oss",)
"""Types of which folders in MXFP4 are dequantised when they are loaded."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys of the number of experts in a layer, by family."""

GATED_PAIR = ("gate_proj", "up_proj")
"""Two matrices of an expert that lie side by side in one tensor of the model, `gate_up_proj`."""
OF_EXPERTS = frozenset({"experts", *GATED_PAIR, "gate_up_proj", "down_proj"})
"""Last names by which a mixture's experts are meant among `target_modules`."""
OWN_EXPERTS = frozenset({"jetmoe", "llama4_text", "longcat_flash"})
"""Mixtures whose experts get no adapter: `transformers` computes them by code of their own."""
