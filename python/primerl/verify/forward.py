"""Every sampled token's log-probability, computed again and compared with the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from primerl.train.objective.truncation import Truncation
from primerl.verify.reference import truncated_logprobs
from primerl.verify.report import MAX_LIMIT, Difference, Report
from primerl.verify.turns import KeyValues, Segment, Turn
from primerl.verify.weights import Weights


def forward_all(turns: list[Turn], weights: Weights, report: Report) -> None:
    ready: dict[int, list[Turn]] = {}
    for turn in turns:
        ready.setdefault(turn.segments[0].version, []).append(turn)
    while ready:
        version = min(ready)
        model = weights.load(version)
        for batch in _batches(ready.pop(version), weights):
            if len(batch[0].segments) > 1 and not weights.stacks:
                _forward_alone(model, batch[0], report)
            else:
                _forward(model, batch, report)
            for turn in batch:
                turn.done += 1
                if turn.done < len(turn.segments):
                    ready.setdefault(turn.segments[turn.done].version, []).append(turn)
                else:
                    turn.cache, turn.past = [], None


def _batches(turns: list[Turn], weights: Weights) -> Iterator[list[Turn]]:
    """Turns of similar lengths together, so many that their logits, padding included, take about 256 MB. Where caches
    cannot be stacked, those that cross an update alone."""
    limit = max(256, 2**26 // weights.vocabulary)
    if not weights.stacks:
        yield from ([turn] for turn in turns if len(turn.segments) > 1)
        turns = [turn for turn in turns if len(turn.segments) == 1]
        if not turns:
            return

    def shape(turn: Turn) -> tuple[int, int]:
        segment = turn.segments[turn.done]
        return segment.begin, segment.end - segment.begin

    batch: list[Turn] = []
    longest = 0
    for turn in sorted(turns, key=shape):
        longest = max(longest, sum(shape(turn)))
        # A first segment has no past: it is kept apart from later ones, and needs no mask.
        if batch and (longest * (len(batch) + 1) > limit or (shape(turn)[0] > 0) != (shape(batch[0])[0] > 0)):
            yield batch
            batch, longest = [], sum(shape(turn))
        batch.append(turn)
    yield batch


def _forward(model: Any, turns: list[Turn], report: Report) -> None:
    """Forward the next segment of each turn: past keys and values on the left, padded at their left; new tokens on the
    right, padded at their right, where no real token sees the padding."""
    from transformers import DynamicCache

    segments = [turn.segments[turn.done] for turn in turns]
    past = max(segment.begin for segment in segments)
    new = max(segment.end - segment.begin for segment in segments)
    token_ids = torch.zeros(len(turns), new, dtype=torch.int64)
    visible = torch.zeros(len(turns), past + new, dtype=torch.int64)
    positions = torch.zeros(len(turns), new, dtype=torch.int64)
    for row, (turn, segment) in enumerate(zip(turns, segments, strict=True)):
        count = segment.end - segment.begin
        token_ids[row, :count] = turn.token_ids[segment.begin : segment.end]
        visible[row, past - segment.begin : past + count] = 1
        positions[row] = torch.arange(new) + segment.begin
    cache: Any = None
    if past:
        cache = DynamicCache(_stack(turns, past))
    elif any(len(turn.segments) > 1 for turn in turns):
        cache = DynamicCache()
    # Beyond a row's last real token positions may pass the model's maximum; they are only padding.
    positions.clamp_(max=max(segment.end for segment in segments) - 1)
    output = model(
        input_ids=token_ids.to(model.device),
        attention_mask=visible.to(model.device) if past else None,
        position_ids=positions.to(model.device),
        past_key_values=cache,
        use_cache=cache is not None,
    )
    logits = output.logits.float().cpu()
    for row, (turn, segment) in enumerate(zip(turns, segments, strict=True)):
        if cache is not None and turn.done + 1 < len(turn.segments):
            real = slice(past - segment.begin, past + segment.end - segment.begin)
            turn.cache = [
                (layer.keys[row, :, real].clone(), layer.values[row, :, real].clone()) for layer in cache.layers
            ]
        _compare(turn, segment, logits[row], report)


def _forward_alone(model: Any, turn: Turn, report: Report) -> None:
    """Forward the next segment of a turn, whose cache may hold states too."""
    from transformers import DynamicCache

    segment = turn.segments[turn.done]
    if turn.past is None:
        turn.past = DynamicCache(config=model.config)
    names = signature(model.forward).parameters
    output = model(
        input_ids=turn.token_ids[None, segment.begin : segment.end].to(model.device),
        position_ids=torch.arange(segment.begin, segment.end, device=model.device)[None],
        use_cache=True,
        **{"past_key_values" if "past_key_values" in names else "cache_params": turn.past},
    )
    _compare(turn, segment, output.logits[0].float().cpu(), report)


def _stack(turns: list[Turn], past: int) -> KeyValues:
    """Each layer's keys and values of all turns, [turns, KV heads, past, head size], zeros at the left."""

    def padded(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 0, past - tensor.shape[1], 0))

    layers = range(len(turns[0].cache))
    return [
        (
            torch.stack([padded(turn.cache[layer][0]) for turn in turns]),
            torch.stack([padded(turn.cache[layer][1]) for turn in turns]),
        )
        for layer in layers
    ]


def _compare(turn: Turn, segment: Segment, logits: Tensor, report: Report) -> None:
    """Add the segment's targets to the report; `logits` [new, V] belong to its inputs."""
    own = (turn.targets > segment.begin) & (turn.targets <= segment.end)
    targets = turn.targets[own]
    scaled = logits[targets - 1 - segment.begin] / turn.temperatures[own].unsqueeze(1)
    if turn.allowed is not None:
        scaled = scaled.masked_fill(~turn.allowed[own].masks(scaled.shape[1]), -torch.inf)
        report.structured += int((turn.allowed[own].index > 0).sum())
    engine = turn.logprobs[own]
    reference = scaled.log_softmax(dim=-1).gather(1, turn.token_ids[targets].unsqueeze(1)).squeeze(1)
    if turn.truncation is not None:
        reference = _truncated(scaled, turn.token_ids[targets], turn.truncation[own], engine, report)
    # A value that is not a number must fail the limits, and `inf` does where `nan` would not.
    difference = (engine.double() - reference.double()).abs().nan_to_num(nan=float("inf"))
    report.tokens += len(targets)
    report.sum_difference += float(difference.sum())
    worst = int(difference.argmax())
    if report.worst is None or float(difference[worst]) > report.max_difference:
        report.max_difference = float(difference[worst])
        token = int(targets[worst])
        report.worst = Difference(
            turn.step, turn.rollout, token, segment.version, float(engine[worst]), float(reference[worst])
        )


def _truncated(scaled: Tensor, tokens: Tensor, truncation: Truncation, engine: Tensor, report: Report) -> Tensor:
    """Log-probabilities among the tokens kept. At the edge of the kept set rounding decides: there the engine's own
    decision stands, and is counted."""
    references = []
    columns = (tokens, engine, truncation.top_p, truncation.top_k, truncation.min_p)
    values = zip(*(column.tolist() for column in columns), strict=True)
    for row, (token, own, top_p, top_k, min_p) in zip(scaled, values, strict=True):
        nominal, *moved = truncated_logprobs(row, token, top_p=top_p, top_k=top_k, min_p=min_p)
        nearest = min((nominal, *moved), key=lambda reference: abs(reference - own))
        report.truncated += top_p < 1 or top_k > 0 or min_p > 0
        report.edges += abs(nearest - own) <= MAX_LIMIT < abs(nominal - own)
        references.append(nearest)
    return torch.tensor(references, dtype=torch.float64)
