"""Writes a workspace's files without replacing any."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import write_text
from primerl.workspace.scaffold import Files


def missing(folder: Path, wanted: Files) -> tuple[list[Path], list[Path]]:
    """The paths that are to be written, and those that are there already and stay as they are.

    Raises:
        ConfigError: A file stands where a folder has to be.
    """
    new, kept = list[Path](), list[Path]()
    for relative in wanted:
        path = folder / relative
        for parent in path.parents:
            if parent.exists() and not parent.is_dir():
                raise ConfigError(f"{parent} is a file, and {path} would be in a folder of that name; move it away")
        (kept if os.path.lexists(path) else new).append(path)
    return new, kept


def write_missing(folder: Path, wanted: Files) -> tuple[list[Path], list[Path]]:
    """Writes what is not there; returns what was written, and what was left as it is.

    Raises:
        ConfigError: A file stands where a folder has to be (nothing is written then), or one cannot be written.
    """
    new, kept = missing(folder, wanted)
    texts = {folder / relative: text for relative, text in wanted.items()}
    for path in new:
        try:
            write_text(path, texts[path])
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}; what was written before it stays") from None
    return new, kept


def write_folder(folder: Path, wanted: Files) -> None:
    """A new folder, which is there with all of its files or not at all.

    Raises:
        ConfigError: It is there already, or cannot be written.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} is there already; choose another name or --path, or --force to write into it")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for relative, text in wanted.items():
            write_text(partial / relative, text)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"{folder} cannot be written: {error}") from None


def write_over(folder: Path, wanted: Files) -> None:
    """Writes all files, over those that are there; others of the folder stay.

    Raises:
        ConfigError: One cannot be written.
    """
    missing(folder, wanted)
    for relative, text in wanted.items():
        try:
            write_text(folder / relative, text)
        except OSError as error:
            raise ConfigError(f"{folder / relative} cannot be written: {error}") from None
