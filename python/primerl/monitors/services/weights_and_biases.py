"""Weights & Biases: one run there for all that a run writes, metrics, evaluations, samples and distributions.

W&B's own step counts records, so that it knows how far it has come, and takes nothing twice; curves are drawn over
`step`, the run's own. A monitor that is started again continues the same run (`resume="allow"`) where W&B says that
it ends, or, offline, where the files do that were written. One process writes all of it, so offline is possible, which
W&B's shared mode (several processes that write one run) is not.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl.monitors.keys import usable
from primerl.monitors.monitor import Distribution, Monitor, RefusedError, Run, Sample, Status

log = logging.getLogger(__name__)

INIT_S = 60.0
HEADER_BYTES, BLOCK_BYTES = 7, 32768
PIECE = struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4
REFUSED = re.compile(r"returned error (400|401|403|404)\b|permission denied")
COLUMNS: list[str | int] = ["step", "environment", "prompt", "completion", "reward", "advantage"]
COLUMNS += ["example", "group", "rollout", "turns", "tokens", "learnt_tokens", "staleness"]


class WandbMonitor(Monitor):
    """The key is WANDB_API_KEY in the environment, or in the netrc file."""

    def __init__(
        self,
        project: str,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        offline: bool = False,
    ) -> None:
        self.project = project
        self.name = name
        self.entity = entity
        self.group = group
        self.tags = tags or []
        self.offline = offline
        self._run: Any = None

    def start(self, run: Run) -> int | None:
        import wandb

        try:
            key = usable(os.environ.get("WANDB_API_KEY"), "WANDB_API_KEY")
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if key is not None:
            os.environ["WANDB_API_KEY"] = key  # from where W&B reads it
        if "id" not in run.state:
            run.remember(id=uuid.uuid4().hex[:12])
        # Before W&B begins a file of its own.
        has = written(run.folder / "wandb", run.state["id"]) if self.offline else None
        settings = wandb.Settings(
            mode="offline" if self.offline else "online",
            console="off",  # this process's log is no log of the training
            disable_git=True,
            quiet=True,
            init_timeout=INIT_S,
            login_timeout=INIT_S,
        )
        try:
            self._run = wandb.init(
                id=run.state["id"],
                resume="allow",
                project=self.project,
                entity=self.entity,
                name=self.name or run.name,
                group=self.group,
                tags=self.tags,
                dir=run.folder,
                config=run.config,
                settings=settings,
            )
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise RefusedError(f"W&B refuses the key: {error}; give a good one in WANDB_API_KEY") from error
        except wandb.errors.CommError as error:
            # Half a start would make the next attempt find its own run in use.
            wandb.teardown()
            if REFUSED.search(str(error)):
                raise RefusedError(f"W&B refuses the run: {error}") from error
            raise
        self._run.define_metric("*", step_metric="step")
        if self.offline:
            run.say(where=f"{run.folder / 'wandb'} (offline; `wandb sync` sends it)")
            return has
        run.say(where=str(self._run.url))
        return int(self._run.starting_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._log({"step": step, **metrics})

    def samples(self, step: int, samples: list[Sample]) -> None:
        import wandb

        rows = [[step, *(getattr(sample, str(name)) for name in COLUMNS[1:])] for sample in samples]
        self._log({"step": step, "samples": wandb.Table(columns=COLUMNS, data=rows)}, commit=False)

    def distributions(self, step: int, distributions: dict[str, Distribution]) -> None:
        import numpy
        import wandb

        histograms = {
            f"distributions/{name}": wandb.Histogram(np_histogram=(numpy.array(found.counts), numpy.array(found.edges)))
            for name, found in distributions.items()
        }
        self._log({"step": step, **histograms}, commit=False)

    def finish(self, status: Status, reason: str) -> None:
        self._run.summary["primerl/ended"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def _log(self, values: dict[str, Any], *, commit: bool = True) -> None:
        # Samples and distributions have one number, and so one row.
        self._run.log(values, step=self.number, commit=commit)


def written(folder: Path, run_id: str) -> int:
    """The number after the last record that the files of offline runs of this id hold. W&B's own process keeps records
    for a while before it writes them, and a kill loses them, or cuts one: that is repaired, since `wandb sync`
    sends nothing of a run of which one file cannot be read."""
    last = -1
    for file in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        if repair(file):
            last = max(last, last_record(file))
        else:
            shutil.rmtree(file.parent)
    return last + 1


def repair(file: Path) -> bool:
    """Cuts off half a record at the end of the file. Returns whether there is a whole one in it."""
    end = max((end for _, end in stored(file)), default=0)
    if end and end < file.stat().st_size:
        os.truncate(file, end)
    return end > 0


def last_record(file: Path) -> int:
    """W&B's step of the last row in a file of its own; -1 where it has none."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    last = -1
    for data, _ in stored(file):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            last = max(last, record.history.step.num)
    return last


def stored(file: Path) -> Iterator[tuple[bytes, int]]:
    """The whole records of a `.wandb` file, and where each ends. It is LevelDB's log behind a header of seven bytes:
    blocks of 32 KiB, in them pieces of records (checksum, length, kind)."""
    content = file.read_bytes()
    place, record = HEADER_BYTES, b""
    while place + PIECE.size <= len(content):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < PIECE.size:
            place += left  # too little for a piece: the block ends with zeros
            continue
        _, length, kind = PIECE.unpack_from(content, place)
        piece = content[place + PIECE.size : place + PIECE.size + length]
        if kind == 0 or len(piece) < length:
            return
        place += PIECE.size + length
        record = piece if kind in (WHOLE, FIRST) else record + piece
        if kind in (WHOLE, LAST):
            yield record, place
