"""The version that an environment's id asks for is the one that is installed, or it is refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from primerl.envs import check, versions
from primerl.envs.generations import choice
from primerl.envs.interface import EnvironmentRefusedError

HERE = metadata.version("reverse-text")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose module has another name than itself, of a version with a build of its own."""
    info = tmp_path / "odd_name-1.2.0+gpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-name\nVersion: 1.2.0+gpu\n")
    (info / "top_level.txt").write_text("odd_module\n")
    (tmp_path / "odd_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "environment_id",
    [
        "reverse-text",
        "owner/reverse-text",
        f"owner/reverse-text@{HERE}",
        f"Reverse_Text@v{HERE}",
        "reverse-text@latest",
    ],
)
def test_what_is_installed_is_taken(environment_id: str) -> None:
    versions.check(environment_id)
    assert versions.remark(environment_id) is None


@pytest.mark.usefixtures("odd")
def test_versions_are_compared_by_meaning() -> None:
    for same in ("1.2.0+gpu", "1.2.0", "1.2", "v1.2"):
        versions.check(f"owner/odd-module@{same}")
    for other in ("1.2.1", "1.20", "2", "1.2.0+cpu"):
        with pytest.raises(EnvironmentRefusedError, match=rf"asks for version {other.replace('+', '.')}, and"):
            versions.check(f"owner/odd-module@{other}")


def test_another_version_is_refused_where_it_is_loaded() -> None:
    for environment_id in ("owner/reverse-text@9.9.9", "reverse-text@0"):
        with pytest.raises(EnvironmentRefusedError, match=f"has reverse-text {HERE}; install"):
            choice.chosen(environment_id)


@pytest.mark.usefixtures("odd")
def test_a_check_refuses_it_and_says_what_it_cannot_tell() -> None:
    wrong = check.check_environment("reverse-text@9.9.9", {"taskset": {"num_examples": 4}})
    assert wrong.problem is not None
    assert "9.9.9" in wrong.problem
    assert HERE in wrong.problem
    # A module that somebody has put onto the path.
    assert versions.installed("no-package") is None
    versions.check("no-package@1.0")
    assert "whether it is 1.0 is not known" in str(versions.remark("no-package@1.0"))
