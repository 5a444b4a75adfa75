"""Which version of an environment's package this interpreter has, and whether it is the one that an id asks for, as in
`owner/name@1.2`. Standard library only."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from primerl.envs.interface import EnvironmentRefusedError, module_name

_SEPARATOR = re.compile(r"[-_.]+")
# Whatever is installed, as nothing is installed by itself.
ANY = ("", "latest")


def package(environment_id: str) -> str:
    """`owner/My_env@1.2` -> `my-env`."""
    name = environment_id.rsplit("/", 1)[-1].split("@", 1)[0]
    return _SEPARATOR.sub("-", name).lower()


def installed(environment_id: str) -> str | None:
    """The version of the environment's package; None where it is not installed as one."""
    return version_of(package(environment_id)) or _version_of_module(module_name(environment_id))


def check(environment_id: str) -> None:
    """Raises EnvironmentRefusedError where another version is installed than the id asks for."""
    asked, found = _asked(environment_id), installed(environment_id)
    if asked is not None and found is not None and not _same(asked, found):
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} asks for version {asked}, and {sys.executable} has "
            f"{package(environment_id)} {found}; install {asked} there, or leave `@{asked}` out of the id"
        )


def remark(environment_id: str) -> str | None:
    """What its user should know of an environment that can be loaded: that its version is unknown."""
    asked = _asked(environment_id)
    if asked is None or installed(environment_id) is not None:
        return None
    return f"environment {environment_id!r}: whether it is {asked} is not known, as it is not installed as a package"


def _asked(environment_id: str) -> str | None:
    asked = environment_id.partition("@")[2]
    return None if asked in ANY else asked


def _same(asked: str, found: str) -> bool:
    """`v1.0` is 1.0.0, and a build of it (`1.0+local`) is one too."""
    return _plain(asked) == _plain(found if "+" in asked else found.split("+")[0])


def _plain(version: str) -> str:
    return re.sub(r"(\.0)+(?=$|\+)", "", version.lower().removeprefix("v"))


def version_of(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _version_of_module(module: str) -> str | None:
    """The version of a package whose own name is another one."""
    owners = metadata.packages_distributions().get(module, [])
    return version_of(owners[0]) if owners else None
