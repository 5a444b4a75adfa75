"""What is shipped: pinned packages, entry points, and the promises of the layout."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, object]:
    return dict(tomllib.loads((repository / "pyproject.toml").read_text())["project"])


def pinned(repository: Path) -> set[str]:
    found = re.findall(r"^([a-z0-9._-]+)==", (repository / "constraints.txt").read_text(), re.MULTILINE)
    return {name.replace("_", "-") for name in found}


def test_every_dependency_is_pinned_with_a_hash(repository: Path, project: dict[str, object]) -> None:
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    # vLLM pins other versions of torch and transformers; Ray has to be the cluster's.
    pinned_extras = [extra for name, extra in extras.items() if name not in ("vllm", "cluster")]
    wanted = [*project["dependencies"], *(each for extra in pinned_extras for each in extra)]  # type: ignore[misc]
    names = {re.split(r"[\[<>=;! ]", requirement, maxsplit=1)[0] for requirement in wanted}
    assert names <= pinned(repository)
    text = (repository / "constraints.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all("--hash=sha256:" in entry for entry in entries)


def test_constraints_hold_no_addresses(repository: Path) -> None:
    text = (repository / "constraints.txt").read_text()
    assert "://" not in text
    assert "index-url" not in text


@pytest.mark.processes
def test_entry_points_exist(project: dict[str, object]) -> None:
    scripts = project["scripts"]
    assert isinstance(scripts, dict)
    assert set(scripts) == {"primerl", "primerl-orchestrate"}
    for name in scripts:
        program = Path(sys.executable).with_name(name)
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert "--config" in done.stdout or "COMMAND" in done.stdout


@pytest.mark.processes
def test_the_wheels_orchestrator_has_the_native_binarys_options(repository: Path) -> None:
    program = Path(sys.executable).with_name("primerl-orchestrate")
    done = subprocess.run([program, "--help"], check=True, capture_output=True, text=True, timeout=180)
    assert done.stdout == (repository / "rust/primerl-orchestrator/tests/help.txt").read_text()


@pytest.mark.processes
def test_trainer_needs_no_config_library_and_no_extension(repository: Path) -> None:
    """It also runs on a machine that has nothing but torch and transformers."""
    code = """
import sys
import primerl.train.loop.rl
import primerl.train.loop.sft
heavy = {"datasets", "rich"}
found = {"pydantic_config", "verifiers", "primerl._core", "primerl.config", "aiohttp", *heavy} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.processes
def test_core_knows_no_runtime_and_no_python(repository: Path) -> None:
    command = ["cargo", "tree", "--locked", "-p", "primerl-core", "-e", "normal", "--prefix", "none"]
    tree = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True, timeout=180).stdout
    names = {line.split()[0] for line in tree.splitlines() if line}
    assert "primerl-core" in names
    assert not names & {"tokio", "pyo3", "axum", "reqwest"}


def test_documents_name_files_that_exist(repository: Path) -> None:
    for document in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        text = (repository / document).read_text()
        for path in re.findall(r"\b(?:examples|docs|benches|rust|python|tests)/[\w./-]*\w", text):
            # Also one that a folder named before it holds.
            assert (repository / path).exists() or list(repository.glob(f"rust/*/{path}")), f"{document}: {path}"
