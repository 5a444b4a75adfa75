"""Whose work a folder holds, by the files that each command writes there.

A command starts in a folder of its own kind, or in one where nothing has begun: it could not resume what another one
left, and may not delete it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from primerl.launch.resume.going_back import holds_run
from primerl.launch.supervise.lock import LOCK

TITLES = {
    "rl": "a run of `primerl rl`",
    "sft": "a supervised fine-tuning (`primerl sft`)",
    "eval": "an evaluation (`primerl eval`)",
    "gepa": "a search for a prompt (`primerl gepa`)",
    "serve": "what a server has left (`primerl serve --tinker`)",
    "inference": "what engines have left (`primerl inference`)",
}
"""By the subcommand, which is the kind."""
OWN_CONFIG = ("rl", "sft", "eval")
"""Kinds whose whole config is `configs/<kind>.toml`."""
BEGUN_SEARCH = "gepa.json"
SEARCH_LOG = "gepa.log"
SEARCHED_BY = "the version of the package gepa"
"""A key of every such file."""
SERVER_LOG = Path("logs") / "server.log"
SAVED_STATES = "states/*/*weights/*/primerl.json"


def kinds_in(folder: Path) -> set[str]:
    """Kinds that have left something; several where a dry run of one was followed by a start of another."""
    configs = folder / "configs"
    found = {kind for kind in OWN_CONFIG if (configs / f"{kind}.toml").is_file()}
    # A script's run has no file of the whole, nor has one that ended while it started.
    if "eval" not in found and (holds_run(folder) or (configs / "orchestrator.toml").is_file()):
        found.add("rl")
    if holds_search(folder):
        found.add("gepa")
    return found or _serving_in(folder)


def holds_search(folder: Path) -> bool:
    """A folder without a lock has to say it within the file: configs of users have such names."""
    file = folder / BEGUN_SEARCH
    if not file.is_file():
        return False
    if (folder / LOCK).is_file():
        return True
    try:
        return f'"{SEARCHED_BY}": ' in file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def holds_states(folder: Path) -> bool:
    """Whether a server has saved states of training clients there."""
    return any(folder.glob(SAVED_STATES))


def _serving_in(folder: Path) -> set[str]:
    if holds_states(folder):
        return {"serve"}
    if not (folder / LOCK).is_file():  # folders of others have such files, too
        return set()
    if (folder / SERVER_LOG).is_file():
        return {"serve"}
    return {"inference"} if any((folder / "configs").glob("inference*.toml")) else set()


def holds(kind: str) -> Callable[[Path], bool]:
    """Whether a folder is one that this command has started in."""
    return lambda folder: kind in kinds_in(folder)


def others_in(folder: Path, kind: str) -> list[str]:
    """Kinds that keep this one from starting there."""
    found = kinds_in(folder)
    return [] if kind in found else sorted(found)


def refusal(folder: Path, others: Collection[str], kind: str) -> str:
    held = " and ".join(TITLES[other] for other in others)
    return f"{folder} holds {held}, which `primerl {kind}` neither resumes nor deletes; choose another --output-dir"


def forget_others(folder: Path, kind: str) -> None:
    """Where nothing has begun: a config that a dry run of another command has left says nothing of what begins now."""
    for other in OWN_CONFIG:
        if other != kind:
            (folder / "configs" / f"{other}.toml").unlink(missing_ok=True)
