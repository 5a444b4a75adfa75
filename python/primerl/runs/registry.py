"""The runs of this user: `runs.db` (SQLite) in the state folder.

What is kept of a run is what cannot be read from its folder: where that is, what was started when, and by which
process. Whether it is running is not kept but looked up (`status`), so that nothing has to be put right after a kill
-9. Every change is one transaction, of a moment; several runs write one after the other (WAL, `BUSY_S`).
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.runs.state import StateError, private_folder, process_started, state_folder, write_private

FILE = "runs.db"
VERSION = 2
SCRIPT = "script"
"""Form of a run that a training script has started (`primerl.Run`), which alone can resume it."""
BUSY_S = 10.0
"""How long a writer waits for another writer."""
ID_BYTES = 4
ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
ID_FILE = Path("run") / "id"
TABLE = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    environments TEXT NOT NULL,
    output_dir TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL DEFAULT 'rl',
    form TEXT NOT NULL,
    folder TEXT NOT NULL,
    started REAL NOT NULL,
    session_started REAL NOT NULL,
    ended REAL,
    exit_code INTEGER,
    pid INTEGER NOT NULL,
    process_started TEXT
)
"""


class UnknownRunError(Exception):
    """No run, or more than one, goes by the id. The message says which are near."""


@dataclass(frozen=True, slots=True)
class Run:
    id: str
    name: str
    model: str
    """Model folder it began with; of an evaluation of an endpoint, the model's name there."""
    environments: list[str]
    output_dir: Path
    kind: str
    """`rl`, `sft`, `eval` or `serve`: the command that it was started by."""
    form: str
    """The form its config was given in: `full` or `hosted`; or `SCRIPT`."""
    folder: Path
    """Where it was started, which relative paths in its config begin at."""
    started: float
    """Seconds since 1970, as all times here."""
    session_started: float
    """When its current or last launcher was started."""
    ended: float | None
    """When that launcher ended; None while it lives, and where it was killed."""
    exit_code: int | None
    pid: int
    """The launcher's."""
    process_started: str | None

    @property
    def config(self) -> Path:
        """The stored copy of its config."""
        return config_file(self.id)

    def launcher_lives(self) -> bool:
        """Whether the process is still the one that was noted, not another that was given its id."""
        return self.process_started is not None and process_started(self.pid) == self.process_started


def config_file(run_id: str) -> Path:
    return state_folder() / "runs" / run_id / "config.toml"


class Registry:
    """Use as a context manager. Raises StateError where the file cannot be read or written."""

    def __init__(self, *, reading: bool = False) -> None:
        """`reading`: nothing will be noted, so a state folder that cannot be written to will do."""
        self.file = state_folder() / FILE
        try:
            private_folder()
            self._open(os.fspath(self.file))
        except StateError:
            if not (reading and self.file.is_file()):
                raise
            self._open_for_reading()

    def _open(self, name: str, *, prepare: bool = True) -> None:
        with self._errors():
            self._connection = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, uri=name.startswith("file:"))
        try:
            with self._errors():
                self._connection.row_factory = sqlite3.Row
                if prepare:
                    self._prepare()
                else:
                    self._connection.execute("SELECT 1 FROM runs").fetchone()
        except BaseException:
            self._connection.close()
            raise

    def _open_for_reading(self) -> None:
        try:
            self._open(f"{self.file.absolute().as_uri()}?mode=ro", prepare=False)
        except StateError:
            # Without the files next to it, which cannot be made there, SQLite reads one that does not change.
            self._open(f"{self.file.absolute().as_uri()}?immutable=1", prepare=False)

    def _prepare(self) -> None:
        # Within a transaction nothing waits for the disk; a power cut may cost the last changes, and breaks nothing.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise StateError(f"{self.file} was written by a newer version of primerl; use that one")
        if version == VERSION:
            return
        os.chmod(self.file, 0o600)
        self._change_to_wal()
        with self._transaction():
            # Asked again: another process may have done it by now.
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 1:
                self._connection.execute("ALTER TABLE runs ADD COLUMN kind TEXT NOT NULL DEFAULT 'rl'")
            self._connection.execute(TABLE)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")

    def _change_to_wal(self) -> None:
        """SQLite itself does not wait here for another process that does the same."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # Errors of use and of the system have classes of their own.
            is_damaged = type(error) is sqlite3.DatabaseError
            fix = (
                ", and is damaged: move it away; the command that a run was started with, given again, puts that run "
                "into a new list, by the id that it had"
            )
            raise StateError(f"{self.file}: {error}; it holds the list of runs{fix if is_damaged else ''}") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        # A transaction that reads first and writes then could find that another has written in between.
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def begin(
        self,
        output_dir: Path,
        config: str,
        *,
        goes_on: bool,
        form: str,
        name: str,
        model: str,
        environments: list[str],
        kind: str = "rl",
    ) -> str:
        """Notes a start by this process and returns the run's id. `goes_on`: with the run in `output_dir`, whose id it
        keeps, also where that folder was moved, or was taken out of the list. `config` is TOML, of which a copy is
        stored."""
        pid = os.getpid()
        values: dict[str, Any] = {
            "name": name,
            "model": model,
            "environments": json.dumps(environments),
            "output_dir": os.fspath(output_dir),
            "kind": kind,
            "form": form,
            "folder": os.getcwd(),
            "session_started": time.time(),
            "ended": None,
            "exit_code": None,
            "pid": pid,
            "process_started": process_started(pid),
        }
        # The caller has locked the folder, so no other process changes what is noted of it.
        with self._errors():
            listed, row, run_id = self._identified(output_dir, goes_on=goes_on)
        # Before the transaction, which others wait for.
        private_folder("runs", run_id)
        write_private(config_file(run_id), config)
        with self._errors(), self._transaction():
            if listed is not None and not goes_on:
                # What was noted is of a run whose folder has been emptied.
                self._connection.execute("DELETE FROM runs WHERE id = ?", (listed,))
            self._write(values, run_id, is_new=row is None)
        if listed not in (None, run_id):
            _remove_config(listed)
        _note_id(output_dir, run_id)
        return run_id

    def _identified(self, output_dir: Path, *, goes_on: bool) -> tuple[str | None, sqlite3.Row | None, str]:
        """The id that the list has for the folder; the row to change; the id of the run that is started there."""
        found = self._connection.execute("SELECT id FROM runs WHERE output_dir = ?", (os.fspath(output_dir),))
        row = found.fetchone()
        listed = None if row is None else str(row["id"])
        if not goes_on:
            return listed, None, self._new_id()
        if listed is None:
            return None, *self._by_noted_id(output_dir)
        return listed, row, listed

    def _write(self, values: dict[str, Any], run_id: str, *, is_new: bool) -> None:
        values = {**values, "id": run_id}
        if is_new:
            values |= {"started": values["session_started"]}
            names, marks = ", ".join(values), ", ".join(f":{key}" for key in values)
            self._connection.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", values)
        else:
            changes = ", ".join(f"{key} = :{key}" for key in values if key != "id")
            self._connection.execute(f"UPDATE runs SET {changes} WHERE id = :id", values)

    def _by_noted_id(self, output_dir: Path) -> tuple[sqlite3.Row | None, str]:
        """For a run in a folder that the list does not have: its row, where the folder was moved, and its id; a
        new one for a copy of a run."""
        try:
            noted = (output_dir / ID_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None, self._new_id()
        if not ID.fullmatch(noted):
            return None, self._new_id()
        row = self._connection.execute("SELECT id, output_dir FROM runs WHERE id = ?", (noted,)).fetchone()
        if row is not None and Path(row["output_dir"]).exists():
            return None, self._new_id()
        return row, noted

    def _new_id(self) -> str:
        while True:
            run_id = secrets.token_hex(ID_BYTES)
            if not self._connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone():
                return run_id

    def end(self, run_id: str, exit_code: int) -> None:
        """Called by the process that started the session; another one's session is not changed."""
        with self._errors(), self._transaction():
            self._connection.execute(
                "UPDATE runs SET ended = ?, exit_code = ? WHERE id = ? AND pid = ?",
                (time.time(), exit_code, run_id, os.getpid()),
            )

    def restore(self, run: Run, config: str) -> None:
        """Restores what was noted before the start that ends here."""
        write_private(config_file(run.id), config)
        kept = ("id", "kind", "form", "session_started", "ended", "exit_code", "pid", "process_started", "model")
        values = {name: getattr(run, name) for name in kept}
        values |= {"environments": json.dumps(run.environments), "folder": os.fspath(run.folder)}
        with self._errors(), self._transaction():
            self._write(values, run.id, is_new=False)

    def delete(self, run_id: str) -> None:
        with self._errors(), self._transaction():
            self._connection.execute("DELETE FROM runs WHERE id = ?", (run_id,))
        _remove_config(run_id)

    def all(self) -> list[Run]:
        """The newest first."""
        with self._errors():
            rows = self._connection.execute("SELECT * FROM runs ORDER BY session_started DESC, id").fetchall()
        return [_run(row) for row in rows]

    def find(self, given: str) -> Run:
        """The run with this id, unique beginning of an id, or name. Raises UnknownRunError."""
        runs = self.all()
        exact = [run for run in runs if run.id == given]
        # A name may look like the beginning of another run's id: who stops or deletes has to say which is meant.
        found = exact or [run for run in runs if given and (run.id.startswith(given.lower()) or run.name == given)]
        if len(found) == 1:
            return found[0]
        if found:
            listed = ", ".join(f"{run.id} ({run.output_dir})" for run in found)
            raise UnknownRunError(f"{given!r} is the beginning or the name of several runs: {listed}; give an id")
        raise UnknownRunError(f"there is no run {given!r}; {_near(given, runs)}")


def known(given: str) -> Run | None:
    """As `find`; None of a run of another machine, or one that was deleted from the list. Raises StateError."""
    try:
        with Registry(reading=True) as registry:
            return registry.find(given)
    except UnknownRunError:
        return None


def folder_of(given: str) -> Path:
    """The output folder of a run, given as its folder, id or name. Raises UnknownRunError, StateError."""
    folder = Path(given)
    if folder.is_dir():
        return folder
    try:
        with Registry(reading=True) as registry:
            folder = registry.find(given).output_dir
    except UnknownRunError as error:
        raise UnknownRunError(
            f"there is no folder {given}, and {error}; give the output_dir of a run, or its id"
        ) from None
    if not folder.is_dir():
        raise UnknownRunError(f"the folder of run {given}, {folder}, is gone")
    return folder


def _note_id(output_dir: Path, run_id: str) -> None:
    """In the run's folder, so that it is known by it in any list."""
    with contextlib.suppress(OSError):
        if output_dir.is_dir():
            (output_dir / ID_FILE).parent.mkdir(exist_ok=True)
            (output_dir / ID_FILE).write_text(f"{run_id}\n", encoding="utf-8")


def _remove_config(run_id: str) -> None:
    file = config_file(run_id)
    with contextlib.suppress(OSError):  # the run is out of the list, which is what counts
        file.unlink(missing_ok=True)
        file.parent.rmdir()


def _near(given: str, runs: list[Run]) -> str:
    if not runs:
        return "no run has been started yet, or not by this user (`primerl run @ rl.toml` starts one)"
    named = {run.id: run for run in runs} | {run.name: run for run in runs}
    near = difflib.get_close_matches(given, named, n=3, cutoff=0.5)
    listed = ", ".join(dict.fromkeys(f"{named[text].id} ({named[text].name})" for text in near))
    return f"did you mean {listed}?" if listed else "`primerl run list` lists them"


def _run(row: sqlite3.Row) -> Run:
    values = {key: row[key] for key in row.keys()}  # noqa: SIM118 - a Row iterates over its values
    values.setdefault("kind", "rl")  # of a list of the version before, which is only read
    try:
        values["environments"] = list(map(str, json.loads(values["environments"])))
    except (ValueError, TypeError):
        values["environments"] = ["?"]  # it is shown, and nothing else
    values |= {"output_dir": Path(values["output_dir"]), "folder": Path(values["folder"])}
    return Run(**values)
