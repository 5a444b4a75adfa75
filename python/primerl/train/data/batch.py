"""The batch of one step for one data rank, decoded into tensors. The format is in docs/architecture.md, "Trainer"."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primerl.train.data.experts import RoutedExperts
from primerl.train.objective.truncation import Truncation

COLUMNS = {
    "token_ids": torch.int32,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int32,
    "temperatures": torch.float32,
    "loss_mask": torch.uint8,
}
"""Columns with one value a token, and their little-endian types, in the order of the bytes."""
ALIGNMENT = 16
"""Alignment of a micro-batch's first column among the bytes."""
_CHECKSUM_KEY = b"\xa4xxh3\xc4\x08"
"""Key of the third entry, with msgpack's mark of 8 bytes."""
MAX_LOGPROB = 1e-4
"""An engine's rounding may put a log-probability this far above 0, nats."""


class BatchError(ValueError):
    """A batch breaks its format. The message names the column or the rollout."""


@dataclass(frozen=True, slots=True)
class GrammarRun:
    """Tokens `begin` to before `end`: an answer, or its first tokens, that was sampled by a grammar."""

    begin: int
    end: int
    masks: str
    """The library and the vocabulary by which the engine found the allowed tokens."""
    spec: str
    """What was enforced, as JSON."""


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
    truncation: Truncation | None = None
    """[T], how the engine truncated before it sampled (`primerl.train.objective.truncation` replays it); None if it did
    not, as always unless `orchestrator.sampling.truncated` is "replay"."""
    grammars: tuple[GrammarRun, ...] = ()
    """Answers in which only some tokens were allowed (`primerl.train.objective.grammar` finds which)."""
    experts: RoutedExperts | None = None
    """What engines chose, where they are asked to say it (`trainer.enable_router_replay`)."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Columns that not every batch has, by name, [T] fp32: `teacher_logprobs`, `ce_weights`, ..."""
    shared: tuple[int, ...] = ()
    """[S], leading tokens that each sequence takes over from the previous one, at most all that both have in common; 0
    for the first. The sequences are then a walk of a tree, depth first: a token sees those of its own sequence, taken
    over or not. Empty where none takes over any."""

    def trained(self) -> Tensor:
        """Packed indices of the trained tokens, [N] int64."""
        return self.loss_mask.nonzero().squeeze(1)

    def learnt(self) -> int:
        """Tokens whose loss may count: those the policy sampled, and those a teacher wrote."""
        taught = self.extra.get("ce_weights")
        return int(self.loss_mask.sum() if taught is None else ((self.loss_mask == 1) | (taught > 0)).sum())


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
        result: list[int] = []
        for micro_batch in self.micro_batches:
            sequences = torch.repeat_interleave(torch.tensor(micro_batch.sequence_lengths, dtype=torch.int64))
            trained = micro_batch.versions.masked_fill(micro_batch.versions < 0, self.step)
            oldest = torch.full((len(micro_batch.sequence_lengths),), self.step, dtype=torch.int32)
            oldest.scatter_reduce_(0, sequences, trained, "amin")
            result += (self.step - 1 - oldest[oldest < self.step]).tolist()
        return result


def decode_batch(body: bytes | bytearray) -> Batch:
    """Decode the answer of `POST /trainer/batch`, or a file of the spool.

    The tensors lie in `body` itself where that is a bytearray: nothing is copied, except where context that sequences
    share was omitted. Bytes, which must not be written to, are copied once.

    Raises:
        BatchError: the bytes are no batch, do not match the checksum that they end with, or contradict each other.
    """
    import msgpack  # only batches of an orchestrator are packed by it

    try:
        header, columns = _frame(bytearray(body) if isinstance(body, bytes) else body)
        batch = Batch(
            step=header["step"],
            rank=header["rank"],
            ranks=header["ranks"],
            loss_tokens=header["loss_tokens"],
            metrics=dict(header["metrics"]),
            micro_batches=tuple(_micro_batches(header["micro_batches"], columns)),
        )
    except (KeyError, TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"not a batch: {type(error).__name__}: {error}") from error
    for micro_batch in batch.micro_batches:
        if not _is_sound(micro_batch, batch.step):
            _check(micro_batch, batch.step)
    return batch


def _frame(body: bytearray) -> tuple[dict[str, Any], memoryview]:
    """The header and the columns' bytes, not copied. The map is parsed by hand, since msgpack would copy them."""
    import msgpack

    view = memoryview(body)
    # Two entries: written by an earlier version, without a checksum.
    checked = bytes(view[:1]) != b"\x82"
    header, rest = _bytes_of((b"\x83" if checked else b"\x82") + b"\xa6header\xc6", view)
    columns, rest = _bytes_of(b"\xa7columns\xc6", rest)
    if checked:
        rest = _check_sum(view, rest)
    if rest:
        raise BatchError(f"not a batch: {len(rest)} bytes follow it")
    return msgpack.unpackb(header), columns


def _check_sum(view: memoryview, end: memoryview) -> memoryview:
    """What follows the checksum, which is at the start of `end` and covers all bytes before it."""
    import xxhash

    start = len(_CHECKSUM_KEY)
    if end[:start] != _CHECKSUM_KEY or len(end) < start + 8:
        raise BatchError(f"not a batch: {bytes(end[: start + 8])!r} is no checksum")
    stated = int.from_bytes(end[start : start + 8], "little")
    found = xxhash.xxh3_64_intdigest(view[: len(view) - len(end)])
    if found != stated:
        raise BatchError(
            f"the batch is damaged: its bytes have the checksum {found:016x}, it says {stated:016x}; nothing of it is "
            "trained. The orchestrator writes a damaged file of the spool again from its journal when it is started"
        )
    return end[start + 8 :]


def _bytes_of(key: bytes, view: memoryview) -> tuple[memoryview, memoryview]:
    """The value of `key` and the rest. The key is followed by a length of 4 bytes, big-endian."""
    if view[: len(key)] != key:
        raise BatchError(f"not a batch: {bytes(view[: len(key)])!r} is not {key!r}")
    start = len(key) + 4
    end = start + int.from_bytes(view[len(key) : start], "big")
    if len(view) < end:
        raise BatchError(f"not a batch: it ends {end - len(view)} bytes early")
    return view[start:end], view[end:]


def _micro_batches(headers: list[dict[str, Any]], columns: memoryview) -> Iterator[MicroBatch]:
    offset = 0
    for header in headers:
        tokens, lengths = header["tokens"], tuple(header["sequence_lengths"])
        rollouts, environments = tuple(header["rollouts"]), tuple(header["environments"])
        if sum(lengths) != tokens or (lengths and min(lengths) < 1):
            raise BatchError(f"sequence_lengths {lengths} do not add up to {tokens} tokens")
        if not len(rollouts) == len(environments) == len(lengths):
            raise BatchError(f"{len(lengths)} sequences, {len(rollouts)} rollouts, {len(environments)} environments")
        omitted = tuple(header.get("omitted", ()))
        _check_omitted(omitted, lengths)
        written, tensors = tokens - sum(omitted), {}
        for name, dtype in COLUMNS.items():
            if offset + written * dtype.itemsize > len(columns):
                raise BatchError(f"column {name}: {written} values are more than the bytes that are left")
            tensors[name] = _tensor(columns, dtype, written, offset)
            offset += written * dtype.itemsize
        if omitted:
            tensors = {name: _completed(column, lengths, omitted) for name, column in tensors.items()}
        offset += -offset % ALIGNMENT
        extra = {}
        for name in header.get("extra_columns", ()):
            end = offset + tokens * torch.float32.itemsize
            if end > len(columns):
                raise BatchError(f"column {name}: {tokens} values are more than the bytes that are left")
            extra[name] = _tensor(columns, torch.float32, tokens, offset)
            offset = end + -end % ALIGNMENT
        experts = None
        if header.get("routed_experts"):
            experts, end = _experts(header["routed_experts"], tokens, columns, offset)
            offset = end + -end % ALIGNMENT
        truncation = _truncation(header["truncations"], tokens) if header.get("truncations") else None
        shared = tuple(header["shared"]) if any(header.get("shared", ())) else ()
        _check_shared(shared, lengths, rollouts, tensors["token_ids"])
        yield MicroBatch(
            **tensors,
            sequence_lengths=lengths,
            rollouts=rollouts,
            environments=environments,
            truncation=truncation,
            grammars=_grammars(header["grammars"], tokens) if header.get("grammars") else (),
            experts=experts,
            extra=extra,
            shared=shared,
        )
    if offset != len(columns):
        raise BatchError(f"the columns are {len(columns)} bytes, the micro-batches' {offset}")


def _check_omitted(omitted: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Raises BatchError unless each sequence omits tokens that it and the previous one have."""
    if not omitted:
        return
    if len(omitted) != len(lengths):
        raise BatchError(f"omitted: {len(omitted)} numbers for {len(lengths)} sequences")
    # Before the first there is nothing that could stand for it.
    for sequence, (tokens, length, before) in enumerate(zip(omitted, lengths, (0, *lengths), strict=False)):
        if not 0 <= tokens <= min(length, before):
            raise BatchError(f"omitted: sequence {sequence} of {length} tokens cannot omit {tokens} of {before}")


def _completed(written: Tensor, lengths: tuple[int, ...], omitted: tuple[int, ...]) -> Tensor:
    """A column with the values that were omitted, [T]: for the first `omitted` of a sequence those of the previous
    one."""
    # By numpy, whose copies of a few values take a fraction of torch's; indices would take ten times as long as copies.
    values = written.numpy()
    whole = np.empty(sum(lengths), values.dtype)
    start = before = first = 0
    for length, tokens in zip(lengths, omitted, strict=True):
        last = first + length - tokens
        whole[start : start + tokens] = whole[before : before + tokens]
        whole[start + tokens : start + length] = values[first:last]
        start, before, first = start + length, start, last
    return torch.from_numpy(whole)


def _check_shared(shared: tuple[int, ...], lengths: tuple[int, ...], rollouts: tuple[int, ...], ids: Tensor) -> None:
    """Raises BatchError unless each sequence begins with the tokens that it takes over. `ids`: [T], of all."""
    if not shared:
        return
    if len(shared) != len(lengths):
        raise BatchError(f"shared: {len(shared)} numbers for {len(lengths)} sequences")
    start = before = 0
    for sequence, (length, tokens) in enumerate(zip(lengths, shared, strict=True)):
        # Before the first there is nothing to take over.
        if not 0 <= tokens <= min(length, before):
            raise BatchError(f"shared: sequence {sequence} of {length} tokens cannot take over {tokens} of {before}")
        if tokens and not torch.equal(ids[start : start + tokens], ids[start - before : start - before + tokens]):
            raise BatchError(
                f"shared: the sequences of rollouts {rollouts[sequence - 1]} and {rollouts[sequence]} do not begin "
                f"with the same {tokens} tokens"
            )
        start, before = start + length, length


def _experts(header: dict[str, Any], tokens: int, columns: memoryview, offset: int) -> tuple[RoutedExperts, int]:
    """The experts, and where their bytes end."""
    layers, chosen, size = (int(header[name]) for name in ("layers", "chosen", "bytes"))
    runs = tuple((int(begin), int(end)) for begin, end in header["runs"])
    bounds = [0, *(bound for run in runs for bound in run), tokens]
    if any(begin >= end for begin, end in runs) or bounds != sorted(bounds):
        raise BatchError(f"routed_experts: {runs} are not runs of {tokens} tokens")
    if layers < 1 or chosen < 1 or size not in (1, 2):
        raise BatchError(f"routed_experts: {layers} layers, {chosen} experts and {size} bytes are of no model")
    rows = sum(end - begin for begin, end in runs)
    end = offset + rows * layers * chosen * size
    if end > len(columns):
        raise BatchError(f"routed_experts: {rows} tokens are more than the bytes that are left")
    dtype = torch.uint8 if size == 1 else torch.uint16
    values = _tensor(columns, dtype, rows * layers * chosen, offset)
    return RoutedExperts(runs, values.view(rows, layers, chosen)), end


def _truncation(runs: list[dict[str, Any]], tokens: int) -> Truncation:
    """One value a token, from runs of tokens with the same value."""
    truncation = Truncation(torch.ones(tokens), torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens))
    for run in runs:
        begin, end, top_p, top_k, min_p = (run[name] for name in ("begin", "end", "top_p", "top_k", "min_p"))
        if not (0 <= begin < end <= tokens and 0 < top_p <= 1 and top_k >= 0 and 0 <= min_p <= 1):
            raise BatchError(
                f"truncations: {run} is not valid for {tokens} tokens: it needs 0 <= begin < end <= {tokens}, "
                "0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1"
            )
        own = truncation[slice(begin, end)]
        own.top_p.fill_(top_p)
        own.top_k.fill_(top_k)
        own.min_p.fill_(min_p)
    return truncation


def _grammars(header: dict[str, Any], tokens: int) -> tuple[GrammarRun, ...]:
    kinds, runs = header["kinds"], []
    for begin, end, kind in header["runs"]:
        if not (0 <= begin < end <= tokens and 0 <= kind < len(kinds)):
            raise BatchError(
                f"grammars: begin {begin}, end {end}, kind {kind} is not valid for {tokens} tokens and "
                f"{len(kinds)} kinds"
            )
        runs.append(GrammarRun(begin, end, str(kinds[kind]["masks"]), str(kinds[kind]["spec"])))
    return tuple(runs)


def _tensor(columns: memoryview, dtype: torch.dtype, count: int, offset: int) -> Tensor:
    # torch.frombuffer cannot make an empty tensor.
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(columns, dtype=dtype, count=count, offset=offset)


def _first_tokens(micro_batch: MicroBatch) -> Tensor:
    """Packed indices of the sequences' first tokens, [S] int64."""
    return torch.tensor([0, *micro_batch.sequence_lengths[:-1]], dtype=torch.int64).cumsum(0)


def _is_sound(micro_batch: MicroBatch, step: int) -> bool:
    """A quick check in few passes over the columns: True means valid, False needs the full check."""
    if not micro_batch.sequence_lengths:
        return True
    if int(micro_batch.loss_mask.max()) > 1:
        return False
    trained = micro_batch.loss_mask.view(torch.bool)
    if bool(trained[_first_tokens(micro_batch)].any()):
        return False
    bounds = {}
    for name in ("versions", "logprobs", "advantages", "temperatures"):
        low, high = getattr(micro_batch, name).aminmax()
        bounds[name] = (low.item(), high.item())
    low, high = bounds["versions"]
    if not (low >= -1 and high < step and torch.equal(micro_batch.versions >= 0, trained)):
        return False
    # NaN is neither below nor above.
    (lowest_logprob, logprob), (low, high) = bounds["logprobs"], bounds["advantages"]
    finite = lowest_logprob > -math.inf and logprob <= MAX_LOGPROB and low > -math.inf and high < math.inf
    return bool(finite and bounds["temperatures"][0] > 0)


def _check(micro_batch: MicroBatch, step: int) -> None:
    """Raises BatchError for anything that cannot be trained on."""
    trained = micro_batch.loss_mask == 1
    untrained = micro_batch.loss_mask == 0
    first = torch.zeros_like(trained)
    first[_first_tokens(micro_batch)[: len(first)]] = True
    versions, logprobs = micro_batch.versions, micro_batch.logprobs
    problems = {
        "loss_mask is neither 0 nor 1": ~(trained | untrained),
        "the first token of a sequence is to be trained, but nothing precedes it": trained & first,
        f"a policy version is not in 0..{step - 1}": trained & ((versions < 0) | (versions >= step)),
        "a log-probability is not finite or above 0": trained & ~(logprobs.isfinite() & (logprobs <= MAX_LOGPROB)),
        "an advantage is not finite": trained & ~micro_batch.advantages.isfinite(),
        "a temperature is not above 0": trained & ~(micro_batch.temperatures > 0),
    }
    for what, where in problems.items():
        if bool(where.any()):
            index = int(where.nonzero()[0])
            rollout = micro_batch.rollouts[sequence_at(micro_batch.sequence_lengths, index)]
            raise BatchError(f"step {step}, rollout {rollout}: {what} (packed token {index})")


def check_ids(micro_batch: MicroBatch, embedded: int) -> None:
    """Whether the model has an embedding for each token: a kernel that looks one up would end without a reason.

    Raises BatchError.
    """
    largest = int(micro_batch.token_ids.max())
    if largest >= embedded:
        raise BatchError(
            f"token {largest} is outside the model's embedding, which has {embedded} rows: engines and trainer have "
            "models or tokenizers that do not belong together"
        )


def sequence_at(lengths: tuple[int, ...], index: int) -> int:
    """Which sequence the packed token `index` belongs to."""
    end = 0
    for sequence, length in enumerate(lengths):
        end += length
        if index < end:
            return sequence
    raise IndexError(f"packed token {index} of {end}")
