"""Which generation of verifiers an environment was written for, and whether it can be run by this interpreter.

    v1        `__all__` of the module holds a `verifiers.v1` taskset       verifiers 0.4      `adapter`
    classic   the module has a function `load_environment`                verifiers < 0.4    `classic`

The two cannot be installed side by side: an environment of the other generation needs an interpreter of its own. What
is registered as an entry point in `primerl.environments` is asked first, and needs no verifiers.
Standard library only, until verifiers itself is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Literal, cast

from primerl.envs import exits, versions
from primerl.envs.generations import deferred
from primerl.envs.interface import EnvironmentRefusedError, Generation, OutsideGeneration, module_name
from primerl.process import plugins
from primerl.process.extras import described

Name = Literal["v1", "classic"]
REQUIREMENTS: dict[Name, str] = {"v1": "verifiers>=0.4,<0.5", "classic": "verifiers>=0.1.14,<0.4"}
BOUNDS: dict[Name, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "v1": ((0, 4), (0, 5)),
    "classic": ((0, 1, 14), (0, 4)),
}
MODULES: dict[Name, str] = {"v1": "primerl.envs.generations.v1", "classic": "primerl.envs.generations.classic"}
GROUP = "primerl.environments"
TASKSETS = "verifiers.v1.tasksets"
OWN = "give it an interpreter of its own: a table `python` with `requirements` or `path` (docs/environments.md)"


def installed() -> Name:
    """The generation that this interpreter's verifiers is of. Raises EnvironmentRefusedError where it has none, or of a
    version that is not supported."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentRefusedError(
            f"verifiers is not installed for {sys.executable}; install {REQUIREMENTS['v1']} there "
            f"({described('envs', REQUIREMENTS['v1'])}), or {REQUIREMENTS['classic']} for classic environments"
        ) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
    for name, (oldest, first_too_new) in BOUNDS.items():
        if oldest <= numbers < first_too_new:
            return name
    raise EnvironmentRefusedError(
        f"verifiers {version} of {sys.executable} is not supported; install {REQUIREMENTS['v1']} there, or "
        f"{REQUIREMENTS['classic']} for classic environments"
    )


def prepare() -> None:
    """Imports what all environments of this interpreter need. Raises EnvironmentRefusedError if none can be run."""
    try:
        prepared(installed())
    except EnvironmentRefusedError:
        if not plugins.names(GROUP, {}):
            raise


def prepared(name: Name) -> Generation:
    """The adapter of the installed generation; verifiers is imported."""
    with deferred.unused_libraries():
        generation = cast(Generation, import_module(MODULES[name]))
    generation.prepare()
    return generation


def chosen(environment_id: str) -> Generation:
    """The adapter for this environment.

    Raises:
        EnvironmentRefusedError: verifiers is missing, the environment is of the generation that is not installed, or
            another version of it is than its id asks for.
    """
    outside = claimed(environment_id)
    if outside is not None:
        outside.prepare()
        return outside
    try:
        return _own(environment_id)
    except EnvironmentRefusedError as error:
        # It may be of a generation that cannot be imported.
        raise EnvironmentRefusedError("; ".join([str(error), *unusable()]), *error.keys) from error.__cause__


def _own(environment_id: str) -> Generation:
    has = installed()
    generation = prepared(has)
    needs = wanted(environment_id, has)
    if needs is not None and needs != has:
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} is {_described(needs)} and needs {REQUIREMENTS[needs]}, but "
            f"{sys.executable} has verifiers {importlib.metadata.version('verifiers')}; {OWN}"
        )
    versions.check(environment_id)
    return generation


def claimed(environment_id: str) -> OutsideGeneration | None:
    """The generation of another package that the environment is of, if any. One that cannot be imported claims nothing:
    it may have nothing to do with this environment (`unusable` lists those)."""
    for outside in _outside()[0]:
        if outside.claims(environment_id):
            return outside
    return None


def unusable() -> list[str]:
    """What is wrong with generations of other packages that cannot be imported."""
    return _outside()[1]


def _outside() -> tuple[list[OutsideGeneration], list[str]]:
    found, problems = [], []
    for name in plugins.names(GROUP, {}):
        try:
            found.append(cast(OutsideGeneration, plugins.find(GROUP, name, {})))
        except plugins.PluginError as error:
            problems.append(str(error))
    return found, problems


def wanted(environment_id: str, has: Name) -> Name | None:
    """The generation that the module is of; None if loading it will tell what is wrong with it."""
    name = module_name(environment_id)
    try:
        module = _module(name, has)
    except Exception as error:
        if isinstance(error, AttributeError | ImportError) and "'verifiers" in str(error):
            # Classic modules fail at the first name that 0.4 has no more.
            return "classic" if has == "v1" else None
        if isinstance(error, ModuleNotFoundError) and error.name in (name, f"{TASKSETS}.{name}"):
            return None
        if isinstance(error, ImportError):
            raise exits.not_imported(environment_id, error) from error
        cause = exits.innermost(error)
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} cannot be loaded: {exits.told(cause)}{exits.place(cause)}"
        ) from error
    if _has_taskset(module):
        return "v1"
    if callable(getattr(module, "load_environment", None)):
        return "classic"
    if has == "v1":
        return None
    raise EnvironmentRefusedError(
        f"environment {environment_id!r}: its module {module.__name__} has neither a function `load_environment` nor a "
        "v1 taskset in `__all__`, so it is no environment"
    )


def _described(name: Name) -> str:
    return "a v1 environment (its module has a taskset)" if name == "v1" else "classic (`load_environment`)"


def _module(name: str, has: Name) -> ModuleType:
    # As verifiers of each generation looks for it.
    if has == "v1" and ships(TASKSETS, name):
        return import_module(f"{TASKSETS}.{name}")
    return import_module(name)


def ships(package: str, name: str) -> bool:
    """Whether this package of verifiers has such a module. The package is not imported: all of its modules would be."""
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        return False
    return PathFinder.find_spec(f"{package}.{name}", found.submodule_search_locations) is not None


def _has_taskset(module: ModuleType) -> bool:
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", [])]
    classes = [one for one in exported if isinstance(one, type)]
    if not classes or not any(base.__module__.startswith("verifiers.v1.") for one in classes for base in one.__mro__):
        return False
    taskset = import_module("verifiers.v1.taskset").Taskset
    return any(issubclass(one, taskset) for one in classes)
