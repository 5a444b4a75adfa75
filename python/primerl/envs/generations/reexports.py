"""Imports packages that only collect names of their modules, such as `openai.types`, name by name: verifiers uses ten
names of them, of 600 modules.

Only where `__init__` has nothing but `from .module import Name as Name`; any other package is imported as usual. A name
is imported from its module when it is first asked for, so all classes are the ones that they would be.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"from (\.[\w.]+) import (?:(\w+ as \w+)|\(\n((?:    \w+ as \w+,\n)+)\))\n")
_NOTHING = re.compile(r"(?:#[^\n]*\n|from __future__ import annotations\n|\n)*")


@contextlib.contextmanager
def by_name(top: str) -> Iterator[None]:
    """Within the block, packages from `top` down are imported so."""
    finder = _Finder(top)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def collected(source: str) -> dict[str, str] | None:
    """The module of each name that an `__init__` collects, as in `{"Chat": ".chat"}`; None where it does more."""
    found: dict[str, str] = {}
    for module, one, several in _IMPORT.findall(source):
        for name, called in re.findall(r"(\w+) as (\w+)", one or several):
            # The module of the same name would take the name's place.
            if name != called or module == f".{name}":
                return None
            found[name] = module
    return found if _NOTHING.fullmatch(_IMPORT.sub("", source)) else None


class _Finder(MetaPathFinder):
    def __init__(self, top: str) -> None:
        self._top = top

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._top and not fullname.startswith(f"{self._top}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        is_package = spec is not None and spec.submodule_search_locations is not None
        if spec is not None and is_package and isinstance(spec.loader, InspectLoader):
            source = spec.loader.get_source(fullname)
            names = None if source is None else collected(source)
            if names is not None:
                spec.loader = _Collecting(spec.loader, names)
        return spec


class _Collecting(Loader):
    def __init__(self, loader: Loader, names: dict[str, str]) -> None:
        self._loader = loader
        self._names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        vars(module)["__getattr__"] = _getter(module, self._names)
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *self._names})


def _getter(module: ModuleType, names: dict[str, str]) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name in names:
            value = getattr(import_module(names[name], module.__name__), name)
            vars(module)[name] = value
            return value
        if name == "__all__":
            # Without it, `import *` takes what is there.
            for each in names:
                getattr(module, each)
        elif not name.startswith("_") and PathFinder.find_spec(f"{module.__name__}.{name}", module.__path__):
            # A module, which one of the names would have been imported from.
            return import_module(f"{module.__name__}.{name}")
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return get
