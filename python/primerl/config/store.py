"""Where checkpoints and weights of runs are kept beyond the run's own folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from primerl.config.base import Bound, LargeCountOrZero, SecondsOrZero, Section
from primerl.process.setting_checks import MOST_COUNT


def _all_or_some(value: int) -> int:
    if value == 0:
        raise ValueError("0 would keep none; leave the store out, or give -1 for all")
    return value


Kept = Annotated[int, Field(ge=-1, le=MOST_COUNT), Bound("-1 or at least 1"), AfterValidator(_all_or_some)]


class StoredAdapters(Section):
    """Adapters in the store."""

    interval: LargeCountOrZero = 0
    """Steps between adapters that are stored; 0: only the last one."""
    keep: Kept = 3
    """Newest adapters of a run that are kept; -1: all. Deployed ones always are."""


class Store(Section):
    """Copies of a run's checkpoints and weights, made while it goes on (docs/runs.md)."""

    url: str | None = Field(default=None, min_length=1)
    """Folder, or a URL that fsspec knows (`s3://`, `gs://`); a folder in the state folder where it is left out."""
    keep: Kept = 5
    """Newest checkpoints, and newest model folders, of a run that are kept; -1: all."""
    adapters: StoredAdapters = StoredAdapters()


class StoreWorkerConfig(Section):
    """The process that uploads (`primerl store-worker @ file`)."""

    run: str
    """Id of the run."""
    output_dir: str
    """Its folder."""
    model: str
    """Model folder that it began with."""
    url: str | None = None
    """Of the store."""
    keep: Kept = 5
    """Newest checkpoints and model folders that are kept."""
    adapters_interval: LargeCountOrZero = 0
    """Steps between adapters."""
    adapters_keep: Kept = 3
    """Newest adapters that are kept."""
    give_up_s: SecondsOrZero = 600.0
    """How long one upload is tried again, before it is the next one's turn; seconds."""
