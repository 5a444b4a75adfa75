"""Files of processes: what a process is started with, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from primerl.config.schema.launched import Launched

Kind = Literal["orchestrator", "inference", "env-worker", "trainer", "monitor", "store-worker"]


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """One process of the run: its subcommand, its name, where its config and its log go."""

    kind: Kind
    name: str
    config: BaseModel
    file: Path
    log: Path
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables for this process only: keys and secrets, which are in no file."""
    python: str | None = None
    """Interpreter that runs it, where it is not this one."""


def process(
    config: Launched,
    kind: Kind,
    name: str,
    resolved: BaseModel,
    *,
    threads: int,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> ProcessConfig:
    folder = Path(absolute(config.output_dir))
    return ProcessConfig(
        kind=kind,
        name=name,
        config=resolved,
        file=folder / "configs" / f"{name}.toml",
        log=folder / "logs" / (log or f"{name}.log"),
        threads=threads,
        variables=variables or {},
    )


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def shared(config: BaseModel, target: type[BaseModel]) -> dict[str, Any]:
    """Values of the fields both have."""
    return {name: getattr(config, name) for name in type(config).model_fields if name in target.model_fields}


def keys_of(config: BaseModel) -> dict[str, Any]:
    """What a resolved file holds: every key but those that are None, for which TOML has no word."""
    found: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    return found


def resolved(cls: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks `given` by its class and fills in the defaults. Raises pydantic's ValidationError."""
    return keys_of(cls.model_validate(given))


def to_toml(config: BaseModel) -> str:
    return dump_toml(keys_of(config))


def dump_toml(settings: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(settings)


def write(process: ProcessConfig) -> None:
    write_text(process.file, to_toml(process.config))


def write_text(path: Path, text: str) -> None:
    """Under a temporary name, synced, then renamed: a reader sees the whole file or none."""
    write_parts(path, [text])


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """As `write_text`, for a text that is produced in parts."""
    _write_whole(path, (part.encode() for part in parts))


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, for a content that need not be text."""
    _write_whole(path, [content])


def _write_whole(path: Path, parts: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
