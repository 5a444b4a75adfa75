"""`primerl models check`: what can be done with a model, from its `config.json` alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primerl.cli.arguments import CommandParser
from primerl.cli.run.common import add_json, show, size

NOTHING = "nothing: the chat template writes the same with it and without"


def models(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl models",
        description="Judges a model by its config.json, before weights are downloaded.",
        allow_abbrev=False,
    )
    check = parser.add_subparsers(metavar="check", required=True).add_parser(
        "check",
        help="can a model be trained, adapted and served here, in how much memory, and why not",
        allow_abbrev=False,
    )
    check.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the hub")
    check.add_argument("--gpus", type=_positive, default=1, help="GPUs that divide the model among them (default 1)")
    check.add_argument("--seq-len", type=_positive, default=4096, help="tokens of a packed row (default 4096)")
    add_json(check, "print one JSON object")
    return _check(parser.parse_args(arguments))


def _check(chosen: argparse.Namespace) -> int:
    from primerl.config.errors.fail import ConfigError, fail
    from primerl.launch.preflight.hub import folder_of, is_hub_name
    from primerl.launch.preflight.model_folder import read_json

    try:
        name = chosen.model
        folder = folder_of(name, weights=False) if is_hub_name(name) else Path(name)
        config = read_json(folder / "config.json")
    except ConfigError as error:
        return fail(error.problems[0].reason, title="No model")
    found = _answers(config, chosen.gpus, chosen.seq_len) | {"thinking": _thinking(folder)}
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        show(["about", "answer"], _rows(found, chosen.gpus, chosen.seq_len))
    return 0 if found["training"] is None else 1


def _answers(config: dict[str, Any], gpus: int, seq_len: int) -> dict[str, Any]:
    from primerl.train.model import footprint, memory, support

    found: dict[str, Any] = asdict(support.support(config))
    found["training"] = found["training"] or support.layout_refusal(config, gpus)
    found["parameters"] = footprint.parameters(config)
    for name, adapter in (("memory", False), ("memory_adapter", True)):
        needed = memory.training(config, gpus, seq_len, "full", adapter=adapter)
        found[name] = None if needed is None else {**asdict(needed), "total": needed.total}
    return found


def _thinking(folder: Path) -> dict[str, str | None] | None:
    """None for a folder without a template, such as one of a base model."""
    from primerl.config.errors.fail import ConfigError
    from primerl.launch.preflight import thinking

    try:
        return thinking.effects(folder)
    except ConfigError:
        return None


def _rows(found: dict[str, Any], gpus: int, seq_len: int) -> list[list[Any]]:
    count, experts = found["parameters"], found["experts"]
    rows = [
        ["type", found["model_type"] + (f", {experts} experts a layer" if experts else "")],
        [
            "parameters",
            "unknown: its config lacks the usual keys" if count is None else f"about {count / 1e9:.2f} billion",
        ],
        ["training", f"no: {found['training']}" if found["training"] else _trains(found)],
        ["on a GPU", found["slower_on_gpu"] or "nothing else is needed"],
        ["adapters", _adapters(found)],
        ["adapters on vLLM", f"as merged weights: {found['vllm_merges']}" if found["vllm_merges"] else "as adapters"],
        ["several ranks", f"no: {found['several_ranks']}" if found["several_ranks"] else "yes"],
        ["embedded engine", _embedded(found)],
    ]
    for name, effect in (found["thinking"] or {}).items():
        rows.append([name, effect or NOTHING])
    if found["memory"] is not None:
        on = f"on each of {gpus} GPUs" if gpus > 1 else "on one GPU"
        for name, what in (("memory", "all weights"), ("memory_adapter", "an adapter")):
            rows.append([f"memory, {what}", f"about {size(found[name]['total'])} {on}, rows of {seq_len} tokens"])
    return rows


def _embedded(found: dict[str, Any]) -> str:
    from primerl.inference import backends

    if not found["embedded_engine"]:
        return "yes"
    if not found["transformers_engine"]:
        return f"yes, over transformers: {backends.named('transformers').drawback}"
    return f"no: {found['transformers_engine']}"


def _trains(found: dict[str, Any]) -> str:
    quantised = found["dequantised"]
    return "yes, packed; proved when it is loaded" + (
        f"; its weights in {quantised} are read as bfloat16" if quantised else ""
    )


def _adapters(found: dict[str, Any]) -> str:
    names = found["projections"]
    if names is None:
        return "of linear layers; their names are known once its weights are there"
    if not names:
        return "none: it has no linear layers"
    reached = ", ".join(names)
    if found["adapts_experts"]:
        return f"{reached}, experts"
    return reached + ("; experts stay as they are" if found["experts"] else "")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
