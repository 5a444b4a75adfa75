"""A training loop without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from primerl.config.schema.trainer import Weights
from primerl.models.tiny import TinyConfig, write_model
from primerl.own_trainer.lifetime import Lifetime
from primerl.own_trainer.loop import TrainingLoop
from primerl.train.data.batch import Batch


def write_own(folder: Path) -> Path:
    """The model of such loops."""
    write_model(folder, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    return folder


class Alone(TrainingLoop):
    """Without a run."""

    def __init__(self, output: Path, model: Path) -> None:
        self.announced: list[int] = []
        begun = Lifetime("not begun", "over")
        begun.begin()
        super().__init__(output, str(model), 3, Weights(), None, lifetime=begun, keep_all=False, trusted=False)

    _dtype = "float32"

    def _take(self, step: int) -> Batch | None:
        packed = SimpleNamespace(sequence_lengths=[3, 4])
        return SimpleNamespace(step=step, metrics={"reward/all/mean": 0.5}, micro_batches=(packed,))  # type: ignore[return-value]

    def _announce(self, version: int, manifest: Path, model: Any) -> None:
        self.announced.append(version)

    def _resume(self, step: int) -> None:
        pass

    def _report_saved(self, oldest: int, saved: int | None) -> None:
        pass
