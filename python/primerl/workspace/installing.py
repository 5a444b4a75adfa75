"""Installs environments of a folder into the Python that runs primerl."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.launch.interpreters import virtualenvs
from primerl.workspace.names import module_of


@dataclass(frozen=True)
class Package:
    """One of a folder of environments."""

    name: str
    version: str
    folder: Path
    installed: bool
    """Whether this Python has it, in whatever version."""


def found(environments: Path) -> list[Package]:
    """The packages in a folder, by name; what is no package is omitted."""
    packages = []
    for file in sorted(environments.glob("*/pyproject.toml")):
        try:
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            name, version = str(project["name"]), str(project.get("version", "-"))
        except (OSError, ValueError, LookupError, TypeError):
            continue
        packages.append(Package(name, version, file.parent, is_installed(name)))
    return packages


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True


def folder_of(environments: Path, name: str) -> Path:
    """The folder of an environment: by the package's name in `environments`, or by its own path.

    Raises:
        ConfigError: There is none, or it is of a registry.
    """
    folder = environments / module_of(name.strip().lower()) if "/" not in name else Path(name)
    if (folder / "pyproject.toml").is_file():
        return folder
    if "/" in name and not folder.exists():
        raise ConfigError(
            f"{name} names a package of a registry, and primerl has no registry; get its source (`git clone`, or a "
            f"wheel) and give its folder, or `pip install` it into {sys.prefix}"
        )
    known = [one.name for one in found(environments)]
    there = f"there are {', '.join(known)}" if known else "`primerl env init NAME` writes one"
    raise ConfigError(f"there is no package {name!r} in {environments} (no {folder / 'pyproject.toml'}); {there}")


def install(environments: Path, name: str) -> None:
    """Raises ConfigError."""
    install_folder(folder_of(environments, name))


def install_folder(folder: Path, *, tool: str | None = None) -> None:
    """In place (editable). Raises ConfigError with what the installer said."""
    _run([*_installer("install", tool), "-e", os.fspath(folder)], f"installing {folder}")


def check_is_installed(name: str) -> None:
    """Raises ConfigError."""
    if not is_installed(name):
        raise ConfigError(f"{name} is not installed in {sys.prefix}; `primerl env list` shows what is")


def uninstall(name: str, *, tool: str | None = None) -> None:
    """Raises ConfigError."""
    command = _installer("uninstall", tool)
    _run([*command, *([] if os.path.basename(command[0]) == "uv" else ["-y"]), name], f"removing {name}")


def _installer(word: str, tool: str | None) -> list[str]:
    """The command, for this interpreter. Raises ConfigError."""
    uv = virtualenvs.uv_program()
    if tool == "uv" and uv is None:
        raise ConfigError("--with uv: uv is not there; `pip install uv`, or --with pip")
    if uv is not None and tool != "pip":
        return [uv, "pip", word, "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", word, "--quiet"]


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:
        raise ConfigError(f"{what} failed: {command[0]} cannot be run: {error}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-600:]
        raise ConfigError(f"{what} failed ({' '.join(command)}, exit code {done.returncode}): {said}")
