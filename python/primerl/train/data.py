"""The batch of one step for one data rank, decoded into tensors. The format is in docs/architecture.md, "Trainer"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch import Tensor

COLUMNS = {
    "token_ids": torch.int32,
    "loss_mask": torch.uint8,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int32,
    "temperatures": torch.float32,
}
"""Columns with one value a token, and their little-endian types."""


class BatchError(ValueError):
    """A batch breaks its format. The message names the column or the rollout."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences one after another, without padding; the columns have T values, T = sum of `sequence_lengths`.

    Worked example, two sequences of 3 and 2 tokens:

        token_ids        [p0 a0 a1 | p1 b0]
        loss_mask        [ 0  1  1 |  0  1]
        sequence_lengths [3, 2]
    """

    token_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8; 1 = sampled by the policy, to be trained
    logprobs: Tensor  # [T] fp32, the engine's, nats; 0 where not trained
    advantages: Tensor  # [T] fp32
    versions: Tensor  # [T] int32, policy version that sampled the token; -1 where not trained
    temperatures: Tensor  # [T] fp32
    sequence_lengths: tuple[int, ...]  # [S]
    rollouts: tuple[int, ...]  # [S]
    environments: tuple[int, ...]  # [S], index of the environment in the orchestrator's config

    def trained(self) -> Tensor:
        """Packed indices of the trained tokens, [N] int64."""
        return self.loss_mask.nonzero().squeeze(1)


@dataclass(frozen=True, slots=True)
class Batch:
    """What data rank `rank` of `ranks` trains in step `step`."""

    step: int
    rank: int
    ranks: int
    loss_tokens: int
    """Trained tokens over all ranks, the denominator of the loss."""
    metrics: dict[str, float]
    micro_batches: tuple[MicroBatch, ...]

    def staleness(self) -> list[int]:
        """For each sequence with trained tokens: (step - 1) - its oldest version."""
        result = []
        for micro_batch in self.micro_batches:
            for versions in torch.split(micro_batch.versions, list(micro_batch.sequence_lengths)):
                trained = versions[versions >= 0]
                if trained.numel():
                    result.append(self.step - 1 - int(trained.min()))
        return result


def decode_batch(body: bytes) -> Batch:
    """Decode the answer of `POST /trainer/batch`, or a file of the spool.

    Raises:
        BatchError: the bytes are no batch, or its columns contradict each other.
    """
    try:
        fields = msgpack.unpackb(body)
        batch = Batch(
            step=fields["step"],
            rank=fields["rank"],
            ranks=fields["ranks"],
            loss_tokens=fields["loss_tokens"],
            metrics=dict(fields["metrics"]),
            micro_batches=tuple(_micro_batch(columns) for columns in fields["micro_batches"]),
        )
    except (KeyError, TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"not a batch: {type(error).__name__}: {error}") from error
    for micro_batch in batch.micro_batches:
        _check(micro_batch, batch.step)
    return batch


def _column(body: bytes, dtype: torch.dtype) -> Tensor:
    # torch.frombuffer refuses an empty buffer and warns of one that cannot be written.
    return torch.frombuffer(bytearray(body), dtype=dtype) if body else torch.empty(0, dtype=dtype)


def _micro_batch(columns: dict[str, Any]) -> MicroBatch:
    lengths = tuple(_column(columns["sequence_lengths"], torch.int32).tolist())
    tensors = {name: _column(columns[name], dtype) for name, dtype in COLUMNS.items()}
    for name, tensor in tensors.items():
        if tensor.shape[0] != sum(lengths):
            raise BatchError(f"column {name} has {tensor.shape[0]} values, sequence_lengths add up to {sum(lengths)}")
    rollouts, environments = tuple(columns["rollouts"]), tuple(columns["environments"])
    if not len(rollouts) == len(environments) == len(lengths):
        raise BatchError(f"{len(lengths)} sequences, {len(rollouts)} rollouts, {len(environments)} environments")
    if lengths and min(lengths) < 1:
        raise BatchError(f"sequence_lengths holds {min(lengths)}")
    return MicroBatch(**tensors, sequence_lengths=lengths, rollouts=rollouts, environments=environments)


def _check(micro_batch: MicroBatch, step: int) -> None:
    """Refuse what cannot be trained on, rather than train on something else."""
    trained = micro_batch.loss_mask == 1
    untrained = micro_batch.loss_mask == 0
    first = torch.zeros_like(trained)
    first[torch.tensor([0, *micro_batch.sequence_lengths[:-1]], dtype=torch.int64).cumsum(0)[: len(first)]] = True
    versions, logprobs = micro_batch.versions, micro_batch.logprobs
    problems = {
        "loss_mask is neither 0 nor 1": ~(trained | untrained),
        "the first token of a sequence is to be trained, but nothing precedes it": trained & first,
        f"a policy version is not in 0..{step - 1}": trained & ((versions < 0) | (versions >= step)),
        "a log-probability is not finite or above 0": trained & ~(logprobs.isfinite() & (logprobs <= 1e-4)),
        "an advantage is not finite": trained & ~micro_batch.advantages.isfinite(),
        "a temperature is not above 0": trained & ~(micro_batch.temperatures > 0),
    }
    for what, where in problems.items():
        if bool(where.any()):
            index = int(where.nonzero()[0])
            rollout = micro_batch.rollouts[sequence_at(micro_batch.sequence_lengths, index)]
            raise BatchError(f"step {step}, rollout {rollout}: {what} (packed token {index})")


def sequence_at(lengths: tuple[int, ...], index: int) -> int:
    """Which sequence the packed token `index` belongs to."""
    end = 0
    for sequence, length in enumerate(lengths):
        end += length
        if index < end:
            return sequence
    raise IndexError(f"packed token {index} of {end}")
