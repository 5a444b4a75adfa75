"""The configs of commands that start processes in a folder of their own: here, in a Slurm job, or on a Ray cluster."""

from __future__ import annotations

from typing import TypeVar

from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig

Launched = RLConfig | SFTConfig | EvalConfig | InferenceRunConfig | ServeConfig
C = TypeVar("C", RLConfig, SFTConfig, EvalConfig, InferenceRunConfig, ServeConfig)
