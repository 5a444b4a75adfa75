"""Where rows come from: files and folders of this machine, or datasets of the Hugging Face hub.

JSON lines and JSON files are read here. Everything else (parquet, arrow, compressed files, folders, splits of a file,
hub names) goes through the `datasets` library (`primerl.train.data.tables`), imported only then.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from primerl.process.extras import described
from primerl.process.problems import ProblemError
from primerl.train.data import kept_rows
from primerl.train.data.conversations import BEHIND, COLUMNS, SCHEMA, Conversation, RowError, conversation
from primerl.train.data.tables import BUILDERS, COMPRESSED, PLAIN, builder, load, reason, without_padding
from primerl.train.settings import ConfigError
from primerl.train.sft_settings import RowsConfig, SubsetConfig

log = logging.getLogger(__name__)


class DataError(ProblemError, ValueError):
    """A dataset cannot be used. The message names it and what to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """A row, or why it is none. `index` is what an editor calls it: the line of a text file (from 1), else the row's
    number (from 0). `share` is how much of the dataset has been read."""

    index: int
    content: Conversation | RowError
    share: float


@dataclass(frozen=True, slots=True)
class Source:
    """One dataset, before it is read."""

    config: SubsetConfig
    key: str
    """Its setting, for messages: `data.path`, `val.data.subsets[1].path`."""

    @property
    def title(self) -> str:
        return self.config.title

    @property
    def unit(self) -> str:
        return "line" if self.is_plain and self._path.suffix != ".json" else "row"

    @property
    def is_plain(self) -> bool:
        """Whether the file is read without the `datasets` library."""
        return self._path.suffix in PLAIN and self._path.is_file() and self.config.split == "train"

    @property
    def _path(self) -> Path:
        return Path(os.path.expanduser(self.config.path))

    def check(self) -> None:
        """Checks what can be known without reading. Raises ConfigError."""
        if self._path.exists():
            if self._path.is_file() and builder(self._path) is None:
                known = ", ".join(sorted(BUILDERS))
                raise ConfigError.at(self.key, f"{self._path} is of no kind that can be read; known are {known}")
            return
        text = self.config.path
        if text.startswith(("/", ".", "~")) or text.count("/") > 1 or Path(text).suffix in {*BUILDERS, *COMPRESSED}:
            raise ConfigError.at(
                self.key, f"there is no file {text}; give a file or folder of conversations, or a dataset of the hub"
            )

    def rows(self, *, keep: bool = False) -> Iterator[Found]:
        """`keep`: this process will read them once more. Raises DataError when the dataset cannot be read at all, or
        has no rows."""
        found = self._plain_rows(keep=keep) if self.is_plain else _table_rows(self._table(), self.key)
        is_empty, told = True, set[str]()
        try:
            for row in found:
                is_empty = False
                if isinstance(row.content, Conversation) and not told.issuperset(row.content.ignored):
                    told.update(row.content.ignored)
                    log.warning(
                        "%s: %s %d of %s has %s as well as %s; the latter is used, here and in similar rows",
                        self.key,
                        self.unit,
                        row.index,
                        self.config.path,
                        " and ".join(f"`{name}`" for name in row.content.ignored),
                        " and ".join(
                            f"`{name}`" for name in dict.fromkeys(BEHIND[name] for name in row.content.ignored)
                        ),
                    )
                yield row
        except (OSError, UnicodeDecodeError) as error:
            raise DataError.at(self.key, f"{self.config.path} cannot be read: {error}") from error
        if is_empty:
            raise DataError.at(self.key, f"{self.config.path} has no rows")

    def _plain_rows(self, *, keep: bool) -> Iterator[Found]:
        kept = kept_rows.taken(self._path)
        if kept is not None:
            return cast("Iterator[Found]", kept)
        rows = _plain_rows(self._path)
        return kept_rows.keeping(self._path, rows) if keep else rows

    def _table(self) -> Any:
        """A `datasets.Dataset`."""
        try:
            import datasets
        except ImportError as error:
            raise DataError.at(
                self.key,
                f"{self.config.path} is read by the package `datasets`, which is not installed; "
                f"give a .jsonl file, or install {described('data')}",
            ) from error
        try:
            table = load(datasets, self.config.path, self.config.name, self.config.split, self.key)
        except Exception as error:  # any library below it may fail: files, formats, network
            raise DataError.at(self.key, f"{self.config.path} cannot be loaded: {reason(error)}") from error
        if not isinstance(table, datasets.Dataset):
            raise DataError.at(self.key, f"split {self.config.split!r} of {self.config.path} is not one table of rows")
        return table.select_columns([name for name in table.column_names if name in COLUMNS] or table.column_names)


def _found(index: int, row: object, share: float) -> Found:
    try:
        return Found(index, conversation(row), share)
    except RowError as error:
        return Found(index, error, share)


def _plain_rows(path: Path) -> Iterator[Found]:
    if path.suffix == ".json" and _begins_a_list(path):
        rows = _parse(path.read_text(encoding="utf-8-sig"))
        if isinstance(rows, RowError):
            raise DataError(f"{path}: {rows}")
        yield from (_found(index, row, (index + 1) / len(rows)) for index, row in enumerate(rows))
        return
    size, read = path.stat().st_size or 1, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            read += len(line)
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            row = _parse(text)
            share = min(read / size, 1.0)
            yield Found(number, row, share) if isinstance(row, RowError) else _found(number, row, share)


def _begins_a_list(path: Path) -> bool:
    """Whether the file starts with a list; otherwise it is read line by line."""
    with path.open("rb") as file:
        beginning = file.readline().removeprefix(codecs.BOM_UTF8).strip()
        while not beginning and (line := file.readline()):
            beginning = line.strip()
    return beginning.startswith(b"[")


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        return RowError(SCHEMA, f"not UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return RowError(SCHEMA, f"not JSON: {error}")


def _table_rows(table: Any, key: str) -> Iterator[Found]:
    total = len(table)
    index, is_told = 0, False
    for batch in table.iter(batch_size=512):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            row, unsure = without_padding(dict(zip(names, values, strict=True)))
            if unsure and not is_told:
                is_told = True
                log.warning(
                    "%s: in row %d the argument %s is null, which counts as not given, since a table cannot tell the "
                    "two apart; as for others like it. Where it matters, give JSON lines or arguments as JSON text",
                    key,
                    index,
                    unsure[0],
                )
            yield _found(index, row, (index + 1) / total)
            index += 1


def sources(rows: RowsConfig, prefix: str) -> list[Source]:
    """`prefix` is `data.` or `val.data.`."""
    if rows.path is not None:
        return [Source(rows.datasets[0], f"{prefix}path")]
    return [Source(subset, f"{prefix}subsets[{index}].path") for index, subset in enumerate(rows.subsets)]
