"""Defers what `import verifiers.v1` takes more than half its time for and few environments use: most of `openai.types`
(`reexports`), and two libraries.

    anthropic     base classes of two models of the dialect of the Messages API
    math_verify   (and sympy) `parse` and `verify`, which `verify_boxed_math_answer` calls

While verifiers is imported, their packages are in `sys.modules` without having been executed, and only the submodules
that define those classes are: verifiers gets the very classes. Afterwards the packages are taken out of `sys.modules`,
so that a later import of such a library executes it whole and in its own order, and finds the same submodules and
classes in it. Only for versions of verifiers that are known to need no more of them; a library that is not built as
expected is imported at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from primerl.envs.generations import reexports

KNOWN = ("0.4.0",)
CLASSES = {"Message": "anthropic.types.message", "Usage": "anthropic.types.usage"}
SCORE = "verifiers.v1.utils.score"


@contextlib.contextmanager
def unused_libraries() -> Iterator[None]:
    """Within the block, `verifiers.v1` is imported."""
    if "verifiers.v1" in sys.modules or importlib.metadata.version("verifiers") not in KNOWN:
        yield
        return
    functions = {name: _imported_when_called(name) for name in ("parse", "verify")}
    with (
        _deferred(["anthropic", "anthropic.types"], CLASSES, {}),
        _deferred(["math_verify"], {}, functions),
        reexports.by_name("openai.types"),
    ):
        yield


@contextlib.contextmanager
def _deferred(packages: Sequence[str], classes: Mapping[str, str], functions: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, the last of the packages has these classes, each by the module that defines it, and these
    functions."""
    library = _Library(packages)
    if not library.enter():
        yield
        return
    try:
        library.offer({name: getattr(import_module(module), name) for name, module in classes.items()})
    except Exception:  # noqa: BLE001 - its modules cannot be executed without what their package executes first
        library.forget()
        yield
        return
    library.offer(functions)
    try:
        yield
    finally:
        library.leave()


class _Library(MetaPathFinder):
    """The packages of a library that are not executed: in `sys.modules` until `leave`, executed when imported later."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._names = packages
        self._modules: dict[str, ModuleType] = {}
        self._offered: set[str] = set()

    def enter(self) -> bool:
        """False where the library is imported already, or is not a plain package."""
        if self._names[0] in sys.modules:
            return False
        path = None
        for name in self._names:
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.loader is None or spec.submodule_search_locations is None:
                return False
            self._modules[name] = module_from_spec(spec)
            path = spec.submodule_search_locations
        sys.modules.update(self._modules)
        return True

    def offer(self, attributes: Mapping[str, Any]) -> None:
        vars(self._modules[self._names[-1]]).update(attributes)
        self._offered.update(attributes)

    def forget(self) -> None:
        """As if nothing of it had been imported."""
        top = self._names[0]
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]

    def leave(self) -> None:
        for name in self._offered:
            delattr(self._modules[self._names[-1]], name)
        for name in self._names:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Executing(spec.loader, self)
        return spec

    def taken(self, name: str) -> ModuleType:
        module = self._modules.pop(name)
        if not self._modules:
            sys.meta_path.remove(self)
        return module


class _Executing(Loader):
    """Executes a package in the module that has its submodules already."""

    def __init__(self, loader: Loader, library: _Library) -> None:
        self._loader = loader
        self._library = library

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._library.taken(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)


def _imported_when_called(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            function = getattr(import_module("math_verify"), name)
        except ImportError as error:
            # An Exception would count as an answer that is wrong.
            raise SystemExit(f"math_verify, which verifiers scores with, cannot be imported: {error}") from error
        setattr(sys.modules[SCORE], name, function)
        return function(*arguments, **named)

    return call
