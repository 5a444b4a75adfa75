"""A step's metrics as a line of `metrics.jsonl`, a console line, and Prometheus's `/metrics`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from primerl.train.checkpoint.files import keep_steps, remove_temporary, write_text
from primerl.train.checkpoint.step_folders import saving
from primerl.train.loop.progress import duration

log = logging.getLogger(__name__)

EXPOSITION_FILE = Path("run") / "trainer_metrics.json"
"""Where the URL of `/metrics` is written, in the output folder."""


SHOWN = {
    "reward/all/mean": "reward",
    "loss/mean": "loss",
    "entropy/all/mean": "entropy",
    "mismatch_kl/all/mean": "mismatch_kl",
    "masked/all/mean": "masked",
    "staleness/all/mean": "staleness",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
    "time/step": "s",
    "time/wait_for_batch": "waited",
    "perf/throughput": "tokens/s",
    "perf/mfu": "mfu",
}
"""Metrics of the policy trainer's console line, with their short names."""


class ExposedMetrics:
    """Serves the last line of `metrics.jsonl` as `primerl_trainer{name="reward/all/mean"}` and so on, and
    `primerl_trainer_step`."""

    def __init__(self, port: int, output_dir: Path) -> None:
        """Writes its URL to `<output_dir>/run/trainer_metrics.json`. Raises PortTakenError."""
        from prometheus_client import Gauge

        # Not at the top: what computes a step runs without `primerl.net` (benches/trainer_gpu.py).
        from primerl.net.prometheus import Exposition

        self._exposition = Exposition(port)

        registry = self._exposition.registry
        self._step = Gauge("primerl_trainer_step", "Last step that was trained", registry=registry)
        self._values = Gauge("primerl_trainer", "Metrics of the last step, by name", ["name"], registry=registry)
        file = output_dir / EXPOSITION_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"url": self.url, "pid": os.getpid()}))

    @property
    def url(self) -> str:
        return self._exposition.url

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._step.set(step)
        # Only the last step's names: a metric that is no longer measured must not look current.
        self._values.clear()
        for name, value in metrics.items():
            self._values.labels(name).set(value)

    def close(self) -> None:
        self._exposition.close()


class MetricsWriter:
    """Appends one JSON object a step to `<output_dir>/metrics.jsonl`, or another file; a line is whole once it is
    there."""

    def __init__(
        self,
        output_dir: Path,
        *,
        after: int = 0,
        name: str = "metrics.jsonl",
        also: Callable[[int, dict[str, float]], None] | None = None,
    ) -> None:
        """`after`: the step training resumes from; lines of later steps are dropped and written again. `also` gets
        what was written."""
        self._also = also
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path = output_dir / name
        with saving(self._path):
            remove_temporary(self._path)
            keep_steps(self._path, after)
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Raises SavingError."""
        # JSON has no NaN: a value that is not finite becomes null, which every reader treats as missing.
        self.append(step, {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())})
        if self._also is not None:
            self._also(step, metrics)

    def append(self, step: int, values: dict[str, Any]) -> None:
        """Values by the names of the line's own do not replace these. Raises SavingError."""
        own = {"step": step, "timestamp": round(time.time(), 3)}
        with saving(self._path):
            self._file.write(json.dumps(own | values | own) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing retries a write whose failure was already reported.
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self._file.close()


OF_EVERY_STEP = ("save_ckpt", "wait_for_ckpt", "metrics")
"""Parts of a step's time that are always in its line, even if nothing was saved. `metrics` is the time of the previous
line."""


class Clock:
    """Seconds spent in the parts of a step: `lap(name)` ends a part, `step()` ends the step."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, always: Sequence[str] = ()) -> None:
        """`always`: parts that every step reports, even with 0 seconds."""
        self._now = now
        self._always = always
        self._start = self._last = now()
        self._parts = dict.fromkeys(always, 0.0)

    def add_background(self, name: str, seconds: float) -> None:
        """Add the time of a background thread, which is not part of the step."""
        self._parts[name] = seconds

    def lap(self, name: str) -> None:
        now = self._now()
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    def step(self) -> dict[str, float]:
        """`time/step` and `time/<part>` since the last call, in seconds."""
        now = self._now()
        times = {"time/step": now - self._start, **{f"time/{name}": value for name, value in self._parts.items()}}
        self._start = self._last = now
        self._parts = dict.fromkeys(self._always, 0.0)
        return times


def peak_memory(device: torch.device) -> float:
    """Most memory held so far, in GiB: of torch's tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**30 if sys.platform == "darwin" else 2**20)


def log_to_stdout(level: str) -> None:
    """Send this package's log to standard output, one line a record. The leading rank logs everything, the others
    warnings and errors."""
    rank = os.environ.get("RANK", "0")
    title = "" if os.environ.get("WORLD_SIZE", "1") == "1" else f"rank {rank}: "
    handler = _Output(sys.stdout)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {title}%(message)s", "%H:%M:%S"))
    logger = logging.getLogger("primerl")
    logger.handlers = [handler]
    logger.setLevel(level.upper() if rank == "0" else max(logging.WARNING, getattr(logging, level.upper())))
    logger.propagate = False


@contextlib.contextmanager
def log_copied_to(file: Path) -> Iterator[None]:
    """Within the block, copy what `log_to_stdout` shows on the leading rank to `file`. If it cannot be written, there
    is no copy."""
    logger, copy = logging.getLogger("primerl"), None
    with contextlib.suppress(OSError):
        if os.environ.get("RANK", "0") == "0":
            file.parent.mkdir(parents=True, exist_ok=True)
            copy = _Copy(file)
            copy.setFormatter(logger.handlers[0].formatter)
            logger.addHandler(copy)
    try:
        yield
    finally:
        if copy is not None:
            logger.removeHandler(copy)
            with contextlib.suppress(OSError):
                copy.close()


class _Copy(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Output(logging.StreamHandler[TextIO]):
    """Training continues if no one reads its output or the disk is full: that is reported once, on standard error,
    where warnings and errors go from then on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if self.stream is sys.stderr:
            return
        output = self.stream
        # Not setStream, which would flush the rest to the stream that cannot be written.
        self.stream = sys.stderr
        self.setLevel(logging.WARNING)
        # Buffered text would be retried, also when Python exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        said = f"standard output cannot be written ({error}); training continues with metrics.jsonl, without this log"
        self.handle(logging.LogRecord(record.name, logging.WARNING, "", 0, said, None, None))
        if record.levelno >= logging.WARNING:
            self.handle(record)


def console_line(
    step: int, max_steps: int, metrics: dict[str, float], shown: dict[str, str], left_s: float | None = None
) -> str:
    """`step 3/60  reward 0.512  ...  eta 1:07`: the metrics named in `shown`, under its short names, if present, and
    how long the rest will take, if known."""
    parts = [f"{short} {metrics[name]:.4g}" for name, short in shown.items() if name in metrics]
    parts += [] if left_s is None else [f"eta {duration(left_s)}"]
    return f"step {step}/{max_steps}  " + "  ".join(parts)
