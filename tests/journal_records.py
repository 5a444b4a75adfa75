"""The records of a journal's segment, as rust/primerl-record/src/journal/mod.rs describes them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

MAGIC_BYTES = 8
HEADER = struct.Struct("<III")
"""Length of a record's body, and the checksums of the length and of the body."""


@dataclass
class Record:
    number: int
    at: int
    """Its first byte."""
    body: bytes
    kind: str
    fields: Any


def events_of(segment: Path) -> Iterator[Record]:
    """The whole records; the last may be half written."""
    content, at, number = segment.read_bytes(), MAGIC_BYTES, int(segment.stem)
    while at + HEADER.size <= len(content):
        length, _, _ = HEADER.unpack_from(content, at)
        body = content[at + HEADER.size : at + HEADER.size + length]
        if len(body) < length:
            return
        number += 1
        _, event = msgpack.unpackb(body, strict_map_key=False)
        kind, fields = (event, None) if isinstance(event, str) else next(iter(event.items()))
        yield Record(number, at, body, kind, fields)
        at += HEADER.size + length
