"""A decoder for the Llama, Qwen2 and Qwen3 family that computes one step of a whole batch against slots of KV.

Axes: N tokens of the batch, C sequences of a segment, Q tokens of a padded query, L context, H heads, K KV heads,
G = H / K, D head_dim, S slots, M longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from primerl.inference.backend import UnservableError
from primerl.inference.torch.shape import Shape


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor  # [(H + 2K) D, hidden]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + K, D]: the query's weight for each query head, the key's for each key head
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor  # [2 intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    keys: Tensor  # [S, M, K, D]
    values: Tensor  # [S, M, K, D]


@dataclass(frozen=True)
class Segment:
    """Consecutive sequences of a batch whose attention is one padded block; see `primerl_engine_server::batch`."""

    rows: slice  # of the batch's tokens
    slots: slice | Tensor  # [C]
    count: int
    query_len: int
    context_len: int
    scatter: Tensor | None  # [rows]: place of each token in the padded query [C * Q]; None where nothing is padded
    mask: Tensor  # [C, 1, Q * G, L], added to the scores


class Decoder:
    """Weights and KV of one model. Weights lie in fused buffers; `tensors` are views of them under checkpoint names."""

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: torch.dtype,
        slots: int,
        max_len: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    ) -> None:
        """Raises ValueError where the KV cache does not fit into the machine's memory, torch.OutOfMemoryError where it
        or the weights do not fit into the GPU's."""
        self.shape = shape
        self.vocab_size, self.eos_token_ids = shape.vocab_size, shape.eos_token_ids
        self.dtype = dtype
        self.device = device
        self.slots = slots
        self.max_len = max_len
        self.tensors: dict[str, Tensor] = {}
        self._qk_norms: list[tuple[Tensor, Tensor, Tensor]] = []
        hidden = shape.hidden_size
        self.embedding = self._new("model.embed_tokens.weight", shape.vocab_size, hidden)
        self.layers = [self._layer(index) for index in range(shape.layers)]
        self.norm = self._new("model.norm.weight", hidden)
        self.head = self.embedding if shape.tied_embeddings else self._new("lm_head.weight", shape.vocab_size, hidden)
        self.cos, self.sin = self._rotations()

    # Weights ------------------------------------------------------------------------------------------------------

    def _new(self, name: str, *size: int) -> Tensor:
        self.tensors[name] = self._empty(*size)
        return self.tensors[name]

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _fused(self, prefix: str, parts: dict[str, int], kind: str, *columns: int) -> Tensor:
        """One buffer of several tensors stacked along rows, each of which stays addressable by its name."""
        buffer = self._empty(sum(parts.values()), *columns)
        for name, view in zip(parts, torch.split(buffer, list(parts.values())), strict=True):
            self.tensors[f"{prefix}.{name}.{kind}"] = view
        return buffer

    def _layer(self, index: int) -> Layer:
        shape, prefix = self.shape, f"model.layers.{index}"
        hidden, wide = shape.hidden_size, shape.intermediate_size
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = {"q_proj": query, "k_proj": key, "v_proj": key}
        gate_up = {"gate_proj": wide, "up_proj": wide}
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            input_norm=self._new(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(attention, qkv, "weight", hidden),
            qkv_bias=self._fused(attention, qkv, "bias") if shape.qkv_bias else None,
            qk_norm=self._qk_norm(attention) if shape.qk_norm else None,
            output=self._new(f"{attention}.o_proj.weight", hidden, query),
            output_bias=self._new(f"{attention}.o_proj.bias", hidden) if shape.output_bias else None,
            post_norm=self._new(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused(mlp, gate_up, "weight", hidden),
            gate_up_bias=self._fused(mlp, gate_up, "bias") if shape.mlp_bias else None,
            down=self._new(f"{mlp}.down_proj.weight", hidden, wide),
            down_bias=self._new(f"{mlp}.down_proj.bias", hidden) if shape.mlp_bias else None,
            keys=self._cache(),
            values=self._cache(),
        )

    def _qk_norm(self, prefix: str) -> Tensor:
        """Queries and keys are normalised in one call, so their weights are repeated for each head."""
        query = self._new(f"{prefix}.q_norm.weight", self.shape.head_dim)
        key = self._new(f"{prefix}.k_norm.weight", self.shape.head_dim)
        repeated = self._empty(self.shape.heads + self.shape.kv_heads, self.shape.head_dim)
        self._qk_norms.append((repeated, query, key))
        return repeated

    def weights_changed(self) -> None:
        """To be called after `tensors` were written."""
        for repeated, query, key in self._qk_norms:
            repeated[: self.shape.heads] = query
            repeated[self.shape.heads :] = key

    def _cache(self) -> Tensor:
        size = (self.slots, self.max_len, self.shape.kv_heads, self.shape.head_dim)
        return empty_cache(size, self.dtype, self.device)

    def _rotations(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [M, 1, D]; the sign of `rotate_half` is in the sines."""
        frequencies = torch.tensor(self.shape.rope.inverse_frequencies(self.shape.head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(self.max_len, dtype=torch.float32), frequencies)
        cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        # Computed on the CPU, so that they are the same on any device.
        cos, sin = (angle.to(self.dtype).to(self.device).unsqueeze(1) for angle in (cos, sin))
        return cos, sin

    # Computation --------------------------------------------------------------------------------------------------

    def forward(self, token_ids: Tensor, positions: Tensor, cache_rows: Tensor, segments: list[Segment]) -> Tensor:
        """Hidden states before the final norm, [N, hidden]. `cache_rows` [N] = slot * M + position of each token."""
        x = functional.embedding(token_ids, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = x + self._attention(layer, self._norm(x, layer.input_norm), cos, sin, cache_rows, segments)
            gate, up = functional.linear(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(
                2, dim=-1
            )
            x = x + functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocabulary] of rows of `forward`."""
        return functional.linear(self._norm(hidden, self.norm), self.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # In float32 whatever the weights' type, as the reference models do.
        return weight * functional.rms_norm(x.float(), x.shape[-1:], eps=self.shape.rms_norm_eps).to(self.dtype)

    def _attention(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache_rows: Tensor, segments: list[Segment]
    ) -> Tensor:
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        qk, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        qk = qk * cos + qk.roll(head_dim // 2, dims=-1) * sin
        query, key = qk[:, :heads], qk[:, heads:]
        layer.keys.view(-1, kv_heads, head_dim).index_copy_(0, cache_rows, key)
        layer.values.view(-1, kv_heads, head_dim).index_copy_(0, cache_rows, value)
        parts = [self._attend(layer, query[segment.rows], segment) for segment in segments]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return functional.linear(attended, layer.output, layer.output_bias)

    def _attend(self, layer: Layer, query: Tensor, segment: Segment) -> Tensor:
        """[rows, H, D] -> [rows, H D]. The G query heads of a KV head are laid side by side as queries of it."""
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        count, length, groups = segment.count, segment.query_len, heads // kv_heads
        if segment.scatter is not None:
            padded = query.new_zeros(count * length, heads, head_dim)
            query = padded.index_copy_(0, segment.scatter, query)
        query = (
            query.reshape(count, length, kv_heads, groups, head_dim)
            .transpose(1, 2)
            .reshape(count, kv_heads, length * groups, head_dim)
        )
        keys = self._gather(layer.keys, segment)
        values = self._gather(layer.values, segment)
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=segment.mask)
        attended = attended.view(count, kv_heads, length, groups, head_dim).transpose(1, 2)
        attended = attended.reshape(count * length, heads * head_dim)
        return attended if segment.scatter is None else attended.index_select(0, segment.scatter)

    def _gather(self, cache: Tensor, segment: Segment) -> Tensor:
        """[C, K, L, D]; a view where the segment's slots lie side by side."""
        short = cache[:, : segment.context_len]
        picked = short[segment.slots] if isinstance(segment.slots, slice) else short.index_select(0, segment.slots)
        return picked.transpose(1, 2)


def empty_cache(size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [slots, longest sequence, heads, head size]. Raises ValueError where the machine has no memory for it."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # calloc: pages are zero (a masked NaN would still spoil a sum) and cost memory only once they are used.
    try:
        words = np.zeros(size, dtype=np.uint16 if dtype.itemsize == 2 else np.uint32)
    except (MemoryError, ValueError):  # more than there is, or than an array may have
        raise ValueError(
            f"max_num_seqs: {size[0]} sequences of max_model_len ({size[1]}) tokens need more memory for "
            "their KV cache than this machine gives; lower one of the two"
        ) from None
    return torch.from_numpy(words).view(dtype)


def load_folder(decoder: Decoder, folder: Path) -> None:
    """Fills `decoder` from the safetensors files of a model folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnservableError.at("model.path", f"{folder} holds no *.safetensors files")
    missing = set(decoder.tensors)
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name == "lm_head.weight" and decoder.shape.tied_embeddings:
                    continue
                target, source = decoder.tensors.get(name), tensors.get_tensor(name)
                if target is None or target.shape != source.shape:
                    expected = "no such tensor" if target is None else f"shape {list(target.shape)}"
                    raise UnservableError.at(
                        "model.path", f"{file}: {name} has shape {list(source.shape)}, config.json implies {expected}"
                    )
                target.copy_(source)
                missing.discard(name)
    if missing:
        raise UnservableError.at("model.path", f"{folder} lacks {len(missing)} tensors, e.g. {sorted(missing)[:3]}")
    decoder.weights_changed()
