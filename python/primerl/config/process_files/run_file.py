"""The file of a run's own config, and the folder it is in.

The file holds what was given, in the full form: `primerl rl @ configs/rl.toml` resumes the run; the list of runs has a
copy. A run that is not told where to write gets a folder of its own, whose name begins with the time, so that names
sort. A start that resumes (`ckpt.resume_step`, `retry_errors`) takes the newest folder of the same label.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import absolute, dump_toml, write_text
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.launched import C, Launched
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig

LONGEST = 40
TIME = "%Y-%m-%d_%H-%M-%S"
STAMP = r"\d{4}(-\d\d){2}_\d\d(-\d\d){2}"


def located(config: C) -> C:
    """The config with an `output_dir`, if none was given. Raises ConfigError if there is no folder to resume from."""
    if "output_dir" in config.model_fields_set:
        return config
    # The default is where all of these are.
    beside, label = Path(config.output_dir), label_of(config)
    key = goes_on(config)
    name = f"{time.strftime(TIME)}_{label}_{secrets.token_hex(2)}" if key is None else newest(beside, label, key)
    found: C = config.model_copy(update={"output_dir": str(beside / name)})
    found._chosen = True
    return found


def with_folder(message: str, config: Launched) -> str:
    """Adds `--output-dir` to the command that a message says resumes the run: if the folder was not given, the same
    command alone would start another run. (With `--retry-errors`, for instance, it finds the folder.)"""
    if not config._chosen:
        return message
    return re.sub("the same command(?! with)", f"the same command with --output-dir {config.output_dir}", message)


def label_of(config: Launched) -> str:
    """The first environment, the file of rows, or the model that is served."""
    if isinstance(config, SFTConfig):
        text = Path(config.data.path or "").stem
    elif isinstance(config, InferenceRunConfig | ServeConfig):
        text = Path(absolute(config.model.path)).name
    else:
        entries = config.env if isinstance(config, EvalConfig) else config.orchestrator.train.env
        text = entries[0].label if entries else ""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.")[:LONGEST] or "run"


def goes_on(config: Launched) -> str | None:
    """The key that asks for resuming, if any."""
    if isinstance(config, EvalConfig):
        return "retry_errors" if config.retry_errors else None
    if isinstance(config, InferenceRunConfig | ServeConfig):
        return None
    return "ckpt.resume_step" if config.ckpt is not None and config.ckpt.resume_step is not None else None


def newest(beside: Path, label: str, key: str) -> str:
    """The newest folder with that label. Raises ConfigError."""
    from primerl.config.process_files.files import absolute

    folder = Path(absolute(str(beside)))
    pattern = re.compile(rf"{STAMP}_{re.escape(label)}_[0-9a-f]{{4}}")
    names = [path.name for path in (folder.iterdir() if folder.is_dir() else ()) if pattern.fullmatch(path.name)]
    if not names:
        raise ConfigError.at(
            key,
            f"there is no run of {label} in {folder} to resume; give its folder as --output-dir, or "
            "`primerl run resume ID` (`primerl run list` has the ids)",
        )
    return max(names)


def path(config: RLConfig | EvalConfig) -> Path:
    name = "eval.toml" if isinstance(config, EvalConfig) else "rl.toml"
    return Path(absolute(config.output_dir)) / "configs" / name


def write(config: RLConfig | EvalConfig) -> None:
    write_text(path(config), to_toml(config))


def to_toml(config: RLConfig | EvalConfig) -> str:
    return dump_toml(settings(config))


def settings(config: Launched) -> dict[str, Any]:
    """The keys that were given, so that unset ones are decided again (some defaults depend on their being unset).
    Without one-time requests."""
    exclude: dict[str, Any] = {"dry_run": True, "clean_output_dir": True, "retry_errors": True, "skip_event": True}
    if isinstance(config, RLConfig) and config.ckpt is not None:
        exclude["trainer"] = {"ckpt"}  # the same settings
    found: dict[str, Any] = config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude=exclude)
    if isinstance(config, RLConfig):
        # If it was not given, its value follows from the short form or the model.
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
