"""Parts of which there is one file a kind (losses, optimizers): found by their name, set by their `Options`."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any, get_type_hints

from primerl.train.settings import ConfigError
from primerl.typed import from_mapping


def module_of(package: str, path: Iterable[str], kind: str, where: str) -> ModuleType:
    """Module `kind` of the package. Raises ConfigError for one that is not there."""
    names = sorted(module.name for module in pkgutil.iter_modules(list(path)) if not module.name.startswith("_"))
    if kind not in names:
        raise ConfigError(f"{where}type is {kind!r}; it must be one of {', '.join(map(repr, names))}")
    return import_module(f"{package}.{kind}")


def options_of(module: ModuleType, args: dict[str, Any], where: str) -> Any:
    """The module's `Options` with `args` set, checked. Raises ConfigError."""
    try:
        options = from_mapping(module.Options, args, f"{where}args.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for field in dataclasses.fields(options):
        if get_type_hints(module.Options)[field.name] in (float, float | None):
            value = getattr(options, field.name)
            if value is not None and not abs(value) < float("inf"):
                raise ConfigError(f"{where}args.{field.name} is {value}; it must be finite")
    if hasattr(options, "check"):
        try:
            options.check()
        except ValueError as error:
            raise ConfigError(f"{where}args.{error}") from error
    return options
