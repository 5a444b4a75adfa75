"""`primerl run models`: what can be trained here."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from primerl.cli.arguments import parse
from primerl.cli.run.common import add_json, parser_of, show, size
from primerl.runs.registry import Registry
from primerl.runs.state import StateError

DEPTH = 6
"""Folders below a given one that are looked into."""


@dataclass(frozen=True, slots=True)
class Model:
    path: str
    kind: str
    """`model_type` of its config."""
    bytes: int
    """Of its weights."""
    trainable: bool
    engine: str
    """What can sample from it: `torch` (the embedded engine) or `vllm`."""
    reason: str
    """Why it cannot be trained, or why not be served by the embedded engine."""


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "models",
        "Lists the model folders in outputs/, in the folders of runs, in the cache of Hugging Face and in FOLDERS, and "
        "says for each whether it can be trained here, or why not.",
        of_run=False,
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help="also look here")
    add_json(parser)
    chosen = parse(parser, arguments)
    if isinstance(chosen, int):
        return chosen
    absent = [folder for folder in chosen.folders if not folder.is_dir()]
    if absent:
        from primerl.config.complaint import fail

        return fail(f"there is no folder {absent[0]}", title="No models")
    found = [look(folder) for folder in _folders(chosen)]
    if chosen.json:
        print(json.dumps([asdict(model) for model in found], indent=2))
    elif found:
        rows = [[m.path, m.kind, size(m.bytes), _verdict(m), m.reason] for m in found]
        show(["folder", "kind", "weights", "can be trained", "why"], rows, right=(2,))
    else:
        print("no model folders in outputs/, of runs, or in the cache of Hugging Face; name a folder to look into")
    return 0


def _verdict(model: Model) -> str:
    if not model.trainable:
        return "no"
    return "yes" if model.engine == "torch" else "with vLLM"


def look(folder: Path) -> Model:
    """As a run's checks before its start would."""
    from primerl.config.load import ConfigError
    from primerl.inference.shape import Shape
    from primerl.inference.vllm import installation
    from primerl.launch.preflight_model import check_model, read_json

    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())
    kind, engine, reason, trainable = "?", "-", "", False
    try:
        kind = str(read_json(folder / "config.json").get("model_type", "?"))
        check_model(folder)
        trainable, engine = True, "torch"
    except ConfigError as error:
        reason = _short(str(error), folder)
    if trainable:
        try:
            Shape.read(folder)
        except (ValueError, TypeError) as error:
            engine, reason = "vllm", _short(str(error), folder)
            try:
                installation.find(None)
            except installation.UnusableError as missing:
                reason += f" ({missing})"
    return Model(os.fspath(folder), kind, weights, trainable, engine, reason)


def _short(message: str, folder: Path) -> str:
    """Without what the other columns say."""
    text = message.removeprefix("model.path: ").removeprefix(f"{folder / 'config.json'}: ")
    return text.replace(f"{folder}{os.sep}", "").replace(f" in {folder}", "").replace(f"{folder} ", "it ")


def _folders(chosen: argparse.Namespace) -> Iterator[Path]:
    seen: set[Path] = set()
    roots = [*chosen.folders, Path("outputs"), *_of_runs(), _hub()]
    for root in roots:
        for folder in _model_folders(root):
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _of_runs() -> list[Path]:
    try:
        with Registry(reading=True) as registry:
            return [run.output_dir / "weights" for run in registry.all()] + [
                # An evaluation's may be a name at an endpoint.
                Path(run.model)
                for run in registry.all()
                if os.path.isabs(run.model)
            ]
    except StateError:
        return []


def _hub() -> Path:
    """Where huggingface_hub keeps what it has fetched, found as it does, without importing it."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.path.expanduser(cache or os.path.join(home, "hub")))


def _model_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Folders with a config.json that names a model's type."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name == "config.json" for entry in entries) and _is_model(root / "config.json"):
        yield root
        return
    # Those of a run's weights on their way to engines are deleted again while it goes on.
    skipped = {"broadcasts", "journal", "spool", "logs"} if any(entry.name == "journal" for entry in entries) else set()
    for entry in entries:
        if depth and entry.is_dir() and not entry.name.startswith(".") and entry.name not in skipped:
            yield from _model_folders(Path(entry.path), depth - 1)


def _is_model(file: Path) -> bool:
    try:
        return "model_type" in json.loads(file.read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False
