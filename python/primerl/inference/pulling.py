"""Weights over HTTP, for an engine on a machine that does not share the run's folder.

    folder = Puller(Pulled(url, cache)).folder("/run/broadcasts/step_7")   # as the orchestrator names it
    folder                                                                 # cache/step_7, whole and checked

The orchestrator has the trainer's files (`GET /weights/step_<k>/<file>`), and answers ranges of them. A file is resumed
where an earlier try has stopped; its tensors are compared with the hashes in the manifest before it counts. Engines on
one machine may share the folder: one of them pulls, the others wait for it. The two newest versions are kept. Needs
torch, safetensors and xxhash only.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from primerl.run_key import run_key, run_key_header

log = logging.getLogger("primerl.inference")

VARIABLE = "PRIMERL_PULL"
"""For processes that an engine consists of: JSON of a `Pulled`."""
VERSION = re.compile(r"step_\d+")
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
MANIFEST = "manifest.json"
PART_BYTES = 8 << 20
"""Asked for at a time; the orchestrator answers with no more."""
LARGEST_MANIFEST = 1 << 28
TIMEOUT_S = 60.0
TRIES, AGAIN_S = 5, 1.0
"""How often a part is asked for, and how long after the first failure; twice as long after each other."""
KEPT = 2


class PullError(ValueError):
    """A version cannot be had. The message names the URL, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Pulled:
    url: str
    """The orchestrator's address."""
    folder: str
    """Where the versions are kept on this machine."""
    key: str | None = field(default=None, repr=False)
    """The run's; None where this process's own environment has it."""


def as_variables(settings: Pulled | None) -> dict[str, str]:
    """For a process that does not get the run's key otherwise."""
    return {} if settings is None else {VARIABLE: json.dumps(asdict(replace(settings, key=run_key())))}


def from_variables(environ: Mapping[str, str]) -> Puller | None:
    text = environ.get(VARIABLE)
    return None if not text else Puller(Pulled(**json.loads(text)))


class Puller:
    def __init__(self, settings: Pulled) -> None:
        self._url = settings.url.rstrip("/")
        self._cache = Path(settings.folder)
        self._key = settings.key

    def folder(self, path: str | os.PathLike[str]) -> Path:
        """The folder on this machine that holds the version which the orchestrator has at `path`. Raises PullError."""
        name = Path(path).name
        if not VERSION.fullmatch(name):
            raise PullError(f"{path} is no folder of a version (`step_<k>`), which is what can be pulled")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            with self._locked():
                return self._pulled(name)
        except OSError as error:
            raise PullError(f"pull_to: {self._cache} cannot be used: {error}") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._cache / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _pulled(self, name: str) -> Path:
        began = time.monotonic()
        manifest = self._manifest(name)
        whole, partial = self._cache / name, self._cache / f".{name}.part"
        if _read(whole / MANIFEST) == manifest:
            return whole
        if _read(partial / MANIFEST) != manifest:  # of a trainer that has published other weights since
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            (partial / MANIFEST).write_bytes(manifest)
        contents = _parsed(manifest, name)
        size = 0
        for entry in contents["files"]:
            self._file(name, entry, partial / entry["name"])
            _check(partial / entry["name"], entry["name"], contents["tensors"])
            size += entry["bytes"]
        shutil.rmtree(whole, ignore_errors=True)
        partial.rename(whole)
        self._forget(but=name)
        log.info("%s: %d bytes pulled from %s in %.1f s", name, size, self._url, time.monotonic() - began)
        return whole

    def _manifest(self, name: str) -> bytes:
        found = b""
        while True:
            part, total = self._part(f"/weights/{name}/{MANIFEST}", len(found))
            found += part
            if len(found) >= total:
                return found
            if total > LARGEST_MANIFEST:
                raise PullError(f"{self._url}: the manifest of {name} has {total} bytes")

    def _file(self, name: str, entry: dict[str, Any], file: Path) -> None:
        """From where an earlier try has stopped."""
        with file.open("ab") as opened:
            while (at := opened.tell()) < entry["bytes"]:
                part, total = self._part(f"/weights/{name}/{entry['name']}", at)
                if total != entry["bytes"] or not part:
                    raise PullError(f"{name}/{entry['name']} has {total} bytes, and the manifest says {entry['bytes']}")
                opened.write(part)
            if at > entry["bytes"]:
                opened.truncate(0)
                raise PullError(f"{file} was longer than the manifest says, and is pulled again at the next try")

    def _part(self, path: str, begin: int) -> tuple[bytes, int]:
        """Bytes from `begin` on, and how many the file has. Tries again where the network fails."""
        pause_s = AGAIN_S
        for left in reversed(range(TRIES)):
            try:
                return self._asked(path, begin)
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise PullError(f"{self._url}{path} cannot be pulled: {error or type(error).__name__}") from None
                log.warning("%s%s from byte %d on: %s; it is asked for again", self._url, path, begin, error)
                time.sleep(pause_s)
                pause_s *= 2
        raise AssertionError("unreachable")

    def _asked(self, path: str, begin: int) -> tuple[bytes, int]:
        address = urlsplit(self._url)
        made = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = made(address.hostname or "127.0.0.1", address.port, timeout=TIMEOUT_S)
        try:
            key = run_key_header(self._url) if self._key is None else {"Authorization": f"Bearer {self._key}"}
            headers = {**key, "Range": f"bytes={begin}-{begin + PART_BYTES - 1}"}
            connection.request("GET", f"{address.path}{path}", headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == http.client.OK and begin == 0:
            return content, len(content)
        if answer.status != http.client.PARTIAL_CONTENT:
            said = " ".join(content.decode(errors="replace").split())[:300]
            raise PullError(f"{self._url}{path} is refused with status {answer.status}: {said}")
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != begin:
            raise PullError(f"{self._url}{path}: what was answered is not what was asked for")
        return content, int(found[2])

    def _forget(self, but: str) -> None:
        """All but the newest versions, and parts of others. What is mapped from a file stays in memory."""
        there = [one.name for one in self._cache.iterdir()]
        versions = sorted((one for one in there if VERSION.fullmatch(one)), key=lambda one: int(one[5:]), reverse=True)
        kept = {but, *[one for one in versions if one != but][: KEPT - 1]}
        for one in there:
            if (one in versions and one not in kept) or one.endswith(".part"):
                shutil.rmtree(self._cache / one, ignore_errors=True)


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _parsed(manifest: bytes, name: str) -> dict[str, Any]:
    """Raises PullError for what is no manifest of files with plain names."""
    try:
        found: dict[str, Any] = json.loads(manifest)
        sizes = {str(entry["name"]): int(entry["bytes"]) for entry in found["files"]}
        _ = [(entry["name"], entry["file"], entry["xxh3"]) for entry in found["tensors"]]
    except (ValueError, LookupError, TypeError):
        raise PullError(f"{name}/{MANIFEST} is no manifest of weights") from None
    odd = next((one for one in sizes if not PLAIN.fullmatch(one) or one == MANIFEST), None)
    if odd is not None:
        raise PullError(f"{name}/{MANIFEST} names the file {odd!r}, which is not a plain name")
    return found


def _check(file: Path, name: str, tensors: list[dict[str, Any]]) -> None:
    """Compares a file's tensors with their hashes; one that differs is deleted. Raises PullError."""
    from safetensors import SafetensorError, safe_open

    from primerl.train.weights.tensors import tensor_hash

    wanted = {entry["name"]: entry["xxh3"] for entry in tensors if entry["file"] == name}
    if not wanted:  # such as adapter_config.json
        return
    try:
        with safe_open(file, framework="pt") as opened:
            bad = next((one for one, xxh3 in wanted.items() if tensor_hash(opened.get_tensor(one)) != xxh3), None)
    except (SafetensorError, OSError) as error:
        bad = str(error)
    if bad is not None:
        file.unlink()
        raise PullError(f"{file}: what was pulled is damaged ({bad}); it is pulled again at the next try")
