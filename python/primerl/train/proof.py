"""Before a model is trained: proof, on a few random tokens, that it computes here what it computes by itself.

Packing is exact only where nothing but attention looks at other tokens, and log-probabilities are right only where
the output layer is understood. Both differ between architectures, and a model for which one does not hold would be
trained on something else without a sign of it. So it is tried, and refused with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primerl.train.model import ModelError, PackedSequences, output_head, predicted_hidden
from primerl.train.parallel import packed_logprobs

LENGTHS = (7, 9, 5)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Of the norm of the difference, as a share of the values': sums are in another order, and in bf16 a router may then
choose another of two experts that are nearly equal. What is not exact is off by the values' own size."""


def prove(model: Any) -> None:
    """Raises ModelError."""
    name = type(model).__name__
    _check_config(model, name)
    sequences = list(torch.split(_random_tokens(model)[0], list(LENGTHS)))
    with torch.no_grad():
        alone = _states(model, [sequences[1]])
        packed = _states(model, sequences)[LENGTHS[0] - 1 : LENGTHS[0] + LENGTHS[1] - 2]
        logits = _own_logits(model, sequences[1])
        ours = output_head(model).logits(alone)
    tolerance = TOLERANCE[alone.dtype]
    if not _near(packed, alone, tolerance):
        raise ModelError(
            f"{name}: a sequence's hidden states depend on the sequences it is packed with; something besides its "
            "attention looks at other tokens, so packing is not exact and the architecture is not supported"
        )
    if logits.shape != ours.shape or not _near(ours, logits, tolerance):
        raise ModelError(
            f"{name}: its logits are not those of its output layer (with a bias, a scale and a soft cap, as its config "
            "names them); the architecture is not supported"
        )


def sample(model: Any) -> list[float]:
    """Log-probabilities of a few random tokens."""
    token_ids, packed = _random_tokens(model)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    with torch.no_grad():
        logprobs, _ = packed_logprobs(model, token_ids, packed, targets)
    found: list[float] = logprobs.tolist()
    return found


def check_same(model: Any, expected: list[float], dtype: torch.dtype) -> None:
    """Of a model that is divided among ranks, which computes in `dtype`: it has to compute what it did before. All
    ranks have to call it. Raises ModelError."""
    found = sample(model)
    if not _near(torch.tensor(found), torch.tensor(expected), TOLERANCE[dtype]):
        raise ModelError(
            f"{type(model).__name__}: divided among ranks it computes something else than whole; the architecture is "
            "not supported on several ranks: train it on one"
        )


def _random_tokens(model: Any) -> tuple[Tensor, PackedSequences]:
    device = next(model.parameters()).device
    most = min(model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size)
    token_ids = torch.randint(0, most, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    return token_ids, PackedSequences.from_lengths(LENGTHS, device)


def _check_config(model: Any, name: str) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(
            f"{name} has layers of type {', '.join(sorted(kinds))}; only full and sliding attention are exact"
        )
    for where, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} has dropout ({where}, {module.p}): the trainer's probabilities would not be the engine's; set "
                "it to 0 in config.json"
            )


def _states(model: Any, sequences: list[Tensor]) -> Tensor:
    """Hidden states of all tokens but the last one of each sequence."""
    token_ids = torch.cat(sequences)
    packed = PackedSequences.from_lengths([len(sequence) for sequence in sequences], token_ids.device)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    return predicted_hidden(model, token_ids, packed, targets)


def _own_logits(model: Any, token_ids: Tensor) -> Tensor:
    packed = PackedSequences.from_lengths([len(token_ids)], token_ids.device)
    output = model(input_ids=token_ids.unsqueeze(0), position_ids=packed.position_ids, use_cache=False, packed=packed)
    logits: Tensor = output.logits[0, :-1].float()
    return logits


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not (bool(one.isfinite().all()) and bool(other.isfinite().all())):
        return True  # The loss will say so, and name what it was computed from.
    return bool((one.float() - other.float()).norm() <= tolerance * other.float().norm())
