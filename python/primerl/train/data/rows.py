"""Renders all rows of a run's datasets to tokens before the first step, so that unusable rows are known before
training."""

from __future__ import annotations

import logging
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from primerl.train.checkpoint.step_folders import saving
from primerl.train.data.bad_rows import BadRow, BadRows
from primerl.train.data.conversations import Conversation, RowError
from primerl.train.data.masks import Columns, Masker
from primerl.train.data.sources import DataError, Found, Source
from primerl.train.loop.progress import Report, progress
from primerl.train.sft_settings import LongRows

log = logging.getLogger(__name__)

CHUNK = 256
TOO_LONG, NOTHING = "longer than seq_len", "nothing to train"


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation. `loss_mask` is 1 on what is trained."""

    token_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    subset: int = 0
    index: int = 0
    """Among all rows of the run."""

    def __len__(self) -> int:
        return self.token_ids.shape[0]


class Rows:
    """The usable rows of all subsets, one after the other, in two columns: 5 bytes a token.

    `firsts[s]` is the first row of subset s; `firsts[-1]` is how many rows there are. `found` has the place of each row
    in its dataset, counted in the dataset's `units`.
    """

    def __init__(
        self,
        titles: list[str],
        token_ids: Tensor,
        loss_mask: Tensor,
        ends: array[int],
        firsts: list[int],
        units: list[str],
        found: array[int],
    ):
        self.titles = titles
        self.firsts = firsts
        self._units = units
        self._found = found
        self._token_ids = token_ids
        self._loss_mask = loss_mask
        self._ends = ends

    @property
    def largest_id(self) -> int:
        return int(self._token_ids.max()) if len(self._token_ids) else -1

    def __len__(self) -> int:
        return self.firsts[-1]

    @property
    def tokens(self) -> int:
        return self._token_ids.shape[0]

    def length(self, index: int) -> int:
        return self._ends[index] - (self._ends[index - 1] if index else 0)

    def row(self, index: int) -> Row:
        start, end = (self._ends[index - 1] if index else 0), self._ends[index]
        subset = bisect_right(self.firsts, index) - 1
        return Row(self._token_ids[start:end], self._loss_mask[start:end], subset, index)

    def name(self, index: int) -> str:
        """For messages: `train.jsonl, line 7`."""
        subset = bisect_right(self.firsts, index) - 1
        return f"{self.titles[subset]}, {self._units[subset]} {self._found[index]}"

    def digest(self) -> str:
        """Digest of every token and its mask, and of where rows and subsets begin."""
        digest = xxhash.xxh3_128()
        for column in (self._token_ids, self._loss_mask):
            digest.update(column.numpy().data)
        digest.update(self._ends.tobytes())
        digest.update(repr((self.titles, self.firsts)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Limits:
    """What makes a row unusable, and how many of them may be."""

    seq_len: int
    long_rows: LongRows
    max_bad_share: float
    key: str
    """Prefix of these settings, for messages: `data.` or `val.data.`."""


class RowsBuilder:
    """Collects rows in the datasets' order."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._token_ids, self._loss_mask = bytearray(), bytearray()
        self._ends: array[int] = array("q")
        self._found: array[int] = array("q")
        self._firsts: list[int] = []
        self.bad = BadRows(limits.max_bad_share, limits.key)

    def begin(self, source: Source) -> None:
        self._firsts.append(len(self._ends))
        self.bad.begin(source.title, source.unit)

    def add(self, index: int, columns: Columns | RowError) -> None:
        kept = columns if isinstance(columns, RowError) else self._cut(columns)
        if isinstance(kept, RowError):
            self.bad.add(BadRow(index, kept.kind, str(kept)))
            return
        self.bad.count()
        if kept.unwritten_reasoning:
            self.bad.reasoning_left_out(kept.unwritten_reasoning)
        if kept.control_tokens:
            self.bad.control_tokens(index, kept.control_tokens)
        self._token_ids += kept.token_ids
        self._loss_mask += kept.loss_mask
        self._ends.append(len(self._loss_mask))
        self._found.append(index)

    def build(self) -> Rows:
        """Raises DataError if too many rows cannot be used."""
        self.bad.check()
        if not self._ends:
            raise DataError.at(f"{self._limits.key}path", "no row can be used")
        token_ids = torch.frombuffer(self._token_ids, dtype=torch.int32)
        loss_mask = torch.frombuffer(self._loss_mask, dtype=torch.uint8)
        firsts, units = [*self._firsts, len(self._ends)], [dataset.unit for dataset in self.bad.datasets]
        return Rows(self.bad.titles, token_ids, loss_mask, self._ends, firsts, units, self._found)

    def _cut(self, columns: Columns) -> Columns | RowError:
        token_ids, loss_mask = columns.token_ids, columns.loss_mask
        seq_len = self._limits.seq_len
        length = len(loss_mask)
        if length > seq_len:
            if self._limits.long_rows != "truncate":
                return RowError(TOO_LONG, f"{length} tokens, {self._limits.key}seq_len is {seq_len}")
            token_ids, loss_mask = token_ids[: 4 * seq_len], loss_mask[:seq_len]
        # The first token of a row has no prediction, whatever its mask says.
        if loss_mask.find(1, 1) < 0:
            cut = f" in its first {seq_len} tokens" if length > seq_len else ""
            return RowError(NOTHING, f"no token of it is trained{cut}; see {self._limits.key}loss_mask")
        if length > seq_len:
            self.bad.truncated()
        return columns._replace(token_ids=token_ids, loss_mask=loss_mask)


def load_rows(sources: list[Source], masker: Masker, limits: Limits, bad_rows: Path) -> Rows:
    """All rows of the sources, rendered on all cores while the next ones are read. Unusable rows are named in the
    file `bad_rows`, which does not exist if there are none.

    Raises:
        DataError: a dataset cannot be read, or more than `limits.max_bad_share` of its rows cannot be used.
        SavingError: `bad_rows` cannot be written.
    """
    builder = RowsBuilder(limits)
    # Two of them: the rows of one chunk are rendered in Rust while those of the other are checked here.
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool, ThreadPoolExecutor(2) as renders:
        for source in sources:
            builder.begin(source)
            with progress(f"tokenising {source.title}") as report:
                _load(source, masker, builder, pool, renders, report)
    with saving(bad_rows):
        builder.bad.write(bad_rows)
    for line in builder.bad.summary(bad_rows):
        log.warning("%s", line)
    if limits.long_rows == "error":
        key = f"{limits.key}long_rows"
        builder.bad.refuse(TOO_LONG, f"{key} is 'error'", key)
    return builder.build()


def _load(
    source: Source,
    masker: Masker,
    builder: RowsBuilder,
    pool: ThreadPoolExecutor,
    renders: ThreadPoolExecutor,
    report: Report,
) -> None:
    ahead: deque[tuple[list[Found], Future[list[Columns | RowError]]]] = deque()
    done = 0

    def take() -> None:
        nonlocal done
        chunk, rendering = ahead.popleft()
        rendered = iter(rendering.result())
        for found in chunk:
            builder.add(found.index, found.content if isinstance(found.content, RowError) else next(rendered))
        done += len(chunk)
        report(chunk[-1].share, f"{done:,} rows")

    for chunk in _chunks(source.rows()):
        conversations = [found.content for found in chunk if isinstance(found.content, Conversation)]
        ahead.append((chunk, renders.submit(masker.many, conversations, pool)))
        if len(ahead) > 2:
            take()
    while ahead:
        take()


def _chunks(rows: Iterator[Found]) -> Iterator[list[Found]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
