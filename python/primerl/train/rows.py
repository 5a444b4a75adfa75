"""Rows for supervised fine-tuning: conversations, rendered to tokens with a loss mask by the model's own template."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.train.conversations import RowError, read_conversations
from primerl.train.model import ModelError


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation. `loss_mask` is 1 on what the assistant says, including the token that ends its turn."""

    token_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8

    def __len__(self) -> int:
        return self.token_ids.shape[0]


def load_rows(path: Path, model_folder: Path, seq_len: int) -> list[Row]:
    """All rows of the file, in its order.

    Raises:
        ModelError: the model folder has no tokenizer or chat template that can be used.
        RowError: the file cannot be read, a row is not what it should be, has nothing to train, or is too long.
    """
    conversations, lines = read_conversations(path)
    rows = [_row(*columns) for columns in _render(conversations, lines, path, model_folder)]
    for line, row in zip(lines, rows, strict=True):
        if len(row) > seq_len:
            raise RowError(
                f"{path}, line {line}: {len(row)} tokens, data.seq_len is {seq_len}; raise it or shorten the row"
            )
        if not bool(row.loss_mask[1:].any()):
            raise RowError(f"{path}, line {line}: nothing to train; the row needs an assistant message")
    return rows


def _render(
    conversations: list[list[dict[str, Any]]], lines: list[int], path: Path, model_folder: Path
) -> list[tuple[bytes, bytes]]:
    from primerl.render import Renderer

    try:
        renderer = Renderer(model_folder)
    except ValueError as error:
        raise ModelError(f"model.path: {error}") from error
    try:
        return list(renderer.render_many_with_mask(conversations))
    except ValueError:
        # The whole file was rendered in one call; find the row that does not render, to name it.
        for line, conversation in zip(lines, conversations, strict=True):
            try:
                renderer.render_with_mask(conversation)
            except ValueError as error:
                raise RowError(f"{path}, line {line}: {error}") from error
        raise


def _row(token_ids: bytes, loss_mask: bytes) -> Row:
    return Row(
        torch.frombuffer(bytearray(token_ids), dtype=torch.int32),
        torch.frombuffer(bytearray(loss_mask), dtype=torch.uint8),
    )


def batches(rows: list[Row], batch_size: int, shuffle: bool, seed: int) -> Iterator[list[Row]]:
    """Endless batches of `batch_size` rows. An epoch ends within a batch, which goes on with the next one's rows."""
    generator = random.Random(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            epoch = list(range(len(rows)))
            if shuffle:
                generator.shuffle(epoch)
            order += epoch
        yield [rows[index] for index in order[:batch_size]]
        del order[:batch_size]


def micro_batches(rows: list[Row], seq_len: int) -> list[list[Row]]:
    """The rows in as few packed rows of at most `seq_len` tokens as first-fit in order of decreasing length finds."""
    packed: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=len, reverse=True):
        place = next((index for index, left in enumerate(room) if len(row) <= left), None)
        if place is None:
            packed.append([])
            room.append(seq_len)
            place = len(packed) - 1
        packed[place].append(row)
        room[place] -= len(row)
    return packed
