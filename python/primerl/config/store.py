"""Where a run's checkpoints and adapters are kept for other runs, and how many of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt

from primerl.config.base import Section

Kept = Annotated[int, Field(ge=-1)]
"""How many of the newest; -1 for all."""


class StoredAdapters(Section):
    """Adapters that are kept in the store."""

    interval: NonNegativeInt = 0
    """Steps between adapters that are kept; 0 keeps the one of the run's end only."""
    keep: Kept = 3
    """Newest adapters that are kept, beside those that are deployed; -1 keeps all."""


class Store(Section):
    """Where checkpoints and adapters are kept beside the run's folder, for other runs to begin with."""

    url: str | None = Field(default=None, min_length=1)
    """Folder, or any URL that fsspec knows, such as `s3://bucket/runs`; a folder of the user's where it is left out."""
    keep: Kept = 5
    """Newest checkpoints that are kept; -1 keeps all."""
    adapters: StoredAdapters = StoredAdapters()
