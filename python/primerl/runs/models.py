"""Model folders of this machine, and whether they can be trained here: as a run's checks before its start would say."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from primerl.process.problems import ProblemError
from primerl.runs.memory import Machine
from primerl.train.adapters.files import ADAPTER_CONFIG

DEPTH = 6
"""Levels of folders below a given one that are searched."""


@dataclass(frozen=True, slots=True)
class Model:
    path: str
    kind: str
    """`model_type` of its config; `adapter`."""
    bytes: int
    """Size of its weights."""
    trainable: bool
    engine: str
    """The engine backend that can sample from it."""
    reason: str
    """Why it cannot be trained, or only in part, or not be served by the smallest engine."""
    memory: int = 0
    """Bytes that training all of it takes: weights, gradients and AdamW's moments in fp32; on one GPU bf16 weights
    too."""
    memory_lora: int = 0
    """The same of an adapter."""
    fits: str = ""
    """What fits into this machine's memory: `all`, `adapter`, `nothing`."""


def look(folder: Path, machine: Machine) -> Model:
    from primerl.config.errors.fail import ConfigError
    from primerl.launch.preflight.model_folder import check_model, check_trainable, read_json, slower_on_gpu

    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        return Model(os.fspath(folder), "adapter", weights, False, "-", _adapter(folder))
    kind = "?"
    try:
        config = read_json(folder / "config.json")
        kind = str(config.get("model_type", "?"))
        check_trainable(folder)
        check_model(folder)
        parameters = _parameters(folder)
    except ConfigError as error:
        return Model(os.fspath(folder), kind, weights, False, "-", _short(error, folder))
    engine, why = _engine(folder)
    why = "; ".join(filter(None, [slower_on_gpu(folder, None), why]))
    needs, needs_lora = machine.all_of(parameters), machine.adapter_of(parameters)
    fits = "all" if needs <= machine.bytes else "adapter" if needs_lora <= machine.bytes else "nothing"
    if fits != "all":
        lora = "an adapter" if fits == "adapter" else "and an adapter"
        takes = f"all of it takes about {_size(needs)} of memory, {lora} {_size(needs_lora)}"
        why = "; ".join(filter(None, [f"{takes}, and {machine.what} has {_size(machine.bytes)}", why]))
    trainable = fits != "nothing"
    return Model(os.fspath(folder), kind, weights, trainable, engine, why, needs, needs_lora, fits)


def _parameters(folder: Path) -> int:
    from primerl.launch.preflight.model_folder import check_weights

    headers = (check_weights(file) for file in folder.glob("*.safetensors"))
    return sum(math.prod(tensor.get("shape", [])) for header in headers for tensor in header.values())


def _engine(folder: Path) -> tuple[str, str]:
    """The backend that can serve it and needs least, and why not those that need less, or what it is worse at."""
    from primerl.inference import backends

    reason = ""
    for name in backends.SMALLEST_FIRST:
        backend = backends.named(name)
        try:
            backend.check_model(folder, None)
            return name, backend.drawback or reason
        except ValueError as error:
            why = _short(error, folder)
            reason = f"{reason} ({why})" if reason else why
    return name, reason


def _adapter(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        return f"{ADAPTER_CONFIG} cannot be read: {error}"
    of = f" to {base}" if base else ""
    return f"it is an adapter{of}: trainer.model.lora.adapter_path begins with it, and model.path is its base model"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _short(error: Exception, folder: Path) -> str:
    """The message without what the other columns say."""
    text = ProblemError.like(error).problems[0].reason.removeprefix(f"{folder / 'config.json'}: ")
    return text.replace(f"{folder}{os.sep}", "").replace(f" in {folder}", "").replace(f"{folder} ", "it ")


def folders_in(root: Path, *, named: bool = False, depth: int = DEPTH) -> Iterator[Path]:
    """Folders with a config.json that names a model's type. `named`: the user has asked for that folder, so what is
    odd in it is reported too."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return
    files = {entry.name for entry in entries}
    if "config.json" in files and (named or _is_model(root / "config.json")):
        yield root
        return
    if named and ADAPTER_CONFIG in files:
        yield root
        return
    # In a run's folder: weights on their way to engines are deleted again while it runs, and what an evaluation of an
    # endpoint counts tokens with has no weights.
    skipped = {"broadcasts", "journal", "spool", "logs", "run"} if "journal" in files else set()
    for entry in entries:
        if depth and entry.is_dir() and not entry.name.startswith(".") and entry.name not in skipped:
            yield from folders_in(Path(entry.path), named=named and _is_odd(Path(entry.path)), depth=depth - 1)


def _is_odd(folder: Path) -> bool:
    """Below a folder that was asked for: what is a model's or an adapter's by the name of a file."""
    return (folder / ADAPTER_CONFIG).is_file() or any(folder.glob("*.safetensors"))


def _is_model(file: Path) -> bool:
    try:
        return "model_type" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False
