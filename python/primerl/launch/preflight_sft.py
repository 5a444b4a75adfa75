"""What can be known to be wrong with a supervised fine-tuning before torch is imported or a file is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from primerl import extras
from primerl.config.load import ConfigError
from primerl.config.sft import SFTConfig
from primerl.launch import monitors, preflight
from primerl.launch.preflight_model import check_model, check_trainable, longest_sequence
from primerl.train.adapter_files import check_lora_files, read_adapter_config
from primerl.train.bad_rows import BadRow, BadRows
from primerl.train.config import ConfigError as SettingError
from primerl.train.conversations import RowError
from primerl.train.sft_config import RowsConfig
from primerl.train.sft_config import SFTConfig as Settings
from primerl.train.sources import DataError, Source, sources

CONFIG_FILE = Path("configs") / "sft.toml"
LAUNCHER_ONLY = {"clean_output_dir", "dry_run", "fork_server", "wandb", "monitors", "monitor"}
"""Settings that the process which trains has no part in."""
READ_AT_ONCE = 64 * 2**20
"""Bytes of a file that are read within a second or two; what is longer is read once, when it is tokenised."""


def check(config: SFTConfig, values: dict[str, Any]) -> None:
    """`values`: the settings as the trainer is given them. Raises `primerl.config.load.ConfigError`."""
    extras.require("`primerl sft`", "torch", "transformers")
    try:
        settings = Settings.from_dict(values)
    except SettingError as error:
        raise ConfigError(str(error)) from None
    if settings.resumes and config.clean_output_dir:
        raise ConfigError("ckpt.resume_step goes on with the run that clean_output_dir deletes; leave one of them out")
    preflight.check_output_dir(
        config.output_dir,
        clean=config.clean_output_dir,
        goes_on=(lambda folder: (folder / CONFIG_FILE).is_file()) if settings.resumes else None,
    )
    _check_model(settings)
    monitors.check(config)
    try:
        _check_lora(settings)
        _check_rows(settings.data, "data.")
        if settings.val is not None:
            _check_rows(settings.val.data, "val.data.")
    except (SettingError, DataError) as error:
        raise ConfigError(str(error)) from None


def _check_model(settings: Settings) -> None:
    limit = None
    if settings.model.path is not None:
        folder = Path(settings.model.path)
        check_model(folder)
        check_trainable(folder)
        limit = longest_sequence(folder)
    elif settings.model.tiny is not None:
        limit = settings.model.tiny.max_position_embeddings
    if limit is not None and settings.data.seq_len > limit:
        raise ConfigError(
            f"data.seq_len ({settings.data.seq_len}) is above what the model can attend to ({limit}); lower it"
        )


def _check_lora(settings: Settings) -> None:
    lora, path = settings.model.lora, settings.model.path
    if lora is not None and path is not None:
        check_lora_files(lora, Path(path), "model.lora.")
    elif lora is not None and lora.adapter_path is not None:
        read_adapter_config(lora, "model.lora.")


def _check_rows(rows: RowsConfig, prefix: str) -> None:
    found = sources(rows, prefix)
    for source in found:
        source.check()
    bad = BadRows(rows.max_bad_share, prefix)
    for source in found:
        if source.is_plain and Path(os.path.expanduser(source.config.path)).stat().st_size <= READ_AT_ONCE:
            _read(source, bad)
    bad.check()


def _read(source: Source, bad: BadRows) -> None:
    bad.begin(source.title, source.unit)
    for row in source.rows():
        if isinstance(row.content, RowError):
            bad.add(BadRow(row.index, row.content.kind, str(row.content)))
        else:
            bad.count()
