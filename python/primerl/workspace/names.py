"""Names of environment packages. Standard library only."""

from __future__ import annotations

import keyword
import re
import sys

from primerl.config.errors.fail import ConfigError

WORD = re.compile(r"[a-z]([a-z0-9]|[-_](?=[a-z0-9]))*")
TAKEN = {"datasets", "numpy", "primerl", "pytest", "tests", "torch", "transformers", "verifiers"}
"""Modules that environments import, or that are no package's own."""


def package(name: str) -> str:
    """Name of the package, with `-` between words; its module has `_` instead.

    Raises:
        ConfigError: It can name no Python package, or would hide another.
    """
    if "/" in name:
        raise ConfigError(f"{name!r} has an owner or a folder in it; give the name alone, and the folder as --path")
    found = name.strip().lower()
    if not WORD.fullmatch(found):
        raise ConfigError(
            f"{name!r} is no name of a package; use letters, digits and single dashes, a letter first, as in my-env"
        )
    module = module_of(found)
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module in TAKEN:
        raise ConfigError(f"{name!r} would hide Python's or a library's own {module!r}; choose another name")
    return found.replace("_", "-")


def module_of(package_name: str) -> str:
    return package_name.replace("-", "_")


def class_prefix(package_name: str) -> str:
    """`my-env` -> `MyEnv`"""
    return "".join(part.capitalize() for part in package_name.split("-"))
