"""`primerl run models`: what can be trained here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primerl.cli.run.common import add_json, parser_of, show, size
from primerl.inference import backends
from primerl.runs.models import Model, folders_in, look
from primerl.runs.registry import Registry
from primerl.runs.state import StateError


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "models",
        "Lists the model folders in outputs/, in the folders of runs, in the cache of Hugging Face and in FOLDERS, and "
        "says for each whether it can be trained here, or why not. Memory is estimated: weights, gradients and AdamW's "
        "moments in fp32, without activations and the engine's own copy.",
        of_run=False,
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help="also look here")
    add_json(parser)
    chosen = parser.parse_args(arguments)
    absent = [folder for folder in chosen.folders if not folder.is_dir()]
    if absent:
        from primerl.config.errors.fail import fail

        return fail(f"there is no folder {absent[0]}", title="No models")
    from primerl.runs.memory import machine

    here = machine()
    found = [look(folder, here) for folder in _folders(chosen)]
    for folder in chosen.folders:
        if not any(Path(model.path).resolve().is_relative_to(folder.resolve()) for model in found):
            print(f"there is no model in {folder}: no folder there has a config.json", file=sys.stderr)
    if chosen.json:
        print(json.dumps([asdict(model) for model in found], indent=2))
    elif found:
        header = ["folder", "kind", "weights", "memory", "can be trained", "why"]
        show(header, [_row(model) for model in found], right=(2, 3))
    else:
        print("no model folders in outputs/, of runs, or in the cache of Hugging Face; name a folder to look into")
    return 0


def _row(model: Model) -> list[Any]:
    needed = size(model.memory) if model.memory else None
    return [model.path, model.kind, size(model.bytes), needed, _verdict(model), model.reason]


def _verdict(model: Model) -> str:
    if not model.trainable:
        return "no"
    what = "yes" if model.fits == "all" else "an adapter"
    if model.engine == backends.DEFAULT:
        return what
    return f"{what}, with {backends.named(model.engine).title}".removeprefix("yes, ")


def _folders(chosen: argparse.Namespace) -> Iterator[Path]:
    seen: set[Path] = set()
    named = len(chosen.folders)
    for number, root in enumerate([*chosen.folders, Path("outputs"), *_of_runs(), _hub()]):
        for folder in folders_in(root, named=number < named):
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _of_runs() -> list[Path]:
    try:
        with Registry(reading=True) as registry:
            runs = registry.all()
    except StateError:
        return []
    # An evaluation's may be a name at an endpoint.
    return [run.output_dir / "weights" for run in runs] + [Path(run.model) for run in runs if os.path.isabs(run.model)]


def _hub() -> Path:
    """Where huggingface_hub keeps what it has fetched, found as it does, without importing it."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.path.expanduser(cache or os.path.join(home, "hub")))
