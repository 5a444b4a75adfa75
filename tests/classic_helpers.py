"""What tests of classic environments share: the interpreter that has their verifiers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = REPOSITORY / "tests" / "environments"
CLASSIC_VENV = REPOSITORY / ".venv-classic"
CLASSIC_PYTHON = CLASSIC_VENV / "bin" / "python"


def classic_python() -> Path:
    """The interpreter, which `make test` has made. Skips the test where there is none outside CI."""
    if not CLASSIC_PYTHON.exists() and "CI" not in os.environ:
        pytest.skip(f"there is no {CLASSIC_VENV.name}; `make .make/classic` makes it")
    if sys.version_info >= (3, 14):
        pytest.skip("classic verifiers is for Python below 3.14")
    return CLASSIC_PYTHON


def variables(folder: Path) -> dict[str, str]:
    """Of a process of that interpreter that finds `primerl` and the environments of the tests, and nothing of ours."""
    from primerl.launch.interpreters import lookup

    environment = {**os.environ, "PYTHONPATH": os.fspath(ENVIRONMENTS)}
    return lookup.variables(os.fspath(CLASSIC_PYTHON), folder / "package", environment)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [classic_python(), *arguments], env=variables(folder), capture_output=True, text=True, timeout=240, check=False
    )
