"""A folder of its own for each run that is not told where to write.

    outputs/rl/2026-11-26_16-14-03_reverse-text_7f3a     when it was started, what it trains on, four digits of chance

Names are sorted by time. A start that goes on (`ckpt.resume_step`, `retry_errors`) takes the newest of the same name.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path
from typing import TypeVar

from primerl.config.complaint import ConfigError
from primerl.config.evaluation import EvalConfig
from primerl.config.rl import RLConfig
from primerl.config.sft import SFTConfig

C = TypeVar("C", RLConfig, SFTConfig, EvalConfig)
LONGEST = 40
TIME = "%Y-%m-%d_%H-%M-%S"
STAMP = r"\d{4}(-\d\d){2}_\d\d(-\d\d){2}"


def located(config: C) -> C:
    """The config with an `output_dir`, where none was given. Raises ConfigError where it is to go on with none."""
    if "output_dir" in config.model_fields_set:
        return config
    # The default is where all of these are.
    beside, label = Path(config.output_dir), label_of(config)
    key = goes_on(config)
    name = f"{time.strftime(TIME)}_{label}_{secrets.token_hex(2)}" if key is None else newest(beside, label, key)
    found: C = config.model_copy(update={"output_dir": str(beside / name)})
    found._chosen = True
    return found


def with_folder(message: str, config: RLConfig | SFTConfig | EvalConfig) -> str:
    """Of words that say what goes on with the run: where the folder was not given, the same command alone would begin
    another one. (With `--retry-errors`, say, it finds the folder.)"""
    if not config._chosen:
        return message
    return re.sub("the same command(?! with)", f"the same command with --output-dir {config.output_dir}", message)


def label_of(config: RLConfig | SFTConfig | EvalConfig) -> str:
    """The first environment, or the file of rows."""
    if isinstance(config, SFTConfig):
        text = Path(config.data.path or "").stem
    else:
        entries = config.env if isinstance(config, EvalConfig) else config.orchestrator.train.env
        text = entries[0].label if entries else ""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.")[:LONGEST] or "run"


def goes_on(config: RLConfig | SFTConfig | EvalConfig) -> str | None:
    """The key that asks to go on with what is there."""
    if isinstance(config, EvalConfig):
        return "retry_errors" if config.retry_errors else None
    return "ckpt.resume_step" if config.ckpt is not None and config.ckpt.resume_step is not None else None


def newest(beside: Path, label: str, key: str) -> str:
    """Of the folders with that label. Raises ConfigError."""
    from primerl.config.resolve import absolute

    folder = Path(absolute(str(beside)))
    pattern = re.compile(rf"{STAMP}_{re.escape(label)}_[0-9a-f]{{4}}")
    names = [path.name for path in (folder.iterdir() if folder.is_dir() else ()) if pattern.fullmatch(path.name)]
    if not names:
        raise ConfigError(
            f"{key}: there is no run of {label} in {folder} to go on with; give its folder as --output-dir, or "
            "`primerl run resume ID` (`primerl run list` has the ids)"
        )
    return max(names)
