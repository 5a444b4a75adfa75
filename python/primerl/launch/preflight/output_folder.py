"""Whether a run may use a folder, and the lock by which it has it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files
from primerl.launch.preflight import kinds
from primerl.launch.resume import going_back
from primerl.launch.resume.going_back import holds_run as holds_run
from primerl.launch.slurm.script import SCRIPT
from primerl.launch.supervise.lock import LOCK, in_use, take
from primerl.runs.state import WITHIN_RUN
from primerl.train.checkpoint import on_request
from primerl.train.checkpoint.step_folders import STATE_FILE

MARKS = {".DS_Store", ".gitignore", ".gitkeep"}
LOGS = (".out", ".err", ".log")
"""What a shell's redirection, `nohup` and Slurm's `--output` usually end with."""


def check_output_dir(output_dir: str, *, clean: bool, kind: str, goes_on: Callable[[Path], bool] | None = None) -> None:
    """Raises ConfigError where nothing may be started there, before anything is made or deleted.

    Args:
        kind: The subcommand: a folder that another one works in is neither continued nor cleaned.
        goes_on: Whether a run is there that will be continued, so that it is no obstacle.
    """
    folder = Path(files.absolute(output_dir))
    with _as_config_error(folder):
        _check_folder(folder, clean=clean, kind=kind, goes_on=goes_on)


def can_go_on(folder: Path) -> bool:
    """The same of one that has lost its journal, and goes back to a checkpoint."""
    return holds_run(folder) or bool(going_back.whole_steps(folder))


def begun_in(folder: Path) -> bool:
    """Whether what is there is of the run that is started in the folder."""
    return can_go_on(folder) or (folder / "logs").is_dir()


def checked_and_left(folder: Path) -> str:
    """What a dry run says of a folder that holds a run, in which it writes nothing."""
    return f"everything checked; a start resumes the run in {folder}, whose configs are left as they are"


@contextlib.contextmanager
def _as_config_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError.at("output_dir", f"{folder} cannot be used: {error}; choose another output_dir") from None


def _check_folder(folder: Path, *, clean: bool, kind: str, goes_on: Callable[[Path], bool] | None) -> None:
    if "\0" in str(folder):  # such a path does not exist, says Python, and cannot be made
        raise ConfigError.at("output_dir", f"{str(folder)!r} holds a null character; choose another output_dir")
    parent = next(path for path in [folder, *folder.parents] if path.exists() or path.is_symlink())
    if not parent.is_dir():
        raise ConfigError.at("output_dir", f"{parent} is not a folder; choose another output_dir")
    if not os.access(parent, os.W_OK):
        raise ConfigError.at("output_dir", f"{parent} cannot be written to; choose another output_dir")
    if not folder.exists() or all(_is_state(entry) or _is_bystander(entry) for entry in folder.iterdir()):
        return
    if in_use(folder):
        raise ConfigError.at("output_dir", f"another run is using {folder}; stop it, or choose another output_dir")
    if never_began(folder):
        return
    _check_kind(folder, kind)
    saved = holds_checkpoint(folder)
    # What was saved is enough to resume from, and not to delete all that is there.
    if not is_of_run(folder) and (clean or not (saved or kinds.holds_states(folder))):
        raise ConfigError.at("output_dir", _of_strangers(folder, clean=clean))
    if not clean:
        if goes_on is not None and goes_on(folder):
            return
        going_on = "--ckpt.resume-step -1 to resume from its newest checkpoint, or " if saved else ""
        raise ConfigError.at(
            "output_dir",
            f"{folder} is not empty; choose another --output-dir, or start (no dry run) with {going_on}"
            "--clean-output-dir to delete what an earlier run left there",
        )


def is_of_run(folder: Path) -> bool:
    """Whether a run wrote what is there. Projects have a folder `configs`, too, with files of such names. Searches by
    `primerl gepa` once had no lock."""
    return (folder / LOCK).is_file() or holds_run(folder) or kinds.holds_search(folder)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a trainer has saved one there; a folder of that name alone may be anything."""
    return any(folder.glob(f"checkpoints/step_*/{STATE_FILE}")) or bool(going_back.whole_steps(folder))


def _check_kind(folder: Path, kind: str) -> None:
    if others := kinds.others_in(folder, kind):
        raise ConfigError.at("output_dir", kinds.refusal(folder, others, kind))


def _of_strangers(folder: Path, *, clean: bool) -> str:
    held = f"{folder} holds files that no run of primerl wrote"
    if clean:
        return f"{held}, so it is not deleted; choose another output_dir, or empty it yourself"
    return f"{held}, and --clean-output-dir would not delete them; choose another --output-dir, or empty it yourself"


def _is_state(entry: Path) -> bool:
    """Whether an entry of a run's folder holds no more than the state folder, which may be older than the run: nothing,
    where a start was killed before it had the lock."""
    folder, name = WITHIN_RUN.parts
    return entry.name == folder and entry.is_dir() and {one.name for one in entry.iterdir()} <= {name}


def _is_bystander(entry: Path) -> bool:
    """Whether a file is of no run, and in no run's way: a log of what starts the run, a mark of a file manager or of
    git. It is not deleted."""
    named = entry.name in MARKS or (entry.suffix in LOGS and entry.name != kinds.SEARCH_LOG)
    return named and entry.is_file()


def never_began(folder: Path) -> bool:
    """Whether the folder holds no more than what a dry run leaves there, a supervised fine-tuning that was refused for
    its rows, or a run or an evaluation that was stopped before its first event. Engines that serve begin at once."""
    entries = {entry.name for entry in folder.iterdir() if not _is_bystander(entry)} - {
        "bad_rows.jsonl",
        "val_bad_rows.jsonl",
    }
    own = {"configs", LOCK.parent.name}
    entries.discard(SCRIPT)
    # An evaluation's weights are those of its model, hashed again.
    copied = {"broadcasts"} if (folder / "configs" / "eval.toml").is_file() else set()
    if not (folder / LOCK).is_file() or not entries <= {*own, "logs", "journal", *copied}:
        return False
    if "logs" in entries and kinds.kinds_in(folder) & {"inference", "serve"}:
        return False
    return not any(file.suffix in (".snapshot", ".log") for file in folder.glob("journal/*"))


@contextlib.contextmanager
def claimed(output_dir: str, *, clean: bool, kind: str) -> Iterator[Path]:
    """The run's folder, emptied if asked for, and locked until the block ends (the kernel unlocks it at death).
    Raises ConfigError, before anything is made or deleted, where files in it are not a run's, or of a run of another
    `kind`."""
    folder = Path(files.absolute(output_dir))
    if clean:
        check_output_dir(output_dir, clean=True, kind=kind)
    lock = folder / LOCK
    with _as_config_error(folder):
        was_claimed = lock.is_file()
        if clean and (lock.parent.is_symlink() or not lock.parent.is_dir()):
            lock.parent.unlink(missing_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w", encoding="utf-8")
    with file:
        if not take(file):
            raise ConfigError.at("output_dir", f"another run is using {folder}; choose another output_dir")
        with _as_config_error(folder):
            if clean:
                _empty(folder, but=lock)
            (folder / "configs").mkdir(exist_ok=True)
            if was_claimed and never_began(folder):
                kinds.forget_others(folder, kind)
            on_request.forget(folder)  # by a session that was killed before it had its checkpoint
        yield folder


def _empty(folder: Path, *, but: Path) -> None:
    """Deletes all that is in the folder except that file, which its owner has locked, the state folder, and what is of
    no run."""
    for entry in folder.iterdir():
        if entry == but.parent / WITHIN_RUN.name or (folder != but.parent and _is_bystander(entry)):
            continue
        if entry.is_dir() and not entry.is_symlink():
            if entry == but.parent:
                _empty(entry, but=but)
            else:
                shutil.rmtree(entry)
        elif entry != but:
            entry.unlink()
