"""The trainer's `/metrics`: the line of `metrics.jsonl` that was written last."""

from __future__ import annotations

import json
import os
from pathlib import Path

from primerl.exposition import Exposition
from primerl.train.files import write_text

FILE = Path("run") / "trainer_metrics.json"


class ExposedMetrics:
    """`primerl_trainer{name="reward/all/mean"}` and so on, and `primerl_trainer_step`."""

    def __init__(self, port: int, output_dir: Path) -> None:
        """Where it is served is written to `<output_dir>/run/trainer_metrics.json`. Raises PortTakenError."""
        self._exposition = Exposition(port)
        from prometheus_client import Gauge

        registry = self._exposition.registry
        self._step = Gauge("primerl_trainer_step", "Last step that was trained", registry=registry)
        self._values = Gauge("primerl_trainer", "Metrics of the last step, by name", ["name"], registry=registry)
        file = output_dir / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"url": self.url, "pid": os.getpid()}))

    @property
    def url(self) -> str:
        return self._exposition.url

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._step.set(step)
        # Names of the last step only: one that is not measured any more is not shown as if it were.
        self._values.clear()
        for name, value in metrics.items():
            self._values.labels(name).set(value)

    def close(self) -> None:
        self._exposition.close()
