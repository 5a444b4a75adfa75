"""Optional dependencies: which extra of the package brings which module, and the command that installs it.

The base install is what a client and an env worker need. Standard library only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

EXTRAS = {
    "datasets": "data",
    "httpx": "tinker",
    "huggingface_hub": "train",
    "jinja2": "train",
    "matplotlib": "report",
    "numpy": "train",
    "peft": "train",
    "plotext": "report",
    "pyarrow": "prime",
    "ray": "cluster",
    "starlette": "tinker",
    "tinker": "tinker",
    "tokenizers": "train",
    "torch": "train",
    "transformers": "train",
    "uvicorn": "tinker",
    "verifiers": "envs",
    "vllm": "vllm",
    "wandb": "wandb",
    "zstandard": "tinker",
}
"""The extra that brings each top-level module."""


class MissingExtraError(ModuleNotFoundError):
    """The message names what is missing, the extra that brings it, and the command that installs the extra."""

    def __init__(self, module: str, wanted_by: str) -> None:
        extra = EXTRAS[module]
        super().__init__(
            f"{wanted_by} needs {module}, which is not installed; it comes with {described(extra, module)}",
            name=module,
        )


def require(wanted_by: str, *modules: str) -> None:
    """Raises MissingExtraError for the first of `modules` that is not installed. Imports none of them."""
    for module in modules:
        if not is_installed(module):
            raise MissingExtraError(module, wanted_by)


def explained(error: ModuleNotFoundError, wanted_by: str) -> ModuleNotFoundError:
    """The error itself, unless an extra brings the missing module."""
    if isinstance(error, MissingExtraError):
        return error
    module = (error.name or "").partition(".")[0]
    # A submodule may be missing from a package that is there: no extra fixes that.
    if module not in EXTRAS or is_installed(module):
        return error
    return MissingExtraError(module, wanted_by)


def is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def described(extra: str, module: str | None = None) -> str:
    """For a message: the extra by its name, with the command that installs it."""
    return f"the extra `{extra}` of primerl: {install_command(extra, module)}"


def install_command(extra: str, module: str | None = None) -> str:
    """For this interpreter: from where primerl was installed, else the extra's requirements by themselves.

    primerl is on no package index, and the name there is not ours.

    Args:
        module: The requirement to install where primerl runs without having been installed.
    """
    python = shlex.quote(sys.executable)
    pip = f"{python} -m pip install" if is_installed("pip") else f"uv pip install --python {python}"
    return f"{pip} {_source(extra) or shlex.join(_requirements(extra) or [module or extra])}"


def _source(extra: str) -> str | None:
    """The folder or wheel that primerl was installed from, where it is still there."""
    try:
        origin = json.loads(metadata.distribution("primerl").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = urlsplit(str(origin.get("url", "")))
    path = Path(unquote(url.path))
    if url.scheme != "file" or not path.exists():
        return None
    if origin.get("dir_info", {}).get("editable"):
        return f"-e {shlex.quote(f'{path}[{extra}]')}"
    return shlex.quote(f"{os.fspath(path)}[{extra}]")


def _requirements(extra: str) -> list[str]:
    try:
        declared = metadata.requires("primerl") or []
    except metadata.PackageNotFoundError:
        return []
    found = [requirement.partition(";") for requirement in declared]
    return [name.strip() for name, _, marker in found if re.search(rf"""extra\s*==\s*["']{extra}["']""", marker)]
