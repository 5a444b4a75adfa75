"""The checkpoint store: what runs have saved, in a folder or under any URL that fsspec knows.

    <url>/<run>/<kind>/step_<N>.json          the manifest: sizes and hashes of the files, and where they are
    <url>/<run>/<kind>/data/<N>_<random>/...   the files
    <url>/<run>/adapter/step_<N>.deployed      is never cleaned up

A manifest is written when all files are there, and deleted before they are: what has one is READY, and nothing else is
there. An upload that was cut off leaves data that no manifest names, which the run's next upload removes.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from primerl.runs.saved import Saved
from primerl.runs.state import private_folder, state_folder
from primerl.train.files import sync, whole_folder, write_text

KINDS = ("checkpoint", "weights", "adapter")
CHUNK_BYTES = 1 << 22
ID = re.compile(r"(?P<run>[\w-]+)(/(?P<kind>checkpoint|weights|adapter))?(/step_(?P<step>\d+))?")


class StoreError(Exception):
    """The store cannot be used, or what is asked for is not there. The message names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest says."""

    run: str
    kind: str
    step: int
    model: str
    """Digest of the config.json of the model that the run began with."""
    data: str
    """Folder of the files, in the store."""
    files: dict[str, dict[str, Any]]
    """By relative path: `bytes`, and `xxh3`: 32 hex digits."""
    stored: float
    """When; seconds since 1970. A run that went back stores lower steps later, and those are its newest."""

    @property
    def id(self) -> str:
        return f"{self.run}/{self.kind}/step_{self.step}"

    @property
    def bytes(self) -> int:
        return sum(int(facts["bytes"]) for facts in self.files.values())


def default_url() -> str:
    return str(state_folder() / "store")


def model_digest(folder: Path) -> str:
    """Of a model folder's config.json: what of it names its shape, whatever saved it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / 'config.json'} cannot be read: {error}") from None
    # Saving a model writes these anew.
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"):
        config.pop(name, None)
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode())


def _age(entry: Entry) -> tuple[float, int]:
    """Of what was stored within one tick of the clock, the higher step is the newer one."""
    return entry.stored, entry.step


class Store:
    """Raises StoreError for whatever the file system says."""

    def __init__(self, url: str | None = None) -> None:
        import fsspec

        self.url = url or default_url()
        with self._errors("opened"):
            try:
                self._fs, self._root = fsspec.url_to_fs(self.url)
            except ImportError as error:  # s3fs, gcsfs: each with dependencies of its own
                raise StoreError(f"store.url: {self.url}: {error}") from None
        if self._is_local:
            self._check_folder(Path(self._root))

    def _check_folder(self, folder: Path) -> None:
        """It may still have to be made."""
        there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise StoreError(f"store.url: {there} is a file; give a folder")

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each file system has errors of its own
            words = str(error) or type(error).__name__
            raise StoreError(f"store.url: {self.url} cannot be {done}: {words}") from error

    def entries(self, run: str | None = None) -> list[Entry]:
        """What is READY, by run, step and kind."""
        found = []
        with self._errors("read"):
            self._fs.invalidate_cache()
            for path in self._fs.glob(f"{self._root}/{run or '*'}/*/step_*.json"):
                try:
                    found.append(self._read(path))
                except FileNotFoundError:
                    continue  # cleaned up just now
        return sorted(found, key=lambda entry: (entry.run, entry.step, entry.kind))

    def _read(self, path: str) -> Entry:
        content = json.loads(self._fs.cat_file(path))
        return Entry(**{name: content[name] for name in Entry.__slots__})

    def saved(self, run: str) -> list[Saved]:
        deployed = self.deployed(run)
        return [
            Saved(
                e.step,
                e.kind,
                True,
                e.bytes,
                e.kind != "checkpoint",
                e.id + (" (deployed)" if e.id in deployed else ""),
            )
            for e in self.entries(run)
        ]

    def find(self, given: str) -> Entry:
        """By `RUN`, `RUN/step_N` or `RUN/KIND/step_N`; the newest, and weights before adapters, where it is left open.
        Raises StoreError, which names what there is."""
        match = ID.fullmatch(given)
        if match is None:
            raise StoreError(f"{given!r} is no id of the store; expected RUN, RUN/step_N or RUN/KIND/step_N")
        there = self.entries(match["run"])
        wanted = [e for e in there if match["kind"] in (None, e.kind) and match["step"] in (None, str(e.step))]
        if not wanted:
            known = ", ".join(entry.id for entry in there) or f"nothing of run {match['run']}"
            raise StoreError(f"{given!r} is not READY in the store {self.url}; there is {known}")
        newest = max(wanted, key=lambda entry: (entry.kind != "checkpoint", _age(entry)))
        trained_on = newest.kind == "checkpoint"
        of_step = [e for e in wanted if e.step == newest.step and (e.kind == "checkpoint") == trained_on]
        return max(of_step, key=lambda entry: KINDS.index(entry.kind) == 1)

    def put(self, folder: Path, run: str, kind: str, step: int, model: str) -> Entry:
        """Uploads all files below `folder`; READY when this returns."""
        base = f"{self._root}/{run}/{kind}"
        data = f"{base}/data/{step}_{secrets.token_hex(4)}"
        files = {}
        with self._errors("written to"):
            former = self._read(f"{base}/step_{step}.json") if self._fs.exists(f"{base}/step_{step}.json") else None
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                name = file.relative_to(folder).as_posix()
                files[name] = self._upload(file, f"{data}/{name}")
            if not files:
                raise StoreError(f"{folder} holds no files to store")
            entry = Entry(run, kind, step, model, data.removeprefix(f"{self._root}/"), files, time.time())
            self._sync_folders(data, files)
            manifest = {name: getattr(entry, name) for name in Entry.__slots__} | {"version": 1}
            self._write(f"{base}/step_{step}.json", json.dumps(manifest, indent=1).encode())
            if former is not None:
                self._fs.rm(f"{self._root}/{former.data}", recursive=True)
        return entry

    def _upload(self, file: Path, target: str) -> dict[str, Any]:
        hashed, size = xxhash.xxh3_128(), 0
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        with file.open("rb") as source, self._fs.open(target, "wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                hashed.update(chunk)
                size += len(chunk)
                sink.write(chunk)
        if self._is_local:
            sync(Path(target))
        stored = self._fs.info(target)["size"]
        if stored != size:
            raise StoreError(f"{target} has {stored} bytes in the store, of {size}")
        return {"bytes": size, "xxh3": hashed.hexdigest()}

    def _write(self, path: str, content: bytes) -> None:
        # On a file system of files a reader could see half of it; an object appears whole.
        if self._is_local:
            write_text(Path(path), content.decode())
        else:
            self._fs.pipe_file(path, content)

    @property
    def _is_local(self) -> bool:
        protocol = self._fs.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def _sync_folders(self, data: str, files: Iterable[str]) -> None:
        """So that a manifest that outlives a power cut names nothing that did not."""
        if not self._is_local:
            return
        folders = {parent for name in files for parent in Path(data, name).parents}
        root = Path(self._root)
        for folder in folders:
            # The root's own name is in the folder above it.
            if folder == root.parent or folder.is_relative_to(root):
                sync(folder)

    def fetch(self, entry: Entry) -> Path:
        """The entry's files in a folder of this machine, each checked by its hash; fetched once."""
        target = (
            private_folder("fetched")
            / xxhash.xxh3_64_hexdigest(f"{self.url} {entry.data}".encode())
            / f"step_{entry.step}"
        )
        if target.is_dir():
            return target
        with whole_folder(target, replace=True) as folder, self._errors("read"):
            for name, facts in entry.files.items():
                self._download(entry, name, facts, folder)
        return target

    def _download(self, entry: Entry, name: str, facts: dict[str, Any], folder: Path) -> None:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise StoreError(f"{entry.id}: its manifest names a file outside of it: {name!r}")
        target, hashed = folder / name, xxhash.xxh3_128()
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._fs.open(f"{self._root}/{entry.data}/{name}", "rb") as source, target.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                hashed.update(chunk)
                sink.write(chunk)
        if hashed.hexdigest() != facts["xxh3"]:
            raise StoreError(f"{entry.id}: {name} is not what was stored: its hash differs; delete it from the store")

    def delete(self, entry: Entry) -> None:
        with self._errors("written to"):
            self._fs.rm_file(f"{self._root}/{entry.run}/{entry.kind}/step_{entry.step}.json")
            self._fs.rm(f"{self._root}/{entry.data}", recursive=True)

    def keep_newest(self, run: str, kind: str, count: int) -> list[Entry]:
        """Deletes the run's older ones of that kind, but for those that are deployed; -1 keeps all. Returns them."""
        there = sorted((entry for entry in self.entries(run) if entry.kind == kind), key=_age)
        deployed = self.deployed(run)
        old = [entry for entry in there[:-count] if entry.id not in deployed] if count > 0 else []
        for entry in old:
            self.delete(entry)
        return old

    def remove_unfinished(self, run: str) -> None:
        """What uploads that were cut off have left. Nobody else may be uploading for this run."""
        named = {entry.data for entry in self.entries(run)}
        with self._errors("written to"):
            for path in self._fs.glob(f"{self._root}/{run}/*/data/*"):
                if path.removeprefix(f"{self._root}/") not in named:
                    self._fs.rm(path, recursive=True)

    def deployed(self, run: str | None = None) -> set[str]:
        with self._errors("read"):
            self._fs.invalidate_cache()
            marks = self._fs.glob(f"{self._root}/{run or '*'}/adapter/step_*.deployed")
        return {mark.removeprefix(f"{self._root}/").removesuffix(".deployed") for mark in marks}

    def mark_deployed(self, entry: Entry, *, deployed: bool) -> None:
        path = f"{self._root}/{entry.id}.deployed"
        with self._errors("written to"):
            if deployed:
                self._fs.pipe_file(path, b"{}\n")
            elif self._fs.exists(path):
                self._fs.rm_file(path)


def store_of_run(config: Path) -> Store | None:
    """Of the stored copy of a run's config; None where it has no store."""
    try:
        section = tomllib.loads(config.read_text()).get("store")
    except (OSError, ValueError):
        return None
    return Store(section.get("url")) if isinstance(section, dict) else None
