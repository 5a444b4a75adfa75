"""Rows, settings and runs for the tests of supervised fine-tuning."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primerl.train.data.masks import Masker
from primerl.train.data.rows import Limits, Rows, load_rows
from primerl.train.data.sources import sources
from primerl.train.sft_settings import LossMaskConfig, RowsConfig, SubsetConfig
from settings_helpers import filled

NOW = 1.7e9


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def load(
    folder: Path, data: Path | list[SubsetConfig], bad_rows: Path, *, mask: LossMaskConfig | None = None, **limits: Any
) -> Rows:
    """The rows of a file or of several datasets, by the tokenizer and template in `folder`."""
    config = (
        filled(RowsConfig, path=str(data))
        if isinstance(data, Path)
        else filled(RowsConfig, subsets=[asdict(subset) for subset in data])
    )
    masker = Masker(folder, mask or filled(LossMaskConfig), NOW)
    given = {"seq_len": 200, "long_rows": "drop", "max_bad_share": 0.0, "key": "data.", **limits}
    return load_rows(sources(config, "data."), masker, Limits(**given), bad_rows)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A small run on `rows.jsonl` in the folder; `data`, `optim` are merged into what is there."""
    base: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": 40,
        "threads": 1,
        "model": {"tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}},
        "data": {"path": str(folder / "rows.jsonl"), "batch_size": 64, "seq_len": 64},
        "optim": {"lr": 2e-2, "warmup_steps": 5, "schedule": "linear", "weight_decay": 0.01},
    }
    for name, value in changes.items():
        merged = name in ("data", "optim") and isinstance(value, dict)
        base[name] = {**base[name], **value} if merged else value
    if "subsets" in base["data"]:
        base["data"].pop("path", None)
    return base


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
