"""Imports `transformers` without reading the sources of all its models again.

Whenever it is imported, it reads them, 2,400 files, to know what they define, twice; and the files of every installed
package, to know which modules they have: half of the time that it takes. Here the second reading is given what the
first has found, and both what an earlier process found in the same files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from primerl.process.user_cache import kept

DEFINES = "transformers.utils.import_utils"
METADATA = ("METADATA", "PKG-INFO", "RECORD", "top_level.txt", "EGG-INFO/PKG-INFO", "EGG-INFO/top_level.txt")
_importing = RLock()
Structure = dict[frozenset[str], dict[str, set[str]]]
"""What a class needs (torch, say) -> modules -> names that they define."""


def import_transformers() -> None:
    """Imports `transformers` and `transformers.models`.

    Called before anything else imports `transformers`; without it, that takes longer, and is the same.
    """
    with _importing:
        if "transformers.models" in sys.modules:
            return
        with _packages_kept(), _models_kept():
            import transformers.models  # noqa: F401


@contextmanager
def _models_kept() -> Iterator[None]:
    if DEFINES in sys.modules:
        _keep_models(sys.modules[DEFINES])
        yield
        return
    finder = _Executed(DEFINES, _keep_models)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _keep_models(module: ModuleType) -> None:
    """Has the module's function find what the models define once, also when parts of `transformers` ask again later."""
    given = getattr(module, "define_import_structure", None)
    if given is None:  # another version of transformers
        return
    folder = Path(module.__file__ or "").parents[1] / "models"
    found = cache(lambda: _structure(folder, given))

    @wraps(given)
    def define(path: str, prefix: str | None = None) -> Structure:
        if Path(path) not in (folder, folder / "__init__.py"):
            return given(path, prefix)  # type: ignore[no-any-return]
        before = "" if prefix is None else f"{prefix}."
        return {needs: {before + name: names for name, names in modules.items()} for needs, modules in found().items()}

    module.define_import_structure = define  # type: ignore[attr-defined]


class _Executed(MetaPathFinder):
    """Calls a function with a module when it has been executed, before anything gets names from it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _structure(folder: Path, define: Callable[[Path], Structure]) -> Structure:
    found: list[Structure] = []

    def find() -> list[tuple[list[str], dict[str, list[str]]]] | None:
        found.append(define(folder))
        # What another version of transformers answers may be more than this: it is not kept.
        with suppress(TypeError, AttributeError):
            written = _written(found[0])
            if _read(written) == found[0]:
                return written
        return None

    try:
        # The models, and what reads them.
        fingerprint = _digest(chain(_sources(folder), _sources(folder.parent / "utils")))
    except OSError:
        return define(folder)
    written = kept("transformers-models", fingerprint, find)
    return found[0] if found else _read(written)


def _written(structure: Structure) -> list[tuple[list[str], dict[str, list[str]]]]:
    return [
        (sorted(needs), {name: sorted(names) for name, names in modules.items()})
        for needs, modules in structure.items()
    ]


def _read(written: Iterable[tuple[Iterable[str], Mapping[str, Iterable[str]]]]) -> Structure:
    return {frozenset(needs): {name: set(names) for name, names in modules.items()} for needs, modules in written}


@contextmanager
def _packages_kept() -> Iterator[None]:
    """For `importlib.metadata.packages_distributions`, which `transformers` asks as soon as it is imported."""
    given = importlib.metadata.packages_distributions
    # Others may find packages anywhere.
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        yield
        return
    importlib.metadata.packages_distributions = lambda: kept("packages", _digest(_packages()), given)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = given


def _digest(described: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(described).encode(errors="surrogateescape")).hexdigest()


def _sources(folder: str | Path) -> Iterator[str]:
    """Each source file in the folder, with its size and when it was changed."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                yield _described(entry.path)
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _sources(entry.path)


def _packages() -> Iterator[str]:
    """What `importlib.metadata` reads of each package, in the order in which packages are found."""
    for place in sys.path:
        folder = place or "."
        if not os.path.isdir(folder):
            yield _described(folder)  # an archive, perhaps
            continue
        with suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if name.endswith((".dist-info", ".egg-info", ".egg")):
                    own = os.path.join(folder, name)
                    read = (own, *(os.path.join(own, file) for file in METADATA))
                    yield from map(_described, read)


def _described(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return path
    return f"{path} {found.st_size} {found.st_mtime_ns}"
