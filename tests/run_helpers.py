"""A small run for tests of what looks after runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from primerl.cli import main
from primerl.config.schema.rl import RLConfig
from primerl.models.tiny import TinyConfig, write_model
from primerl.runs.registry import Registry

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


def begin(folder: Path, *, goes_on: bool = True, name: str = "small", config: str = CONFIG, model: str = "/m") -> str:
    """In the list of runs, as if this process were its launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    with Registry() as registry:
        return registry.begin(folder, config, goes_on=goes_on, form="full", name=name, model=model, environments=["e"])


def end(run: str, code: int = 0) -> None:
    with Registry() as registry:
        registry.end(run, code)


def told(*arguments: str, code: int = 0, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(arguments)) == code, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out
