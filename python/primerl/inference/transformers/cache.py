"""What sequences leave behind, in slots: keys and values of attention, states of convolutions and of linear attention.

`Slots` holds it for all sequences of the engine. `Rows` says which sequences one forward pass computes, and `RowsCache`
is what `transformers` sees of them: one of its caches, whose attention layers read and write the slots, and whose
layers with a state get copies of it, which `RowsCache.keep` writes back.

A slot needs no clearing: a sequence that begins starts from no state, and overwrites keys and values before they are
seen. So one that was cancelled leaves nothing to free but its slot, which the scheduler gives to another.

Axes: C sequences of a forward pass, Q tokens of each, L longest context, K key heads, D head size, S slots,
M longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from primerl.inference.torch.model import empty_cache

MaskKey = tuple[int, int | None, int | None]


@dataclass
class Rows:
    """Sequences that one forward pass computes, the same number of tokens of each."""

    slots: Tensor  # [C] int64
    starts: Tensor  # [C] int64: tokens of each that are in its slot already; either all 0, or none
    length: int
    """Q."""
    context: int
    """L: the largest start, and `length`."""
    begins: bool
    """Whether they start with these tokens."""
    masks: dict[MaskKey, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: list[int], starts: list[int], length: int, device: torch.device) -> Rows:
        return cls(
            torch.tensor(slots, device=device),
            torch.tensor(starts, device=device),
            length,
            max(starts) + length,
            max(starts) == 0,
        )

    @property
    def positions(self) -> Tensor:
        """[C, Q] int64, counted within each sequence."""
        return self.starts[:, None] + torch.arange(self.length, device=self.starts.device)

    def mask(self, keys: int, window: int | None, chunk: int | None) -> Tensor | None:
        """Which of the first `keys` positions a token sees, [C, 1, Q, keys] bool; None where those up to its own are
        all that there are. `window`: how many it sees at most; `chunk`: it sees those of its own chunk only."""
        wanted = (keys, window, chunk)
        if wanted not in self.masks:
            self.masks[wanted] = self._mask(*wanted)
        return self.masks[wanted]

    def _mask(self, keys: int, window: int | None, chunk: int | None) -> Tensor | None:
        narrow = (window is not None and self.context > window) or (chunk is not None and self.context > chunk)
        if self.begins and not narrow:
            return None
        own, other = self.positions.unsqueeze(-1), torch.arange(keys, device=self.starts.device)
        seen = other <= own
        if window is not None:
            seen &= other > own - window
        if chunk is not None:
            seen &= other // chunk == own // chunk
        return seen.unsqueeze(1)


class Slots:
    """Keys, values and states of `count` sequences of at most `longest` tokens. Memory is taken when a layer first
    has something to keep."""

    def __init__(self, config: Any, count: int, longest: int, device: torch.device) -> None:
        """Raises ValueError where `transformers` has no cache for a layer of this config."""
        self.count, self.longest, self.device = count, longest, device
        try:
            self.kinds = [type(layer) for layer in DynamicCache(config=config).layers]
            self.states_of = [getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers]
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"transformers has no cache for its layers: {type(error).__name__}: {error}") from None
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[tuple[int, str, int], Tensor] = {}

    def extend(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the new keys and values [C, K, Q, D] of a layer; returns all of these sequences, [C, K, L, D]."""
        if layer not in self._pairs:
            sizes = [(self.count, self.longest, one.shape[1], one.shape[3]) for one in (keys, values)]
            self._pairs[layer] = (
                empty_cache(sizes[0], keys.dtype, self.device),
                empty_cache(sizes[1], values.dtype, self.device),
            )
        places = (rows.slots[:, None] * self.longest + rows.positions).flatten()
        found = []
        for kept, new in zip(self._pairs[layer], (keys, values), strict=True):
            # [C, K, Q, D] -> [C * Q, K, D]
            kept.view(-1, *kept.shape[2:]).index_copy_(0, places, new.transpose(1, 2).flatten(0, 1))
            if rows.begins:
                found.append(new)
            else:
                found.append(kept[:, : rows.context].index_select(0, rows.slots).transpose(1, 2))
        return found[0], found[1]

    def state(self, layer: int, kind: str, index: int, rows: Rows) -> Tensor | None:
        """A copy of these sequences' states of a layer, [C, ...]."""
        kept = self._states.get((layer, kind, index))
        return None if kept is None else kept.index_select(0, rows.slots)

    def keep_state(self, layer: int, kind: str, index: int, rows: Rows, state: Tensor) -> None:
        key = (layer, kind, index)
        if key not in self._states:
            self._states[key] = state.new_zeros(self.count, *state.shape[1:])
        self._states[key].index_copy_(0, rows.slots, state)


class RowsCache(Cache):
    """The cache of one forward pass."""

    def __init__(self, slots: Slots, rows: Rows) -> None:
        layers: list[Any] = []
        for index, kind in enumerate(slots.kinds):
            attends = issubclass(kind, CacheLayerMixin)
            if issubclass(kind, LinearAttentionCacheLayerMixin):
                mixed = _StateAndPairs if attends else _State
                layers.append(mixed(slots, rows, index, slots.states_of[index]))
            else:
                layers.append(_Pairs(slots, rows, index))
        super().__init__(layers=layers)

    def keep(self) -> None:
        """To be called after the forward pass."""
        for layer in self.layers:
            if isinstance(layer, _State):
                layer.keep()


class _Pairs(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a layer of attention."""

    is_sliding = False

    def __init__(self, slots: Slots, rows: Rows, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots, self._rows, self._index = slots, rows, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is to be prepared."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._slots.extend(self._index, self._rows, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.context, 0

    def get_seq_length(self) -> int:
        return self._rows.context - self._rows.length

    def get_max_length(self) -> int:
        return -1


class _State(LinearAttentionLayer):
    """States of a layer, as `transformers` holds them for these sequences."""

    def __init__(self, slots: Slots, rows: Rows, index: int, states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self._slots, self._rows, self._index = slots, rows, index
        if not rows.begins:
            for place in range(states):
                self._begin_from(place)

    def _begin_from(self, place: int) -> None:
        convolution = self._slots.state(self._index, "conv", place, self._rows)
        recurrent = self._slots.state(self._index, "recurrent", place, self._rows)
        if convolution is not None:
            self.conv_states[place], self.is_conv_states_initialized[place] = convolution, True
            self.conv_kernel_size[place] = convolution.shape[-1]
            self.dtype: Any = convolution.dtype
            self.device: Any = convolution.device
        if recurrent is not None:
            self.recurrent_states[place], self.is_recurrent_states_initialized[place] = recurrent, True
        self.has_previous_state[place] = convolution is not None or recurrent is not None

    def keep(self) -> None:
        for kind, states in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            for place, state in states.items():
                if state is not None:
                    self._slots.keep_state(self._index, kind, place, self._rows, state)


class _StateAndPairs(_State, _Pairs):  # type: ignore[no-untyped-call]
    """What a layer with a state and attention leaves."""

    is_croppable = False

    def __init__(self, slots: Slots, rows: Rows, index: int, states: int) -> None:
        _Pairs.__init__(self, slots, rows, index)
        _State.__init__(self, slots, rows, index, states)
