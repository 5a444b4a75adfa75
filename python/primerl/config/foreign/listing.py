"""What became of a file of another tool, in words."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from primerl.config.command_line.arguments import Location, dotted
from primerl.config.foreign.rows import look
from primerl.config.foreign.table import Kind
from primerl.config.foreign.translate import Left, Translation
from primerl.envs.interface import module_name

SHIPPED = ("v1", "tasksets")
"""Where verifiers has its own."""
TITLES = {
    "refused": "No counterpart, and without them something else is learnt, or it runs elsewhere",
    "notes": "No counterpart; nothing that is learnt depends on them",
}


def within_file(place: Location, kind: Kind) -> Location:
    """The place as the file has it: one of a part of a run has no name of that part."""
    return place[1:] if kind.within and place and place[0] == kind.within else place


def summary(made: Translation, files: Sequence[str]) -> str:
    """One line for a command's output."""
    named = " and ".join(files)
    text = f"{named}: a file of {made.kind.name}; {len(made.taken)} keys are translated"
    groups = [
        f"{subject} ({', '.join(keys)})"
        for subject, reasons in _grouped(made.notes, made.kind).items()
        for keys in [[key for found in reasons.values() for key in found]]
    ]
    if groups:
        text += f", and these have no counterpart, on which nothing that is learnt depends: {'; '.join(groups)}"
    return f"{text}. `primerl convert {' '.join(files)}` shows each, and why"


def comments(made: Translation, files: Iterable[str]) -> Iterator[str]:
    """Lines above a file that was made."""
    yield f"Made by `primerl convert` from {' and '.join(files)}, a file of {made.kind.name}."
    missing = not_installed(made)
    if missing:
        yield from ("", how_to_install(missing))
    for name, left in (("refused", made.refused), ("notes", made.notes)):
        if left:
            yield from ("", f"{TITLES[name]}:")
            for subject, reasons in _grouped(left, made.kind).items():
                yield f"  {subject}"
                yield from (f"    {', '.join(keys)}: {why}" for why, keys in reasons.items())
    if made.defaults:
        yield from ("", f"Not in the file, and as {made.kind.tool} has it by default:")
        yield from (
            f"  {one.ours} = {json.dumps(one.value)}" + (f": {one.why}" if one.why else "") for one in made.defaults
        )
    yield from ("", "Translated:")
    for one in made.taken:
        theirs = dotted(within_file(one.theirs, made.kind))
        if theirs != one.ours:
            yield f"  {theirs} -> {one.ours}" + (f" ({one.why})" if one.why else "")
    same = [one.ours for one in made.taken if dotted(within_file(one.theirs, made.kind)) == one.ours]
    if same:
        yield f"  by the same name: {', '.join(dict.fromkeys(same))}"


def _grouped(left: list[Left], kind: Kind) -> dict[str, dict[str, list[str]]]:
    """Keys by subject and reason; entries of a list are one."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in left:
        key = dotted(tuple(part for part in within_file(one.theirs, kind) if isinstance(part, str)))
        keys = found.setdefault(one.subject, {}).setdefault(one.why, [])
        if key not in keys:
            keys.append(key)
    return found


def environments(tree: dict[str, Any]) -> list[str]:
    """Ids of the environments that a config of ours names."""
    places = (("orchestrator", "train", "env"), ("orchestrator", "eval", "env"), ("env",))
    lists = [look(tree, place, []) for place in places]
    entries = [entry for found in lists if isinstance(found, list) for entry in found]
    ids = [entry.get("id") or entry.get("env_id") for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(str(one) for one in ids if one))


def not_installed(made: Translation) -> list[str]:
    """Those of which this interpreter has no module, and verifiers no taskset. Imports none of them."""
    return missing_of(made.tree)


def missing_of(tree: dict[str, Any]) -> list[str]:
    """The same of a config of ours."""
    return [one for one in environments(tree) if not _has(module_name(one))]


def _has(module: str) -> bool:
    if not module.isidentifier():
        return False
    if importlib.util.find_spec(module) is not None:
        return True
    verifiers = importlib.util.find_spec("verifiers")
    folders = [Path(place, *SHIPPED, module) for place in (verifiers and verifiers.submodule_search_locations) or []]
    return any(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders)


def how_to_install(names: list[str]) -> str:
    several = len(names) > 1
    return (
        f"environment{'s' if several else ''} {', '.join(map(repr, names))} {'are' if several else 'is'} not installed "
        f"for this Python; install {'their packages' if several else 'its package'}: `uv pip install ./FOLDER` where "
        "you have the source (those of verifiers and prime-rl are folders of their repositories), or `prime env "
        "install OWNER/NAME` from the hub"
    )
