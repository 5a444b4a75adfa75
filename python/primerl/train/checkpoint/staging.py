"""What is to be uploaded: hard links in `run/store/`, made the moment a folder is whole, so that the run may delete its
own during the upload. The trainer stages the adapters itself that it soon deletes.

    run/store/<kind>_step_<N>.<inode>_<mtime>/      whole
    run/store/.<name>.<pid>                         being linked
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("run") / "store"
NAME = re.compile(
    r"(?P<label>(?P<kind>checkpoint|weights|adapter)_step_(?P<step>\d+))\.(?P<identity>\d+_(?P<saved>\d+))"
)


@dataclass(frozen=True, slots=True)
class Staged:
    path: Path
    label: str
    """`checkpoint_step_4`."""
    kind: str
    step: int
    identity: str
    """Identity of the linked folder: a run that went back saves the same step again, in another folder."""
    saved: int
    """Time of staging, in nanoseconds since 1970."""


def identity_of(folder: Path) -> str:
    """Changes when a file is added to or removed from the folder or one in it. Raises OSError."""
    facts = folder.stat()
    with os.scandir(folder) as entries:
        changed = [entry.stat().st_mtime_ns for entry in entries if entry.is_dir()]
    return f"{facts.st_ino}_{max([facts.st_mtime_ns, *changed])}"


def link(output_dir: Path, kind: str, step: int, folder: Path) -> None:
    """Stages a whole folder or nothing; does nothing if it is already staged.

    Raises OSError or shutil.Error, also where the folder is deleted meanwhile. (Who deletes one whose files are in
    folders of their own renames it first.)
    """
    identity = identity_of(folder)
    target = output_dir / FOLDER / f"{kind}_step_{step}.{identity}"
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(folder, temporary, copy_function=_link_or_copy)
        if identity_of(folder) != identity:
            raise OSError(f"{folder} was changed or deleted while it was linked")
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # another process may have made it meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def staged(output_dir: Path) -> list[Staged]:
    """Staged folders in the order in which they were saved."""
    try:
        paths = list((output_dir / FOLDER).iterdir())
    except FileNotFoundError:
        return []
    found = [
        Staged(path, match["label"], match["kind"], int(match["step"]), match["identity"], int(match["saved"]))
        for path in paths
        if (match := NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda one: (one.saved, one.step, one.kind))


def unstage(one: Staged) -> None:
    # Under another name first, so that a half removed folder is not uploaded.
    gone = one.path.with_name(f".{one.path.name}.{os.getpid()}")
    one.path.rename(gone)
    shutil.rmtree(gone)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)  # the file system has no hard links
