"""What the attention of each layer multiplies, as a model's config tells it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Attention:
    """Of one layer."""

    width: float
    """Query heads times the mean of a query's and a value's size."""
    window: int | None = None
    """Keys that a query sees at most, its own included."""
    chunk: int | None = None
    """Tokens of a sequence that are attended to by themselves."""

    def products(self, lengths: Iterable[int]) -> float:
        """The width times the pairs of query and key."""
        return self.width * sum(_pairs(part, self.window) for length in lengths for part in self._parts(length))

    def _parts(self, length: int) -> list[int]:
        if self.chunk is None or length <= self.chunk:
            return [length]
        whole, rest = divmod(length, self.chunk)
        return [self.chunk] * whole + [rest] * bool(rest)


COMPUTE_MORE = {
    "hrm_text": "it runs its layers several times",
    "diffllama": "it attends twice in a layer",
    "jetmoe": "its attention has experts",
}
"""Architectures that the formula does not hold of -> why."""

WITH_STATE = {"linear_attention", "mamba", "conv", "hybrid"}
"""Of `layer_types`: layers that carry a state from token to token, or mix neighbours by a convolution."""


def attentions(config: Any) -> tuple[Attention, ...]:
    """Of all layers of a model with this text config. Raises ValueError."""
    if config.model_type in COMPUTE_MORE:
        raise ValueError(f"{config.model_type}: {COMPUTE_MORE[config.model_type]}")
    kinds = getattr(config, "layer_types", None)
    if not WITH_STATE.isdisjoint(kinds or ()):
        raise ValueError(f"{config.model_type}: the formula does not count what layers with a state compute")
    layers = int(config.num_hidden_layers)
    # What differs from layer to layer is not to be read from the config as a whole.
    each = getattr(config, "per_layer_config", None) or [config] * layers
    found = []
    for index in range(layers):
        kind = kinds[index] if kinds else None
        found.append(_attention(each[index], kind))
    return tuple(found)


def _attention(config: Any, kind: str | None) -> Attention:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = getattr(config, "qk_rope_head_dim", None)
    query = size if rotary is None else config.qk_nope_head_dim + rotary
    value = getattr(config, "v_head_dim", None) or size
    width = heads * (query + value) / 2
    window = getattr(config, "sliding_window", None) if kind in (None, "sliding_attention") else None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return Attention(width, window, chunk)


def _pairs(length: int, window: int | None) -> int:
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
