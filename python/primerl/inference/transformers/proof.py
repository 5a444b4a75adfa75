"""Proves before an engine serves, on a few random tokens, that a model computes in parts what it computes at once.

What a model remembers of a sequence has to be in the slots, all of it: keys and values, states of convolutions and of
linear attention. Where something else is remembered, or a cache is used in a way of its own, a model would silently
sample from something else than is trained. So each is tried, and refused with the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from primerl.inference.transformers.model import CachedModel
from primerl.train.model.packed_model import ModelError
from primerl.train.model.proof import TOLERANCE
from primerl.train.model.recurrent import longest_chunk

LONG, SHORT = 13, 9
"""Tokens of the two sequences; the first one is longer by what a scan computes at once."""


@torch.inference_mode()
def prove(model: CachedModel) -> None:
    """Raises ModelError."""
    name = type(model.model).__name__
    one, other = _random(model)
    try:
        whole = [model.at_once(one), model.at_once(other)]
        found = _in_parts(model, one, other)
        own = model.logits(whole[0][0])
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{name} cannot compute a sequence in parts ({type(error).__name__}: {error}); serve this model with vLLM"
        ) from error
    tolerance = TOLERANCE[model.dtype]
    for (alone, _), states in zip(whole, found, strict=True):
        if not _near(states, alone, tolerance):
            raise ModelError(
                f"{name}: hidden states computed in parts differ from those computed at once, so this engine's cache "
                "misses a part of the model's state; serve this model with vLLM"
            )
    if not _near(own, whole[0][1], tolerance):
        raise ModelError(
            f"{name}: its logits are not those of its output layer (with a bias, a scale and a soft cap, as its config "
            "names them); serve this model with vLLM"
        )


def _random(model: CachedModel) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    words = min(model.vocab_size, model.model.get_input_embeddings().num_embeddings)
    lengths = (min(LONG + longest_chunk(model.model), model.max_len), min(SHORT, model.max_len))
    one, other = (torch.randint(words, (length,), generator=random) for length in lengths)
    return one, other


def _in_parts(model: CachedModel, one: Tensor, other: Tensor) -> list[Tensor]:
    """Hidden states of both: each in two parts, then their last tokens together, one at a time."""
    # Where there is one slot only, the second sequence takes the first one's.
    sequences = {0: one, model.slots - 1: other}
    found: dict[int, list[Tensor]] = {slot: [] for slot in sequences}
    last = min(3, len(other) - 1)
    for slot, token_ids in sequences.items():
        begin, end = max(1, len(token_ids) - last - 4), len(token_ids) - last
        for part in ((0, begin), (begin, end)):
            if part[0] < part[1]:
                found[slot].append(_compute(model, [(slot, token_ids, *part)]))
    for step in range(last, 0, -1):
        parts = [(slot, ids, len(ids) - step, len(ids) - step + 1) for slot, ids in sequences.items()]
        states = _compute(model, parts)
        for index, slot in enumerate(sequences):
            found[slot].append(states[index : index + 1])
    return [torch.cat(states) for states in found.values()]


def _compute(model: CachedModel, parts: list[tuple[int, Tensor, int, int]]) -> Tensor:
    """`parts`: slot, token ids, and which of them."""
    return model.hidden(
        torch.cat([token_ids[begin:end] for _, token_ids, begin, end in parts]),
        torch.tensor([slot for slot, *_ in parts]),
        torch.tensor([end - begin for *_, begin, end in parts]),
        torch.tensor([end for *_, end in parts]),
    )


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one.float() - other.float()).norm() <= tolerance * other.float().norm())
