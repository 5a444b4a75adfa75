"""A file of ours from files of other tools, with comments."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from primerl.config.command_line.arguments import dotted
from primerl.config.command_line.load import merged
from primerl.config.command_line.sources import Written, read
from primerl.config.describe import forms
from primerl.config.errors.fail import ConfigError
from primerl.config.errors.validation_errors import describe
from primerl.config.foreign import listing
from primerl.config.foreign.loading import shares
from primerl.config.foreign.table import INFERENCE, RL, Kind, kind_of, leaves, table
from primerl.config.foreign.translate import Translation, translate
from primerl.config.process_files.files import dump_toml

WHICH = "prime-rl's (rl, sft, evals, orchestrator, trainer, inference), verifiers' (eval, gepa) and Hosted Training's"
COMMANDS = {"rl": "primerl rl @", "sft": "primerl sft @", "eval": "primerl eval @", "gepa": "primerl gepa run"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was made."""

    text: str
    """TOML with comments."""
    summary: str
    problems: list[str]
    """What has no counterpart though it matters, and what is to be set; one a line."""
    tree: dict[str, Any]
    form: str
    missing: list[str]
    """Environments that are not installed."""


def of_files(files: list[str]) -> Conversion:
    """Raises ConfigError: a file cannot be read, is of no tool that is known, or of primerl already; or files, or keys
    of one, are of several tools."""
    trees = [read(file) for file in files]
    kinds = [_kind(file, tree, alone=len(files) == 1) for file, tree in zip(files, trees, strict=True)]
    if any(kind is None for kind in kinds):
        return _of_short_form(files)
    tree, kind = _joined(files, trees, [kind for kind in kinds if kind is not None])
    _check_unmixed(files, tree, kind)
    made = translate(tree, kind)
    return _told(made, files)


def _kind(file: str, tree: dict[str, Any], *, alone: bool) -> Kind | None:
    """None: the short form of Hosted Training, which ours reads too."""
    kind = kind_of(tree)
    if isinstance(tree.get("endpoint"), list):
        raise ConfigError(f"{file} is a list of endpoints, which `primerl eval run -e {file}` reads as it is")
    if isinstance(tree.get("model"), str) and isinstance(tree.get("env"), list) and kind is None:
        return None
    # What another file of a run is merged with.
    if kind is None and not alone and all(table(RL).knows(path) for path, _ in leaves(tree)):
        return RL
    if kind is None:
        raise ConfigError(f"{file} has none of the tables by which files are known; those read here are {WHICH}")
    return kind


def _joined(files: list[str], trees: list[dict[str, Any]], kinds: list[Kind]) -> tuple[dict[str, Any], Kind]:
    """Several files as one: parts of a run as its sections."""
    if len({kind.form for kind in kinds}) > 1 or (len(set(kinds)) > 1 and any(kind.form != "rl" for kind in kinds)):
        named = " and ".join(f"{file} is a file of {kind.name}" for file, kind in zip(files, kinds, strict=True))
        raise ConfigError(f"{named}; convert them one by one")
    if len(files) == 1:
        return trees[0], kinds[0]
    found: dict[str, Any] = {}
    for tree, kind in zip(trees, kinds, strict=True):
        found = merged(found, {kind.within: tree} if kind.within else tree)
    return found, RL if kinds[0].form == "rl" else kinds[0]


def _check_unmixed(files: list[str], tree: dict[str, Any], kind: Kind) -> None:
    found = shares(tree, kind, forms.FORMS[kind.form].cls)
    written = Written([word for file in files for word in ("@", file)])
    # A file with nothing but names that both have is theirs if it names its model as they do.
    named = tree.get("model")
    is_theirs = found.theirs or (isinstance(named, dict) and "name" in named and "path" not in named)
    if not is_theirs and kind.tool == "prime-rl" and kind is not INFERENCE:
        raise ConfigError(
            f"{' and '.join(files)}: every key is primerl's already; `{COMMANDS[kind.form]} FILE` reads it"
        )
    if found.ours and found.theirs:
        ours, theirs = found.ours[0], found.theirs[0]
        raise ConfigError(
            f"{' and '.join(files)}: {dotted(ours)}{written.at(ours)} is a key of primerl, and "
            f"{dotted(theirs)}{written.at(theirs)} one of {kind.name}; write all of it in the words of one"
        )


def _told(made: Translation, files: list[str]) -> Conversion:
    problems = [
        f"no counterpart: {dotted(listing.within_file(left.theirs, made.kind))}: {left.why}" for left in made.refused
    ] + _not_right(made, files)
    missing = listing.not_installed(made)
    if missing:
        problems_of_install = listing.how_to_install(missing)
        summary_end = f"; {problems_of_install}"
    else:
        summary_end = ""
    lines = "\n".join(f"# {line}".rstrip() for line in listing.comments(made, files))
    summary = (
        f"{len(made.taken)} keys translated, {len(made.notes)} have no counterpart and do not matter, "
        f"{len(made.refused)} have none and do; start it by `{COMMANDS[made.kind.form]} FILE`{summary_end}"
    )
    text = f"{lines}\n\n{dump_toml(made.tree)}"
    return Conversion(text, summary, problems, made.tree, made.kind.form, missing)


def _not_right(made: Translation, files: Iterable[str]) -> list[str]:
    """What the form's own checks say of it."""
    cls: type[BaseModel] = forms.FORMS[made.kind.form].cls
    within = made.kind.within
    if within in ("trainer", "inference") and "train" not in made.tree.get("orchestrator", {}):
        return [f"to be set: the rest of the run, of which this is the {within}: convert its files together"]
    try:
        cls.model_validate(deepcopy(made.tree))  # which fills in defaults
    except ValidationError as error:
        arguments = [word for file in files for word in ("@", file)]
        return [f"to be set: {line}" for line in describe(error, cls, arguments, made.written_at).splitlines()]
    return []


def _of_short_form(files: list[str]) -> Conversion:
    """Files of Hosted Training's short form."""
    from primerl.config.hosted.load_run import load_run
    from primerl.config.process_files.files import to_toml

    arguments = [word for file in files for word in ("@", file)]
    config = load_run(arguments, program="primerl convert")
    named = " and ".join(files)
    tree = config.model_dump(mode="json", exclude_none=True)
    missing = listing.missing_of(tree)
    ending = f"; {listing.how_to_install(missing)}" if missing else ""
    summary = f"the short form of Hosted Training, as the full one; start either by `primerl rl @ FILE`{ending}"
    text = f"# Made by `primerl convert` from {named}, a file of Hosted Training's short form.\n\n{to_toml(config)}"
    return Conversion(text, summary, [], tree, "rl", missing)
