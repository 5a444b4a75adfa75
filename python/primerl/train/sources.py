"""Where rows come from: files and folders of this machine, or datasets of the Hugging Face hub.

JSON lines and JSON files are read here. Everything else (parquet, arrow, compressed files, folders, splits of a file,
hub names) goes through the `datasets` library, imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.train.config import ConfigError
from primerl.train.conversations import COLUMNS, SCHEMA, Conversation, RowError, conversation, without_none
from primerl.train.sft_config import RowsConfig, SubsetConfig

PLAIN = {".jsonl", ".ndjson", ".json"}
BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", **dict.fromkeys(PLAIN, "json")}
COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}


class DataError(ValueError):
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
    """One dataset, not read yet."""

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
        return Path(self.config.path).expanduser()

    def check(self) -> None:
        """What can be known without reading. Raises ConfigError."""
        if self._path.exists():
            if self._path.is_file() and self._builder() is None:
                known = ", ".join(sorted(BUILDERS))
                raise ConfigError(f"{self.key}: {self._path} is of no kind that can be read; known are {known}")
            return
        text = self.config.path
        if text.startswith(("/", ".", "~")) or text.count("/") > 1 or Path(text).suffix in {*BUILDERS, *COMPRESSED}:
            raise ConfigError(
                f"{self.key}: there is no file {text}; give a file or folder of conversations, or a dataset of the hub"
            )

    def rows(self) -> Iterator[Found]:
        """Raises DataError when the dataset cannot be read at all, or has no rows."""
        found = _plain_rows(self._path) if self.is_plain else _table_rows(self._table())
        is_empty = True
        try:
            for row in found:
                is_empty = False
                yield row
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.key}: {self.config.path} cannot be read: {error}") from error
        if is_empty:
            raise DataError(f"{self.key}: {self.config.path} has no rows")

    def _builder(self) -> str | None:
        suffixes = self._path.suffixes
        if suffixes and suffixes[-1] in COMPRESSED:
            suffixes = suffixes[:-1]
        return BUILDERS.get(suffixes[-1]) if suffixes else None

    def _table(self) -> Any:
        """A `datasets.Dataset`."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"{self.key}: {self.config.path} is read by the package `datasets`, which is not installed; "
                "`pip install 'primerl[data]'`, or give a .jsonl file"
            ) from error
        try:
            table = self._load(datasets)
        except Exception as error:  # of any library below it: files, formats, network
            raise DataError(f"{self.key}: {self.config.path} cannot be loaded: {error}") from error
        if not isinstance(table, datasets.Dataset):
            raise DataError(f"{self.key}: split {self.config.split!r} of {self.config.path} is not one table of rows")
        return table.select_columns([name for name in table.column_names if name in COLUMNS] or table.column_names)

    def _load(self, datasets: Any) -> Any:
        path, name, split = str(self._path), self.config.name, self.config.split
        if self._path.is_file():
            return datasets.load_dataset(self._builder(), data_files={"train": path}, split=split)
        if not self._path.is_dir():
            return datasets.load_dataset(self.config.path, name, split=split)
        if (self._path / "dataset_dict.json").is_file() or (self._path / "state.json").is_file():
            saved = datasets.load_from_disk(path)
            # One table without splits is all of `train`.
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(path, name, split=split)


def _found(index: int, row: object, share: float) -> Found:
    try:
        return Found(index, conversation(row), share)
    except RowError as error:
        return Found(index, error, share)


def _plain_rows(path: Path) -> Iterator[Found]:
    if path.suffix == ".json":
        with path.open(encoding="utf-8") as file:
            if file.read(1) == "[":
                file.seek(0)
                rows = _parse(file.read())
                if isinstance(rows, RowError):
                    raise DataError(f"{path}: {rows}")
                yield from (_found(index, row, (index + 1) / len(rows)) for index, row in enumerate(rows))
                return
    size, read = path.stat().st_size or 1, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            read += len(line)
            if not line.strip():
                continue
            row = _parse(line.decode("utf-8"))
            share = min(read / size, 1.0)
            yield Found(number, row, share) if isinstance(row, RowError) else _found(number, row, share)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError(SCHEMA, f"not JSON: {error}")


def _table_rows(table: Any) -> Iterator[Found]:
    total = len(table)
    index = 0
    for batch in table.iter(batch_size=512):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            row = {name: _cell(name, value) for name, value in zip(names, values, strict=True)}
            yield _found(index, row, (index + 1) / total)
            index += 1


def _cell(name: str, value: Any) -> Any:
    if name in ("messages", "prompt", "completion") and isinstance(value, list):
        # Templates tell an empty content from none at all.
        return [without_none(message, keep=("content",)) for message in value]
    return without_none(value)


def sources(rows: RowsConfig, prefix: str) -> list[Source]:
    """`prefix` is `data.` or `val.data.`."""
    if rows.path is not None:
        return [Source(rows.datasets[0], f"{prefix}path")]
    return [Source(subset, f"{prefix}subsets[{index}].path") for index, subset in enumerate(rows.subsets)]
