"""Rows that the `datasets` library reads: files of tables, folders, splits and slices, datasets of the hub.

A table gives every object the keys of all the others, so most nulls are padding. An argument of a tool call may have
been written as null, though: that is known if the declaration of its tool requires the argument.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from primerl.train.data.conversations import declared_parameters, without_none

log = logging.getLogger(__name__)

MESSAGES = ("messages", "prompt", "completion")


def without_padding(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The row without nulls that may be padding, and the arguments of calls (`add(b)`) among these that their tools
    declare: whether they were written is not known."""
    cleaned = {name: _cell(name, value) for name, value in row.items()}
    columns = [name for name in MESSAGES if isinstance(row.get(name), list)]
    pairs = [pair for name in columns for pair in zip(_calls(row[name]), _calls(cleaned[name]), strict=True)]
    if not any(None in given["arguments"].values() for given, _ in pairs):
        return cleaned, []
    declared = declared_parameters(cleaned)
    unsure = []
    for given, kept in pairs:
        parameters = declared.get(str(given.get("name")), {})
        required, properties = _declared_names(parameters, "required"), _declared_names(parameters, "properties")
        arguments = given["arguments"]
        unsure += [
            f"{given.get('name')}({name})"
            for name, value in arguments.items()
            if value is None and name in properties and name not in required
        ]
        # In the original order: templates write it out as it is.
        kept["arguments"] = {
            name: kept["arguments"].get(name)
            for name, value in arguments.items()
            if value is not None or name in required
        }
    return cleaned, unsure


def _cell(name: str, value: Any) -> Any:
    if name in MESSAGES and isinstance(value, list):
        # Templates distinguish an empty content from a missing one.
        return [without_none(message, keep=("content",)) for message in value]
    return without_none(value)


def _declared_names(parameters: Mapping[str, Any], key: str) -> set[str]:
    value = parameters.get(key)
    return {str(name) for name in value} if isinstance(value, list | Mapping) else set()


def _calls(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Called functions whose arguments are an object."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), Mapping):
                yield function


PLAIN = {".jsonl", ".ndjson", ".json"}
BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", **dict.fromkeys(PLAIN, "json")}
COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
ABOUT = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that describe a dataset."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Split -> names of its files and folders, as the library knows them."""
SHARD = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*")
NAMED = 5
"""Files named in a line of the log."""


def builder(path: Path) -> str | None:
    """Which of the library's builders reads this file, if any."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes = suffixes[:-1]
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def load(datasets: Any, text: str, name: str | None, split: str, key: str) -> Any:
    """The rows of `text`, a path or a name of the hub. `datasets` is the library; `key` is the setting, for the log.

    Raises whatever the library does, and ValueError for a folder that cannot be read as one dataset.
    """
    path = Path(os.path.expanduser(text))
    if path.is_file():
        return datasets.load_dataset(builder(path), data_files={"train": str(path)}, split=split)
    if not path.is_dir():
        return datasets.load_dataset(text, name, split=split)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(datasets, path, split)
    if name is not None or _declares_its_files(path):
        return datasets.load_dataset(str(path), name, split=split)
    return _folder(datasets, path, split, key)


def reason(error: BaseException) -> str:
    """The library's error and its cause, since its own message is often only that something went wrong."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(said) < 4:
        words = f"{cause}".strip() or type(cause).__name__
        if not any(words in other for other in said):
            said.append(words)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ": ".join(said)


def _saved(datasets: Any, path: Path, split: str) -> Any:
    """A folder of `save_to_disk`: tables by the names of their splits, or one that is all of `train`."""
    saved = datasets.load_from_disk(str(path))
    tables = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    lengths = {name: len(table) for name, table in tables.items()}
    # The library's slices, which its `load_from_disk` does not support.
    spans = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    parts = [tables[span.splitname].select(range(span.from_, span.to)) for span in spans]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _declares_its_files(path: Path) -> bool:
    card = path / "README.md"
    return (
        card.is_file()
        and re.search(r"^configs:", card.read_text(errors="replace", encoding="utf-8"), re.MULTILINE) is not None
    )


def _folder(datasets: Any, path: Path, split: str, key: str) -> Any:
    """All data files below the folder: those with a split's name are of it, the others of `train`. The library itself
    takes only the most frequent kind, and only those with a split's name where one has it."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    data = [file for file in files if builder(file) is not None and file.name not in ABOUT]
    kinds = {builder(file): file.relative_to(path) for file in data}
    if not data:
        raise ValueError(f"there is no data file in it; known are {', '.join(sorted(BUILDERS))}")
    if len(kinds) > 1:
        named = ", ".join(str(file) for file in kinds.values())
        raise ValueError(
            f"it holds files of several kinds ({named}); give a folder or file of one kind each, as subsets"
        )
    splits: dict[str, list[Path]] = {}
    for file in data:
        splits.setdefault(_split_of(file.relative_to(path)), []).append(file)
    for name, members in sorted(splits.items()):
        log.info("%s: split %r of %s is %s", key, name, path, _names(path, members))
    known = {*data, path / "README.md"}
    left_out = [file for file in files if file not in known and file.name not in ABOUT]
    if left_out:
        log.warning("%s: files of an unknown kind are skipped: %s in %s", key, _names(path, left_out), path)
    data_files = {name: [str(file) for file in members] for name, members in splits.items()}
    kind = next(iter(kinds))
    try:
        return datasets.load_dataset(kind, data_files=data_files, split=split)
    except Exception as error:  # any library below it may fail
        if isinstance(error.__cause__ or error, OSError):
            raise  # as of a full disk, which is no fault of a file
        why = reason(error)
        problems = ((file, _problem(datasets, kind, file)) for file in data)
        broken = next((file for file, problem in problems if problem and problem in why), None)
        if broken is None:
            raise
        raise ValueError(f"{broken.relative_to(path)}: {why}") from error


def _problem(datasets: Any, kind: str | None, file: Path) -> str | None:
    """Why the file cannot be read by itself, in the library's words: the error of a folder does not name its file. An
    empty one cannot be read either, and does no harm among others."""
    try:
        datasets.load_dataset(kind, data_files=str(file))
    except Exception as error:  # noqa: BLE001 - as above
        return str(error)
    return None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _split_of(path: Path) -> str:
    """The split, by a word of the file's name, else of the nearest folder's."""
    if shard := SHARD.fullmatch(path.as_posix()):
        return shard["split"]
    for part in reversed(path.parts):
        for word in re.split(r"[-._ 0-9]+", part):
            if word in SPLITS:
                return SPLITS[word]
    return "train"


def _names(folder: Path, files: list[Path]) -> str:
    named = ", ".join(str(file.relative_to(folder)) for file in files[:NAMED])
    return named if len(files) <= NAMED else f"{named} and {len(files) - NAMED:,} more files"
