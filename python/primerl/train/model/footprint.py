"""Size of a model, from `config.json` alone. Imports no torch.

    parameters   matrices of embeddings, attention, state layers, feed-forward layers and experts; norms and biases,
                 well below 1 %, are not counted
    bytes        a parameter: weights, gradient, AdamW's moments

What activations and several ranks take is in `primerl.train.model.memory`. Tests compare the count with the models that
`transformers` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from primerl.train.model.families import ALIASES
from primerl.train.model.support import Config, experts, model_type, size_problem, text_config

TRAINED = 16
"""Bytes of a trained parameter: itself, its gradient and AdamW's two moments, in fp32."""
FROZEN = 4
"""Bytes of a parameter that an adapter leaves as it is, in fp32."""
HALF = 2
"""Bytes of a parameter in bf16, which one GPU computes with: next to an fp32 copy if it is trained, alone otherwise."""
ADAPTED = 0.02
"""Parameters of an adapter of rank 16 or so, as a share of the model's."""

BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types whose query projection has an output gate of the same size."""

UNGATED = (
    *("apertus", "arcee", "gpt2", "gpt_bigcode", "gpt_neox", "jais2", "nemotron", "nemotron_h", "opt", "phi"),
    "starcoder2",
)
"""Types whose feed-forward layers have two matrices."""


def bytes_to_train(parameters: int, *, half: bool) -> int:
    """Training all of a model, without activations. `half`: it computes with bf16 weights of its own, as on one GPU."""
    return (TRAINED + HALF if half else TRAINED) * parameters


def bytes_to_adapt(parameters: int, *, half: bool) -> int:
    """Training an adapter to it."""
    return int(((HALF if half else FROZEN) + TRAINED * ADAPTED) * parameters)


def parameters(config: Config) -> int | None:
    """Parameters of the whole model; None if its config lacks the usual keys."""
    text = Text.of(config)
    if text is None:
        return None
    embeddings = text.vocabulary * text.hidden * (1 if text.tied else 2)
    return embeddings + sum(matrices(text)) + _vision(config)


@dataclass(frozen=True, slots=True)
class Text:
    """What the formulas need of a text model."""

    given: Config
    kind: str
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    blocks: tuple[str, ...]
    """Type of each layer's mixer; of a layer that has no feed-forward part, or only one, in Nemotron-H."""

    @classmethod
    def of(cls, config: Config) -> Text | None:
        if size_problem(config) is not None:
            return None
        given = text_config(config)
        hidden, vocabulary, heads = (
            _number(given, name) for name in ("hidden_size", "vocab_size", "num_attention_heads")
        )
        blocks = _blocks(given)
        if not hidden or not vocabulary or not heads or not blocks:
            return None
        return cls(
            given=given,
            kind=model_type(config),
            hidden=hidden,
            vocabulary=vocabulary,
            heads=heads,
            kv_heads=_number(given, "num_key_value_heads") or heads,
            head_dim=_number(given, "head_dim") or hidden // heads,
            intermediate=_number(given, "intermediate_size") or 4 * hidden,
            tied=bool(given.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            blocks=blocks,
        )

    @property
    def mixes_alone(self) -> bool:
        """Whether a layer is either a mixer or a feed-forward part."""
        return self.kind == "nemotron_h"

    def number(self, name: str, default: int = 0) -> int:
        return _number(self.given, name) or default


def _number(config: Config, name: str) -> int:
    values = (config.get(known) for known in (name, *ALIASES.get(name, ())))
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)


def _blocks(given: Config) -> tuple[str, ...]:
    pattern = given.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return tuple(BLOCKS.get(letter, "attention") for letter in pattern)
    named: Any = given.get("layers_block_type") or given.get("layer_types")
    if isinstance(named, list):
        return tuple(map(str, named))
    return ("full_attention",) * _number(given, "num_hidden_layers")


def matrices(text: Text) -> Iterator[int]:
    """Parameters of each layer."""
    alone = text.mixes_alone
    for index, block in enumerate(text.blocks):
        if alone and block in ("moe", "mlp"):
            yield _feed_forward(text, sparse=block == "moe")
        elif alone:
            yield _mixer(text, block)
        else:
            yield _mixer(text, block) + _feed_forward(text, sparse=is_sparse(text, index))


def _mixer(text: Text, block: str) -> int:
    hidden = text.hidden
    if text.number("linear_num_value_heads") and block == "linear_attention":
        keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim")
        values = text.number("linear_num_value_heads") * text.number("linear_value_head_dim")
        inputs = 2 * keys + 2 * values + 2 * text.number("linear_num_value_heads")
        return hidden * (inputs + values) + (2 * keys + values) * text.number("linear_conv_kernel_dim")
    if text.number("mamba_num_heads") and block in ("mamba", "linear_attention"):
        inner = text.number("mamba_num_heads") * text.number("mamba_head_dim")
        mixed = inner + 2 * text.number("n_groups") * text.number("ssm_state_size")
        return hidden * (inner + mixed + text.number("mamba_num_heads") + inner) + mixed * text.number("conv_kernel", 4)
    if latent := text.number("kv_lora_rank"):
        query = text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim")
        value, ranked = text.number("v_head_dim"), text.number("q_lora_rank")
        queries = ranked * (hidden + text.heads * query) if ranked else hidden * text.heads * query
        keys = hidden * (latent + text.number("qk_rope_head_dim"))
        return (
            queries
            + keys
            + latent * text.heads * (text.number("qk_nope_head_dim") + value)
            + text.heads * value * hidden
        )
    queries = text.heads * text.head_dim
    gate = queries if text.kind in GATED_ATTENTION else 0
    return hidden * (2 * queries + gate + 2 * text.kv_heads * text.head_dim)


def is_sparse(text: Text, index: int) -> bool:
    """Whether this layer's feed-forward part is a mixture."""
    if not experts(text.given) or index < text.number("first_k_dense_replace"):
        return False
    dense = text.given.get("mlp_only_layers")
    return not (isinstance(dense, list) and index in dense) and (index + 1) % text.number("decoder_sparse_step", 1) == 0


def _feed_forward(text: Text, *, sparse: bool) -> int:
    matrices = 2 if text.kind in UNGATED else 3
    if not sparse:
        return matrices * text.hidden * text.intermediate
    count, own = experts(text.given), text.number("moe_intermediate_size", text.intermediate)
    latent = text.number("moe_latent_size")
    shared = (
        text.number("shared_expert_intermediate_size")
        or text.number("moe_shared_expert_intermediate_size")
        or text.number("n_shared_experts") * own
    )
    routed = count * matrices * (latent or text.hidden) * own + count * text.hidden
    return routed + matrices * text.hidden * shared + 2 * text.hidden * latent


def _vision(config: Config) -> int:
    """Layers of a vision tower, which is kept as it is, and what merges patches for the text model."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or model_type(config) in ("qwen3_5_text", "qwen3_5_moe_text"):
        return 0  # of Qwen3.5 the text model alone is loaded
    hidden, inner = _number(vision, "hidden_size"), _number(vision, "intermediate_size")
    layers = (_number(vision, "depth") or _number(vision, "num_hidden_layers")) * hidden * (4 * hidden + 2 * inner)
    merged = hidden * (_number(vision, "spatial_merge_size") or 2) ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    return layers + (mergers * merged * (merged + out) if (out := _number(vision, "out_hidden_size")) else 0)
