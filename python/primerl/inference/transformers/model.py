"""A model of `transformers` that computes steps of a whole batch, with what its sequences leave in slots.

    step ── sequences that continue by one token      ──> one forward pass, [C, 1]
         └─ others with equally many tokens and starts ──> one forward pass each, [C, Q]

No forward pass has padding among its new tokens, which a state would take in.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.inference.torch.shape import eos_token_ids
from primerl.inference.torch.step import longest_of
from primerl.inference.transformers.attention import ATTENTION, cached_attention, computing
from primerl.inference.transformers.cache import Rows, RowsCache, Slots
from primerl.inference.transformers.kernels import choose_by_device
from primerl.inference.transformers.weights import published_views
from primerl.train.model.architectures import decoder, limit_of_positions
from primerl.train.model.import_once import import_transformers
from primerl.train.model.packed_model import load_model, output_head
from primerl.train.model.router_replay import ChosenExperts
from primerl.train.model.support import text_config

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of a config that say how long a sequence may be, by family."""
CACHES = ("past_key_values", "cache_params")
"""Names of the argument that is the cache."""


class CachedModel:
    """Weights, and slots for `slots` sequences; `tensors` are views of the weights under the names of a checkpoint."""

    def __init__(self, folder: Path, *, dtype: str, slots: int, max_len: int | None, device: torch.device) -> None:
        """Raises ValueError: the model, or sequences of this length, cannot be served."""
        import_transformers()
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, cached_attention)
        self.model = load_model(folder, dtype, device, ATTENTION).eval().requires_grad_(False)
        choose_by_device(self.model)
        config = self.model.config.get_text_config()
        self.slots, self.max_len, self.device = slots, longest(config, max_len), device
        self.dtype: torch.dtype = self.model.dtype
        self.tensors = published_views(self.model)
        self._head = output_head(self.model)
        self.vocab_size = self._head.weight.shape[0]
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.eos_token_ids = eos_token_ids(text_config(content), folder) or eos_token_ids(content, folder)
        self._decoder = decoder(self.model)
        self._experts: ChosenExperts | None = None
        self.expert_bytes = 1
        """Bytes of an expert's number in what is reported."""
        self.chosen: Tensor | None = None
        """Experts of the last step's tokens, [N, layers, k] int64, where they are reported."""
        self._slots = Slots(config, slots, self.max_len, device)
        names = inspect.signature(self._decoder.forward).parameters
        self._cache = next((name for name in CACHES if name in names), CACHES[0])

    def report_experts(self) -> None:
        """From the next step on. Raises ModelError: it has no routers that can be seen."""
        self._experts = ChosenExperts(self.model)
        self.expert_bytes = 1 if max(self._experts.experts) <= 256 else 2

    def weights_changed(self) -> None:
        """The model computes with the memory of `tensors`, and with nothing that is made from it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocabulary] of rows of `hidden`."""
        return self._head.logits(hidden)

    def hidden(self, token_ids: Tensor, slots: Tensor, query_lens: Tensor, context_lens: Tensor) -> Tensor:
        """Last hidden states [N, H], on the model's device. All arguments are on the CPU, int64: the tokens [N] of one
        sequence after another, and of each sequence its slot, how many tokens it has here, and how many with these."""
        counts, starts = query_lens.tolist(), (context_lens - query_lens).tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (count, start) in enumerate(zip(counts, starts, strict=True)):
            # Those that continue by one token may be at any place.
            key = (-1, 1) if count == 1 and start else (start, count)
            groups.setdefault(key, []).append(index)
        firsts = (query_lens.cumsum(0) - query_lens)[:, None]
        answer: Tensor | None = None
        self.chosen = None
        for (_, count), members in groups.items():
            places = (firsts[members] + torch.arange(count)).flatten()
            rows = Rows.of(slots[members].tolist(), [starts[index] for index in members], count, self.device)
            states = self._forward(token_ids[places].view(len(members), count).to(self.device), rows).flatten(0, 1)
            if answer is None:
                answer = states.new_empty(len(token_ids), states.shape[1])
            answer.index_copy_(0, places.to(self.device), states)
            if self._experts is not None:
                self._keep_experts(self._experts.take(), places, len(token_ids))
        assert answer is not None
        return answer

    def _keep_experts(self, chosen: Tensor, places: Tensor, tokens: int) -> None:
        """Those of the step's tokens at `places`, on the CPU as they are."""
        if self.chosen is None:
            self.chosen = torch.empty(tokens, *chosen.shape[1:], dtype=torch.int64)
        self.chosen[places] = chosen.cpu()

    def _forward(self, token_ids: Tensor, rows: Rows) -> Tensor:
        """[C, Q] -> [C, Q, H]"""
        cache = RowsCache(self._slots, rows)
        with computing(rows):
            output = self._decoder(
                input_ids=token_ids, position_ids=rows.positions, use_cache=True, **{self._cache: cache}
            )
        cache.keep()
        states: Tensor = output.last_hidden_state
        return states

    def at_once(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden states [n, H] and logits [n, V] of one sequence, without a cache."""
        rows = Rows.of([0], [0], len(token_ids), self.device)
        given = {"input_ids": token_ids[None].to(self.device), "position_ids": rows.positions, "use_cache": False}
        with computing(rows):
            states, logits = self._decoder(**given).last_hidden_state, self.model(**given).logits
        return states[0], logits[0].float()


def longest(config: Any, max_len: int | None) -> int:
    """The longest sequence to serve. Raises ValueError where the model cannot have it."""
    named = (getattr(config, name, None) for name in POSITIONS)
    positions = next((value for value in named if isinstance(value, int)), None)
    if positions is None and max_len is None:
        raise ValueError("max_model_len: set it; the model's config.json names no longest sequence")
    found = max_len if positions is None or max_len is None else longest_of(max_len, positions)
    count = found or positions
    assert count is not None
    limit = limit_of_positions(config, [count, 1])
    if limit is not None:
        raise ValueError(
            f"max_model_len: the model computes positions differently above {limit} tokens, so longer and shorter "
            f"sequences cannot be batched together; set it to {limit} at most"
        )
    return count
