"""Files and modules that docs/architecture.md names exist, and it and CONTRIBUTING.md name every crate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]+\.(rs|py)")
MODULE = re.compile(r"[a-z_]+(::\w+)+")


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def crates(repository: Path) -> dict[str, Path]:
    """By short name: the crate's folder."""
    manifests = (repository / "rust").glob("primerl-*/Cargo.toml")
    return {path.parent.name.removeprefix("primerl-"): path.parent for path in manifests}


def is_file(name: str, repository: Path, crates: dict[str, Path]) -> bool:
    """A path from a crate's `src` after its short name, or in the orchestrator; of Python, the end of a path."""
    if name.endswith(".py"):
        files = [path.as_posix() for path in (repository / "python").rglob("*.py")]
        return any(path.endswith(f"/{name}") for path in files) or (repository / name).exists()
    crate, _, rest = name.partition("/")
    own = crates["orchestrator"]
    places = [repository / name, own / "src" / name, own / name]
    places += [crates[crate] / "src" / rest] if crate in crates else []
    return any(path.exists() for path in places)


def is_module(name: str, crates: dict[str, Path]) -> bool:
    """A module, or an item of one, after a crate's name or in the core or the orchestrator."""
    parts = name.split("::")
    crate = parts[0].removeprefix("primerl_").replace("_", "-")
    places = [(crates[crate], parts[1:])] if crate in crates else []
    places += [(crates[other], parts) for other in ("core", "orchestrator")]
    for folder, path in places:
        for end in (len(path), len(path) - 1):
            module = folder.joinpath("src", *path[:end])
            if end and (module.is_dir() or module.with_suffix(".rs").exists()):
                return True
    return False


def test_named_files_and_modules_exist(page: str, repository: Path, crates: dict[str, Path]) -> None:
    named = set(IN_BACKTICKS.findall(page))
    files = {name for name in named if FILE.fullmatch(name)}
    modules = {name for name in named if MODULE.fullmatch(name)}
    assert len(files) > 50
    assert len(modules) > 20
    assert not {name for name in files if not is_file(name, repository, crates)}
    assert not {name for name in modules if not is_module(name, crates)}


def test_each_crate_is_named(page: str, repository: Path, crates: dict[str, Path]) -> None:
    contributing = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not {name for name in crates if f"`primerl-{name}`" not in page}
    assert not {name for name in crates if f"`rust/primerl-{name}`" not in contributing}


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("engines/health.rs", True),
        ("driver/mod.rs", True),
        ("agent.py", True),
        ("engines/heath.rs", False),
        ("nowhere.py", False),
    ],
)
def test_files_are_looked_up(name: str, exists: bool, repository: Path, crates: dict[str, Path]) -> None:
    assert is_file(name, repository, crates) is exists


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("engines::health", True),
        ("core::config::Changes", True),
        ("primerl_core::conversation", True),
        ("gateway::nothing", False),
        ("gone::module", False),
    ],
)
def test_modules_are_looked_up(name: str, exists: bool, crates: dict[str, Path]) -> None:
    assert is_module(name, crates) is exists
