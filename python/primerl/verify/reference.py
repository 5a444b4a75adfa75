"""What `primerl verify` compares with, sharing nothing with the trainer, nor with the engine: log-probabilities of
truncated sampling in double precision (the trainer's are in `primerl.train.objective.truncation`), and adapters
merged by peft.

Where the edge of the kept set lies nearer to a token than rounding reaches, an engine may keep or drop that
token. So there are three sets: as the numbers say, and with all edges moved a little outwards and inwards.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.train.adapters.files import BASE_DIGEST, LORA_ALPHA, folder_digest, is_alpha

SLACK = 1e-4
"""How far edges are moved, in nats of a logit and in shares of the probability: well above what fp32 engines round."""


def truncated_logprobs(scaled: Tensor, token: int, *, top_p: float, top_k: int, min_p: float) -> list[float]:
    """Log-probability of a sampled token by each of the three sets.

    Args:
        scaled: [V], logits divided by the temperature.
    """
    ordered, order = scaled.double().sort(descending=True)
    place = int((order == token).nonzero())
    return [_logprob(ordered, place, top_p, top_k, min_p, slack) for slack in (0.0, SLACK, -SLACK)]


def _logprob(ordered: Tensor, place: int, top_p: float, top_k: int, min_p: float, slack: float) -> float:
    """The log-probability of the token at `place` in order, which is kept in any case."""
    count = len(ordered)
    if min_p > 0:
        count = _at_least(ordered, count, float(ordered[0]) + math.log(min_p) - slack)
    if 0 < top_k < len(ordered):
        count = _at_least(ordered, count, float(ordered[top_k - 1]) - slack)
    if top_p < 1:
        probabilities = ordered[:count].softmax(dim=0)
        before = probabilities.cumsum(dim=0) - probabilities
        count = max(1, int((before < top_p + slack).sum()))
    kept = ordered[:count] if place < count else torch.cat([ordered[:count], ordered[place : place + 1]])
    return float(ordered[place] - kept.logsumexp(dim=0))


def _at_least(ordered: Tensor, count: int, lowest: float) -> int:
    return min(count, int((ordered >= lowest).sum()))


def adapted_model(base: Path, folder: Path, tensors: dict[str, Tensor]) -> Any:
    """The model in `base` with the adapter that was published in `folder`, `tensors`; in fp32, read and merged by peft.

    Raises ValueError when the adapter was trained on other weights, or sent to engines with another scale.
    """
    import peft
    from transformers import AutoModelForCausalLM

    trained_on, found = bytes(tensors[BASE_DIGEST].tolist()).hex(), folder_digest(base)
    if trained_on != found:
        raise ValueError(f"the adapter was trained on weights with digest {trained_on}, those in {base} have {found}")
    library: Any = peft
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    model = library.PeftModel.from_pretrained(plain, str(folder))
    if not is_alpha(model.peft_config["default"].lora_alpha, tensors[LORA_ALPHA].item()):
        raise ValueError("adapter_config.json has another lora_alpha than the engines were sent")
    return model.merge_and_unload()
