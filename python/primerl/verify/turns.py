"""The turns that a run trained, read from its spool."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.launch.resume.position import trained_steps
from primerl.train.data.batch import Batch, BatchError, decode_batch
from primerl.train.objective.grammar import Allowed, Replay
from primerl.train.objective.truncation import Truncation
from primerl.verify.report import Report, VerifyError, and_now
from primerl.verify.weights import tokenizer_folder

KeyValues = list[tuple[Tensor, Tensor]]
"""Each layer's keys and values of one turn's forwarded tokens: [KV heads, tokens, head size]."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Inputs `begin`..`end` (exclusive) of a turn, forwarded under `version`."""

    version: int
    begin: int
    end: int


@dataclass(slots=True)
class Turn:
    """Tokens up to the end of one turn, and how they were forwarded. A sample of one version is one `Turn` with the
    targets of all its turns: its prompts are then the same computation."""

    step: int
    rollout: int
    token_ids: Tensor  # [n] int64, up to the last target
    targets: Tensor  # [m] int64, indices of the sampled tokens, ascending
    logprobs: Tensor  # [m] fp32, the engine's
    temperatures: Tensor  # [m] fp32
    truncation: Truncation | None  # [m]
    allowed: Allowed | None  # [m]
    segments: list[Segment]
    done: int = 0
    """Segments forwarded so far."""
    cache: KeyValues = field(default_factory=list)
    past: Any = None
    """`transformers`' cache of what was forwarded, in place of `cache`, of models that remember other things too."""


def read_spool(folder: Path, report: Report) -> list[Turn]:
    paths = sorted(
        (folder / "spool").glob("step_*/rank_*.msgpack"),
        key=lambda path: tuple(int(number) for number in re.findall(r"\d+", f"{path.parent.name} {path.name}")),
    )
    replay = Replay(tokenizer_folder(folder))
    turns: list[Turn] = []
    steps = set()
    for path in paths:
        try:
            batch = decode_batch(path.read_bytes())
        except (OSError, BatchError) as error:
            raise VerifyError(f"{path}: {error}") from error
        steps.add(batch.step)
        for sample in _samples(batch, replay):
            report.samples += 1
            turns += sample
    report.steps = len(steps)
    report.trained = trained_steps(folder)
    report.unchecked = len(set(range(1, report.trained + 1)) - steps)
    if not turns and report.samples:
        raise VerifyError(
            f"{folder} trained what a teacher wrote, and nothing that its policy sampled: no engine gave it "
            "log-probabilities that could be verified"
        )
    if not turns:
        raise VerifyError(f"{folder / 'spool'} holds no trained sample{and_now(folder)}")
    return turns


def _samples(batch: Batch, replay: Replay) -> Iterator[list[Turn]]:
    for micro_batch in batch.micro_batches:
        try:
            allowed = replay.allowed(micro_batch)
        except BatchError as error:
            raise VerifyError(str(error)) from error
        start = 0
        for length, rollout in zip(micro_batch.sequence_lengths, micro_batch.rollouts, strict=True):
            columns = slice(start, start + length)
            yield _turns(
                batch.step,
                rollout,
                micro_batch.token_ids[columns].long(),
                micro_batch.loss_mask[columns].nonzero().squeeze(1),
                micro_batch.versions[columns],
                micro_batch.logprobs[columns],
                micro_batch.temperatures[columns],
                None if micro_batch.truncation is None else micro_batch.truncation[columns],
                None if allowed is None else allowed[columns],
            )
            start += length


def _turns(
    step: int,
    rollout: int,
    token_ids: Tensor,
    trained: Tensor,
    versions: Tensor,
    logprobs: Tensor,
    temperatures: Tensor,
    truncation: Truncation | None,
    allowed: Allowed | None,
) -> list[Turn]:
    """The turns of one sample, each a contiguous run of trained tokens; a single one if all have one version."""
    if not trained.numel():
        return []
    if bool((versions[trained] == versions[trained[0]]).all()):
        runs = [trained]
    else:
        gaps = (trained.diff() > 1).nonzero().squeeze(1) + 1
        runs = list(torch.tensor_split(trained, gaps))
    turns = []
    for targets in runs:
        end = int(targets[-1]) + 1
        turns.append(
            Turn(
                step,
                rollout,
                token_ids[:end],
                targets,
                logprobs[targets],
                temperatures[targets],
                None if truncation is None else truncation[targets],
                None if allowed is None else allowed[targets],
                _segments(targets.tolist(), versions[targets].tolist()),
            )
        )
    return turns


def _segments(targets: list[int], versions: list[int]) -> list[Segment]:
    """Input i - 1 runs under the version that sampled token i, the prompt under that of the first token."""
    segments = []
    begin, current = 0, versions[0]
    for target, version in zip(targets, versions, strict=True):
        if version != current:
            segments.append(Segment(current, begin, target - 1))
            begin, current = target - 1, version
    segments.append(Segment(current, begin, targets[-1]))
    return segments
