"""What was given for a run, in the full form: the file that the same command goes on from, `primerl rl @
configs/rl.toml`, and the copy in the list of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from primerl.config.evaluation import EvalConfig
from primerl.config.resolve import absolute, dump_toml, write_text
from primerl.config.rl import RLConfig
from primerl.config.sft import SFTConfig


def path(config: RLConfig | EvalConfig) -> Path:
    name = "eval.toml" if isinstance(config, EvalConfig) else "rl.toml"
    return Path(absolute(config.output_dir)) / "configs" / name


def write(config: RLConfig | EvalConfig) -> None:
    write_text(path(config), to_toml(config))


def to_toml(config: RLConfig | EvalConfig) -> str:
    return dump_toml(settings(config))


def settings(config: RLConfig | EvalConfig | SFTConfig) -> dict[str, Any]:
    """What was given, so that what is left out is decided anew (some defaults depend on its being left out). Without
    what is asked for once, to begin with."""
    exclude: dict[str, Any] = {"dry_run": True, "clean_output_dir": True, "retry_errors": True, "skip_event": True}
    if isinstance(config, RLConfig) and config.ckpt is not None:
        exclude["trainer"] = {"ckpt"}  # the same settings
    found: dict[str, Any] = config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude=exclude)
    if isinstance(config, RLConfig):
        # Where nobody gave it, what it became follows from the short form or the model.
        found = {"seq_len": config.seq_len, **found}
        if config.orchestrator.val is not None:
            _without_validation(found["orchestrator"])
    return found


def _without_validation(orchestrator: dict[str, Any]) -> None:
    """Takes out what follows from `val`, which would contradict it once it is changed."""
    for environment in orchestrator["train"]["env"]:
        environment.pop("held_out", None)
    kept = [environment for environment in orchestrator["eval"]["env"] if "validates" not in environment]
    if kept:
        orchestrator["eval"]["env"] = kept
    else:
        del orchestrator["eval"]  # nothing else is in it
