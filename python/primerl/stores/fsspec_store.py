"""A store in a folder, or under any URL that fsspec knows.

    <url>/<run>/<kind>/step_<N>.json          the manifest: sizes and hashes of the files, and where they are
    <url>/<run>/<kind>/data/<N>_<random>/...   the files
    <url>/<run>/adapter/step_<N>.deployed      is never cleaned up

A manifest is written when all files are there, and deleted before they are: what has one is READY, and nothing else is
there. An upload that was cut off leaves data that no manifest names, which the run's next upload removes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from primerl.stores.entries import Entry, StoreError
from primerl.stores.store import Store
from primerl.train.checkpoint.files import sync, write_text

CHUNK_BYTES = 1 << 22


class FsspecStore(Store):
    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        with self._errors("opened"):
            try:
                self._fs, self._root = fsspec.url_to_fs(self.url)
            except ImportError as error:  # s3fs, gcsfs: each with dependencies of its own
                raise StoreError.at("store.url", f"{self.url}: {error}") from None
        if self._is_local:
            self._check_folder(Path(self._root))

    def _check_folder(self, folder: Path) -> None:
        """The folder need not exist yet."""
        there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise StoreError.at("store.url", f"{there} is a file; give a folder")

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each file system has errors of its own
            words = str(error) or type(error).__name__
            raise StoreError.at("store.url", f"{self.url} cannot be {done}: {words}") from error

    def entries(self, run: str | None = None) -> list[Entry]:
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
        content = self._fs.cat_file(path)
        try:
            return Entry.read(content)
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError.at(
                "store.url", f"{path} is no manifest of the store ({error!r}); delete it there"
            ) from None

    def put(self, folder: Path, run: str, kind: str, step: int, model: str, base: str = "") -> Entry:
        of_kind = f"{self._root}/{run}/{kind}"
        manifest, data = f"{of_kind}/step_{step}.json", f"{of_kind}/data/{step}_{secrets.token_hex(4)}"
        files = {}
        with self._errors("written to"):
            former = self._read(manifest) if self._fs.exists(manifest) else None
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                name = file.relative_to(folder).as_posix()
                files[name] = self._upload(file, f"{data}/{name}")
            if not files:
                raise StoreError(f"{folder} holds no files to store")
            entry = Entry(run, kind, step, model, data.removeprefix(f"{self._root}/"), files, time.time(), base)
            self._sync_folders(data, files)
            self._write(manifest, entry.manifest().encode())
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
        """After a power cut, a manifest that is there must not name a file that is not."""
        if not self._is_local:
            return
        folders = {parent for name in files for parent in Path(data, name).parents}
        root = Path(self._root)
        for folder in folders:
            # The root's own name is in the folder above it.
            if folder == root.parent or folder.is_relative_to(root):
                sync(folder)

    def download(self, entry: Entry, folder: Path) -> None:
        with self._errors("read"):
            for name, facts in entry.files.items():
                self._download(entry, name, facts, folder)

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

    def remove_run(self, run: str) -> None:
        with self._errors("written to"):
            if self._fs.exists(f"{self._root}/{run}"):
                self._fs.rm(f"{self._root}/{run}", recursive=True)

    def remove_unfinished(self, run: str) -> None:
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
