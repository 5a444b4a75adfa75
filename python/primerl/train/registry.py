"""Implementations of a protocol (policy losses, optimizers), found by name.

A registry knows the name of a function. An implementation is a dataclass `Options`, what may be set, with an optional
`check()` that raises ValueError, and that function, which takes the options last. `type` in a config names it:

    `dppo`               a file of the package, such as `primerl/train/losses/dppo.py`: nothing else lists it
    `huber`              an entry point of an installed distribution, in the registry's group
    `my_project:huber`   `huber` in the module `my_project`: a submodule or class with both, or the function itself in a
                         module that has `Options`

Imports no torch, so a config is checked without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from primerl.process import plugins
from primerl.process.import_path import ImportFailedError, import_by_path
from primerl.process.setting_checks import from_mapping
from primerl.train.settings import ConfigError


@dataclass(frozen=True, slots=True)
class Implementation:
    options: type
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Registry:
    package: str
    """Its modules are the built-in implementations."""
    group: str
    """Entry points of other distributions."""
    function: str
    """Name of the function that an implementation has besides `Options`."""

    def built_in(self) -> list[str]:
        folder = Path(__file__).parent / self.package.rpartition(".")[2]
        return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))

    def find(self, kind: str, where: str) -> Implementation:
        """Raises ConfigError; `where` is the dotted prefix of `type` in its message."""
        if kind in self.built_in():
            return self._checked(import_module(f"{self.package}.{kind}"), kind, where)
        if ":" in kind:
            return self._imported(kind, kind, where)
        if point := plugins.entry_point(self.group, kind):
            return self._imported(f"{point.module}:{point.attr or ''}", kind, where)
        names = ", ".join(map(repr, plugins.names(self.group, self.built_in())))
        raise ConfigError(f"{where}type is {kind!r}; it must be one of {names}", f"{where}type")

    def options(self, kind: str, args: dict[str, Any], where: str) -> Any:
        """The implementation's `Options` with `args` set, checked. Raises ConfigError."""
        return _options(self.find(kind, where).options, args, where)

    def load(self, kind: str, args: dict[str, Any], where: str) -> tuple[Callable[..., Any], Any]:
        """The function and its checked options. Raises ConfigError."""
        found = self.find(kind, where)
        return found.function, _options(found.options, args, where)

    def _imported(self, path: str, kind: str, where: str) -> Implementation:
        """`path`: a module, or `module:name`."""
        module, _, name = path.partition(":")
        try:
            owner: Any = import_by_path(module)
            found = getattr(owner, name, None) if name else owner
            if found is None:
                found = import_by_path(f"{module}.{name}")
        except ImportFailedError as error:
            raise ConfigError(f"{where}type is {kind!r}: {error}", f"{where}type") from error
        if callable(found) and not isinstance(found, type) and not hasattr(found, "Options"):
            return self._checked(owner, kind, where, found)
        return self._checked(found, kind, where)

    def _checked(self, owner: Any, kind: str, where: str, function: Callable[..., Any] | None = None) -> Implementation:
        options: Any = getattr(owner, "Options", None)
        function = function or getattr(owner, self.function, None)
        if not (isinstance(options, type) and dataclasses.is_dataclass(options) and callable(function)):
            name = getattr(owner, "__name__", kind)
            raise ConfigError(
                f"{where}type is {kind!r}, but {name} has not both a dataclass `Options` and a function "
                f"`{self.function}`; see {self.package}",
                f"{where}type",
            )
        return Implementation(options, function)


def _options(kind: type, args: dict[str, Any], where: str) -> Any:
    try:
        options: Any = from_mapping(kind, args, f"{where}args.")
    except ValueError as error:
        raise ConfigError.like(error) from None
    for name, hint in get_type_hints(kind).items():
        value = getattr(options, name, None)
        if hint in (float, float | None) and value is not None and not abs(value) < float("inf"):
            raise ConfigError(f"{where}args.{name} is {value}; it must be finite", f"{where}args.{name}")
    if hasattr(options, "check"):
        try:
            options.check()
        except ValueError as error:
            # An implementation of others, too, begins with the option's name.
            names = [name for name in get_type_hints(kind) if str(error).startswith((f"{name} ", f"{name}: "))]
            own = [f"{where}args.{name}" for name in names]
            raise ConfigError(f"{where}args.{error}", *own) from error
    return options
