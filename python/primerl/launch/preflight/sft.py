"""What can be known to be wrong with a supervised fine-tuning before torch is imported or a file is written."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.process_files import resolve
from primerl.config.process_files.files import keys_of
from primerl.config.schema.sft import SFTConfig
from primerl.launch import monitors
from primerl.launch.preflight import hub, output_folder
from primerl.launch.preflight.model_folder import check_model, check_trainable, longest_sequence
from primerl.process import extras, signals
from primerl.process.imports import load_torch_libraries
from primerl.process.setting_checks import from_mapping
from primerl.train.adapters.files import check_lora_files, read_adapter_config
from primerl.train.data.bad_rows import BadRow, BadRows
from primerl.train.data.conversations import RowError
from primerl.train.data.sources import DataError, Source, sources
from primerl.train.settings import ConfigError as SettingError
from primerl.train.sft_settings import RowsConfig
from primerl.train.sft_settings import SFTConfig as Settings

CONFIG_FILE = Path("configs") / "sft.toml"
LAUNCHER_ONLY = frozenset(
    {"clean_output_dir", "dry_run", "fork_server", "wandb", "monitors", "monitor", "deployment", "slurm", "ray"}
)
"""Settings that the process which trains has no part in."""
READ_AT_ONCE = 64 * 2**20
"""Bytes of a file that are read within a second or two; what is longer is read once, when it is tokenised."""


def prepared(given: SFTConfig) -> tuple[SFTConfig, dict[str, Any]]:
    """The config with the model's folder, and the settings as the trainer is given them. Weights of the hub are
    downloaded when all else is judged.

    Raises `primerl.config.errors.fail.ConfigError` with every problem, one a line.
    """
    if given.model.path is not None and hub.is_hub_name(given.model.path):
        problems = Problems()
        small = None
        with problems.noted():
            small = hub.with_start(given, weights=False)
        config = resolve.sft(small or given)
        check(config, settings_of(config), problems, weights=False, model=small is not None)
    config = resolve.sft(hub.with_start(given))
    values = settings_of(config)
    check(config, values)
    return config, values


def settings_of(config: SFTConfig) -> dict[str, Any]:
    """What the launcher alone understands stays here."""
    return {name: value for name, value in keys_of(config).items() if name not in LAUNCHER_ONLY}


def check(
    config: SFTConfig,
    values: dict[str, Any],
    problems: Problems | None = None,
    *,
    weights: bool = True,
    model: bool = True,
) -> None:
    """Raises `primerl.config.errors.fail.ConfigError` with every problem, one a line.

    Args:
        values: The settings as the trainer is given them.
        problems: Those that were found before.
        weights: Whether the model's are there yet.
        model: Whether there is a model that could be judged.
    """
    extras.require("`primerl sft`", "torch", "transformers")
    problems = problems or Problems()
    settings = from_mapping(Settings, values)
    if settings.resumes and config.clean_output_dir:
        raise ConfigError(
            "ckpt.resume_step resumes the run that clean_output_dir deletes; omit one of them",
            "ckpt.resume_step",
            "clean_output_dir",
        )
    with problems.noted():
        output_folder.check_output_dir(
            config.output_dir,
            clean=config.clean_output_dir,
            goes_on=_was_begun if settings.resumes else None,
            kind="sft",
        )
    before = len(problems.found)
    if model:
        with problems.noted():
            _check_model(settings, weights=weights)
    whole = model and weights and len(problems.found) == before
    with problems.noted():
        monitors.check(config)
    with problems.noted():
        _in_launchers_words(lambda: _check_lora(settings) if whole else None)
    # Ranks are other processes.
    trains = settings.ranks == 1
    readable = [rows for rows in _rows(settings) if _are_there(*rows, problems)]
    if trains and not (problems.found or config.dry_run or config.slurm or config.ray):
        # Rows are read meanwhile; an exit before that would wait for them. `primerl.train` has set what they read.
        load_torch_libraries()
    for rows, prefix in readable:
        signals.check()
        with problems.noted():
            _in_launchers_words(functools.partial(_check_rows, rows, prefix, keep=trains))
    problems.check()


def _was_begun(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or output_folder.holds_checkpoint(folder)


def _rows(settings: Settings) -> list[tuple[RowsConfig, str]]:
    """With what their keys begin with."""
    own: list[tuple[RowsConfig, str]] = [(settings.data, "data.")]
    return own if settings.val is None else [*own, (settings.val.data, "val.data.")]


def _are_there(rows: RowsConfig, prefix: str, problems: Problems) -> bool:
    def check() -> None:
        for source in sources(rows, prefix):
            source.check()

    before = len(problems.found)
    with problems.noted():
        _in_launchers_words(check)
    return len(problems.found) == before


def _in_launchers_words(find: Callable[[], None]) -> None:
    try:
        find()
    except (SettingError, DataError) as error:
        raise ConfigError.like(error) from None


def _check_model(settings: Settings, *, weights: bool) -> None:
    limit = None
    if settings.model.path is not None:
        folder = Path(settings.model.path)
        check_model(folder, weights=weights)
        trusted = settings.model.trust_remote_code
        check_trainable(folder, ranks=settings.ranks, compiles=settings.compile, trusted=trusted)
        limit = longest_sequence(folder)
    elif settings.model.tiny is not None:
        limit = settings.model.tiny.max_position_embeddings
    if limit is not None and settings.data.seq_len > limit:
        raise ConfigError(
            f"data.seq_len ({settings.data.seq_len}) is above what the model can attend to ({limit}); lower it",
            "data.seq_len",
        )


def _check_lora(settings: Settings) -> None:
    lora, path = settings.model.lora, settings.model.path
    if lora is not None and path is not None:
        check_lora_files(lora, Path(path), "model.lora.")
    elif lora is not None and lora.adapter_path is not None:
        read_adapter_config(lora, "model.lora.")


def _check_rows(rows: RowsConfig, prefix: str, *, keep: bool) -> None:
    bad = BadRows(rows.max_bad_share, prefix)
    for source in sources(rows, prefix):
        if source.is_plain and Path(os.path.expanduser(source.config.path)).stat().st_size <= READ_AT_ONCE:
            _read(source, bad, keep=keep)
    bad.check()


def _read(source: Source, bad: BadRows, *, keep: bool) -> None:
    bad.begin(source.title, source.unit)
    for row in source.rows(keep=keep):
        if isinstance(row.content, RowError):
            bad.add(BadRow(row.index, row.content.kind, str(row.content)))
        else:
            bad.count()
