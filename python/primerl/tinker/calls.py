"""One HTTP call of the Tinker API, as its handlers get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_HERE = "{method} {path} is not part of this server: what it has is in docs/tinker.md"
Body = dict[str, Any]


class RefusedError(Exception):
    """An answer that is no result."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class Call:
    method: str
    parts: list[str]
    """The path's, after the prefix."""
    body: Body
    raw: bytes
    headers: Mapping[str, str]
    query: Mapping[str, str]

    def need(self, *names: str) -> None:
        """Raises RefusedError for a body without one of these."""
        for name in names:
            if self.body.get(name) is None:
                raise RefusedError(422, f"{'/'.join(self.parts)}: the body lacks {name}")
