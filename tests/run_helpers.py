"""A small run for tests of what looks after runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from primerl.config.rl import RLConfig
from primerl.models.tiny import TinyConfig, write_model

CONFIG = """\
output_dir = "outputs/small"
max_steps = 2
seq_len = 256
[model]
path = "tiny"
[trainer]
threads = 1
[ckpt]
interval = 1
[orchestrator]
batch_size = 8
group_size = 4
sampling.max_tokens = 16
[[orchestrator.train.env]]
id = "reverse-text"
taskset = { split = "train", letters = "a-j", min_length = 3, max_length = 6 }
[inference]
max_model_len = 128
"""


def write_run(folder: Path) -> Path:
    """A config, and the model with random weights that it names."""
    small = TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16)
    write_model(folder / "tiny", small, seed=3)
    file = folder / "rl.toml"
    file.write_text(CONFIG)
    return file


def config_of(**more: Any) -> RLConfig:
    return RLConfig.model_validate({**tomllib.loads(CONFIG), **more})
