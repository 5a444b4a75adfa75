"""Settings of processes for tests, filled with the defaults of the config's classes, and processes that are started by
them as by a file of a user's."""

from __future__ import annotations

import json
import sys
from typing import Any, TypeVar

from primerl.config.errors.validation_errors import describe
from primerl.config.process_files.files import resolved
from primerl.config.schema import env_worker, inference, sft, trainer
from primerl.envs import settings as worker_settings
from primerl.inference import settings as engine_settings
from primerl.launch.preflight.sft import LAUNCHER_ONLY
from primerl.process.setting_checks import from_mapping
from primerl.train import settings as trainer_settings
from primerl.train import sft_settings
from pydantic import BaseModel, ValidationError

D = TypeVar("D")
SCHEMA: dict[Any, type[BaseModel]] = {
    trainer_settings.ComputationConfig: trainer.Computation,
    trainer_settings.LoraConfig: trainer.Lora,
    trainer_settings.LossConfig: trainer.Loss,
    trainer_settings.OptimConfig: trainer.Optimizer,
    trainer_settings.TrainerConfig: trainer.TrainerConfig,
    sft_settings.LossMaskConfig: sft.LossMask,
    sft_settings.RowsConfig: sft.Rows,
    sft_settings.SFTConfig: sft.SFTConfig,
    sft_settings.SubsetConfig: sft.Subset,
    engine_settings.InferenceConfig: inference.InferenceConfig,
    worker_settings.WorkerConfig: env_worker.EnvWorkerConfig,
}
"""The class that has the defaults and bounds of a process's settings."""


def filled(cls: type[D], **given: Any) -> D:
    """The settings, filled and checked as a user's file. Raises pydantic's ValidationError."""
    return from_mapping(cls, values(cls, given))


def values(cls: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """What the resolved file of such settings holds."""
    return {name: value for name, value in resolved(SCHEMA[cls], given).items() if name not in LAUNCHER_ONLY}


def refusal(cls: type[Any], given: dict[str, Any]) -> str:
    """What a user is told of the settings; empty where they are fine."""
    try:
        filled(cls, **given)
    except ValidationError as error:
        return describe(error, SCHEMA[cls])
    return ""


def run_trainer(given: dict[str, Any]) -> int:
    """`primerl trainer` by a file that holds these; the exit code."""
    from primerl.train.loop import rl

    return _run(trainer_settings.TrainerConfig, given, rl.main)


def run_sft(given: dict[str, Any]) -> int:
    """`primerl sft` by a file that holds these, without what its launcher checks; the exit code."""
    from primerl.train.loop import sft as loop

    return _run(sft_settings.SFTConfig, given, loop.main)


def _run(cls: type[Any], given: dict[str, Any], main: Any) -> int:
    message = refusal(cls, given)
    if message:
        print(f"error: {message}", file=sys.stderr)
        return 2
    return int(main(filled(cls, **given)))


TRAINER = (
    "import json, sys; from primerl.train.loop import rl; from primerl.train.settings import TrainerConfig; "
    "from primerl.process.setting_checks import from_mapping; sys.exit(rl.main(from_mapping(TrainerConfig, "
    "json.loads(sys.argv[1]))))"
)
"""The trainer as a process of its own, by `trainer_json`."""


def trainer_json(given: dict[str, Any]) -> str:
    return json.dumps(values(trainer_settings.TrainerConfig, given))


def worker_json(given: dict[str, Any]) -> str:
    return json.dumps(values(worker_settings.WorkerConfig, given))
