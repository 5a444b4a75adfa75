"""Rows for supervised fine-tuning: JSON lines, rendered to tokens with a loss mask by the model's own template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primerl.train.model import ModelError


class RowError(ValueError):
    """A row cannot be trained on. The message names file, line and reason."""


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
    conversations, lines = _read_conversations(path)
    rows = [_row(*columns) for columns in _render(conversations, lines, path, model_folder)]
    for line, row in zip(lines, rows, strict=True):
        if len(row) > seq_len:
            raise RowError(
                f"{path}, line {line}: {len(row)} tokens, data.seq_len is {seq_len}; raise it or shorten the row"
            )
        if not bool(row.loss_mask[1:].any()):
            raise RowError(f"{path}, line {line}: nothing to train; the row needs an assistant message")
    return rows


def _read_conversations(path: Path) -> tuple[list[list[dict[str, Any]]], list[int]]:
    conversations, lines = [], []
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    conversations.append(_conversation(text, f"{path}, line {number}"))
                    lines.append(number)
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"data.path: {path} cannot be read: {error}") from error
    if not conversations:
        raise RowError(f"data.path: {path} has no rows")
    return conversations, lines


def _conversation(text: str, where: str) -> list[dict[str, Any]]:
    """The messages of one line: `messages` as they are, or `prompt` then `completion`, each a text or messages."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RowError(f"{where}: expected an object with `messages`, or with `prompt` and `completion`")
    if "messages" in fields:
        messages = fields["messages"]
    elif "prompt" in fields and "completion" in fields:
        messages = _as_messages(fields["prompt"], "user") + _as_messages(fields["completion"], "assistant")
    else:
        raise RowError(f"{where}: needs `messages`, or `prompt` and `completion`; it has {sorted(fields)}")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise RowError(f"{where}: messages must be a list of objects with a `role`")
    if fields.get("tools"):
        raise RowError(f"{where}: rows with `tools` are not supported")
    return messages


def _as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


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
