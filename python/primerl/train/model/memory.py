"""Memory of one device that trains or serves a model, estimated from `config.json` alone. Imports no torch.

    training   of each of N ranks that divide a model of P parameters, and each train rows of T tokens
    serving    of each of N devices that serve it: weights, and the keys and values of one token

    weights       4 P / N, fp32;  one rank that computes in bf16: 6 P, with its bf16 weights
    gradients     4 P / N, fp32: they are scattered to their ranks after each micro-batch
    optimizer     8 P / N, AdamW's moments
    activations   what the forward pass of one row keeps for the backward pass
    temporary     the rest of the peak, which is one of these:
                    begin   logits of a chunk of tokens, the gradient of the output layer
                    middle  weights of two layers (one is computed, one is fetched) and gradients of one
                    end     gradients of the embeddings
                  each with the whole weights of the layer, and of the embeddings, where several ranks divide them

With an adapter P counts in `weights` alone; gradients and moments are of its own parameters.

Bytes of a token in one layer are counted from what autograd keeps of `transformers`' unfused code (`_kept`), less what
norms by a kernel do not keep. Layers with a state are counted as torch code computes them (`_scanned`); kernels of
packages keep less. Tests compare totals with the peak of a step that runs, on a CPU (tests/test_train_memory.py);
scripts/gpu_check.sh does it on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primerl.train.model.footprint import ADAPTED, GATED_ATTENTION, UNGATED, Text, matrices, parameters
from primerl.train.model.support import Config, experts

Checkpointing = Literal["none", "full", "selective"]

CHUNK_ELEMENTS = 2**26
"""Logits of a chunk: `primerl.train.objective.logprobs.CHUNK_ELEMENTS`."""
CHUNK_BYTES = 12
"""Bytes of a logit of a chunk: itself in fp32, its gradient, and what is computed on the way."""
SINGLE, HALF = 4, 2
DELTA_CHUNK = 64
"""Tokens that the gated delta rule computes at once."""
MAMBA_CHUNK = 128
"""Tokens that a Mamba-2 scan computes at once where its config says nothing."""
WITH_QK_NORM = ("apertus", "exaone4", "gemma3_text", "gemma4_text", "olmo2", "olmo3", "qwen3", "qwen3_moe")
"""Types that normalise queries and keys of each head."""
ADD_ONE = ("gemma", "qwen3_5", "qwen3_next", "recurrent_gemma", "vaultgemma")
"""Beginnings of types whose norms add 1 to their weights, which no kernel computes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True, slots=True)
class Serving:
    """Bytes on each device of an engine."""

    weights: int
    token: int
    """Keys and values of one token, in all layers."""


def training(
    config: Config,
    ranks: int,
    seq_len: int,
    checkpointing: Checkpointing,
    *,
    adapter: bool,
    replicas: int = 1,
    half: bool = True,
    on_gpu: bool = True,
) -> Memory | None:
    """Memory of each of `ranks` ranks that train rows of `seq_len` tokens; None where config.json lacks the usual keys.

    Args:
        adapter: Only an adapter is trained, of rank 16 or so.
        replicas: Groups of ranks that each hold the whole model between them.
        half: The model computes in bf16, else in fp32.
        on_gpu: Norms are computed by a kernel (`primerl.train.model.norms`), else by `transformers`' unfused code.
    """
    text, count = Text.of(config), parameters(config)
    if text is None or count is None:
        return None
    shares, trained = ranks // replicas, int(count * ADAPTED) if adapter else count
    bytes_of = HALF if half else SINGLE
    if shares > 1 or not half:
        weights = (SINGLE * count + (SINGLE * trained if adapter else 0)) // shares
    else:
        weights = HALF * count + SINGLE * trained
    fused = on_gpu and not text.kind.startswith(ADD_ONE)
    kept, again = _activations(text, seq_len, checkpointing, bytes_of, adapter=adapter, fused=fused)
    peak = _peak(text, seq_len, kept, again, bytes_of, trains=not adapter, divided=ranks > 1)
    return Memory(
        weights=weights,
        gradients=SINGLE * trained // shares,
        optimizer=2 * SINGLE * trained // shares,
        activations=kept,
        temporary=peak - kept,
    )


def serving(config: Config, gpus: int, *, half: bool) -> Serving | None:
    """Memory of each of `gpus` GPUs that serve the model together; None where config.json lacks the usual keys."""
    text, count = Text.of(config), parameters(config)
    if text is None or count is None:
        return None
    bytes_of = HALF if half else SINGLE
    if latent := text.number("kv_lora_rank"):
        layer, divided_by = latent + text.number("qk_rope_head_dim"), 1
    else:
        # A head is whole on one GPU, and on several where there are more of them than heads.
        layer, divided_by = 2 * text.kv_heads * text.head_dim, min(gpus, text.kv_heads)
    attending = sum("attention" in block and block != "linear_attention" for block in text.blocks)
    return Serving(weights=bytes_of * count // gpus, token=bytes_of * layer * attending // divided_by)


def _peak(text: Text, tokens: int, kept: int, again: int, bytes_of: int, *, trains: bool, divided: bool) -> int:
    """Bytes besides weights, gradients and moments, at the highest point of a forward and backward pass. `kept`: of
    activations; `again`: of the layer that is computed again."""
    head = text.vocabulary * text.hidden
    embeddings = head if text.tied else 2 * head
    layer = max(matrices(text))
    whole = bytes_of * embeddings if divided else 0  # from the forward to the backward pass
    fetched = bytes_of * layer if divided else 0
    chunk = CHUNK_BYTES * min(CHUNK_ELEMENTS, tokens * text.vocabulary)
    # The output layer's gradient is summed over chunks in fp32.
    of_head = (SINGLE + (bytes_of if bytes_of != SINGLE else 0)) * head if trains else 0
    of_layer = (bytes_of + (SINGLE if divided else 0)) * layer if trains else 0
    held = bytes_of * head if trains else 0
    begin = kept + whole + fetched + chunk + of_head
    middle = kept + again + whole + 2 * fetched + held + of_layer + _working(text, tokens, bytes_of)
    end = whole + ((bytes_of + SINGLE) * embeddings if trains and divided else bytes_of * embeddings if trains else 0)
    return max(begin, middle, end)


def _working(text: Text, tokens: int, bytes_of: int) -> int:
    """Gradients of activations on their way through a layer; of a Mamba-2 scan also those of three matrices a chunk."""
    scan = 3 * SINGLE * text.number("mamba_num_heads") * text.number("chunk_size", MAMBA_CHUNK)
    return tokens * (bytes_of * (2 * text.hidden + 2 * _widest(text)) + scan)


def _widest(text: Text) -> int:
    own = text.number("moe_intermediate_size", text.intermediate)
    return text.number("num_experts_per_tok", 1) * own if experts(text.given) else text.intermediate


def _activations(
    text: Text, tokens: int, checkpointing: Checkpointing, bytes_of: int, *, adapter: bool, fused: bool
) -> tuple[int, int]:
    """Bytes that the forward pass keeps of one row, and those of a layer that the backward pass computes again."""
    layers = [_kept(text, block, bytes_of) for block in text.blocks]
    own = _less_of_norms(text, bytes_of, adapter=adapter, fused=fused)
    state = bytes_of * text.hidden
    head = _norm(bytes_of) * text.hidden + 3 * state  # the last norm, the predicted tokens' states, the embeddings
    most = tokens * (max(whole for whole, _ in layers) + own)
    match checkpointing:
        case "none":
            kept, most = sum(whole + own for whole, _ in layers), 0
        case "full":
            kept = state * len(layers)
        case "selective":
            kept = sum(products + state for _, products in layers)
    return tokens * (kept + head), most


def _less_of_norms(text: Text, bytes_of: int, *, adapter: bool, fused: bool) -> int:
    """Bytes of a token that a layer keeps less than its norms' unfused code does, as a number below 0: a kernel keeps
    its input alone; where only an adapter to linear layers is trained, normalised values are not kept, which gradients
    of the norms would need. The inputs of its linear layers are kept for the adapter's."""
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    normalised = (1 if text.mixes_alone else 2) * text.hidden + (queries + keys if text.kind in WITH_QK_NORM else 0)
    if fused:
        return -SINGLE * normalised
    return -bytes_of * normalised * (adapter and bytes_of != SINGLE)


def _norm(bytes_of: int) -> int:
    """Bytes of each value that an unfused norm keeps: its input in fp32, and the normalised value. Its result is kept
    as well, as the input of what follows."""
    return SINGLE + bytes_of


def _kept(text: Text, block: str, bytes_of: int) -> tuple[int, int]:
    """Bytes of a token that one layer keeps, and how many of them are results of matrix products and attention."""
    is_feed_forward = block in ("moe", "mlp")
    parts = [] if is_feed_forward else [_of_mixer(text, block, bytes_of)]
    if is_feed_forward or not text.mixes_alone:
        parts.append(_of_feed_forward(text, bytes_of))
    norm = (_norm(bytes_of) + bytes_of) * text.hidden
    whole = sum(norm + kept for kept, _ in parts)
    return whole, sum(bytes_of * text.hidden + products for _, products in parts)


def _of_mixer(text: Text, block: str, bytes_of: int) -> tuple[int, int]:
    if "attention" not in block or block == "linear_attention":
        projected, result = _state_widths(text, block)
        kept, products = _scanned(text, block)
        # The projection, its convolution, that one's activation; a norm with a gate.
        return bytes_of * 3 * projected + _norm(bytes_of) * result + kept, bytes_of * projected + products
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    gate = queries if text.kind in GATED_ATTENTION else 0
    attention = bytes_of * (2 * queries + 2 * keys + 2 * gate)  # rotated queries and keys, values, results
    of_heads = _norm(bytes_of) * (queries + keys) if text.kind in WITH_QK_NORM or gate else 0
    return attention + of_heads, attention


def _of_feed_forward(text: Text, bytes_of: int) -> tuple[int, int]:
    wide, routed = _widest(text), 0
    forward = 2 if text.kind in UNGATED else 4  # of a gated one: gate, its activation, up, their product
    if experts(text.given):
        # The rows of a token's experts, and its weights.
        routed = bytes_of * 2 * text.number("num_experts_per_tok", 1) * text.hidden + 3 * SINGLE * experts(text.given)
    return bytes_of * forward * wide + routed, bytes_of * (forward // 2) * wide


def _scanned(text: Text, block: str) -> tuple[int, int]:
    """Bytes of a token that `transformers`' torch code of a scan keeps, in fp32, and how many of them are results of
    matrix products. Counted by hooks of autograd on saved tensors."""
    if block == "linear_attention" and (heads := text.number("linear_num_value_heads")):
        key, value = text.number("linear_key_head_dim"), text.number("linear_value_head_dim")
        state = key * value // DELTA_CHUNK
        kept = 8 * key + 3 * value + state + 5 * DELTA_CHUNK
        return SINGLE * heads * kept, SINGLE * heads * (2 * DELTA_CHUNK + 3 * value + state)
    if heads := text.number("mamba_num_heads"):
        size, width, chunk = (
            text.number("mamba_head_dim"),
            text.number("ssm_state_size"),
            text.number("chunk_size", MAMBA_CHUNK),
        )
        state = size * width // chunk
        kept = 6 * size + 11 * width // 2 + 2 * chunk + state
        return SINGLE * heads * kept, SINGLE * heads * (chunk + 2 * size + 2 * state)
    return 0, 0


def _state_widths(text: Text, block: str) -> tuple[int, int]:
    """Width of what a layer with a state projects a token to, and of what it computes from that."""
    if block == "linear_attention" and text.number("linear_num_value_heads"):
        keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim")
        values = text.number("linear_num_value_heads") * text.number("linear_value_head_dim")
        return 2 * keys + 2 * values, values
    if inner := text.number("mamba_num_heads") * text.number("mamba_head_dim"):
        return 2 * inner + 2 * text.number("n_groups") * text.number("ssm_state_size"), inner
    return 2 * text.hidden, 0
