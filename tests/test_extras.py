"""Optional dependencies: each import is declared, and what lacks an extra says which, and how to get it."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import primerl
import pytest
from primerl import cli
from primerl.process import extras
from primerl.process.extras import EXTRAS, MissingExtraError, explained, install_command, require

# Imported under another name than their distribution's.
DISTRIBUTIONS = {
    "dotenv": "python-dotenv",
    "pydantic_config": "prime-pydantic-config",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}
# They come with the distribution of the right, whoever installs them.
BROUGHT_BY = {
    "IPython": "ipykernel",
    "aiohttp": "verifiers",
    "datasets": "verifiers",
    "google": "tinker",
    "openai": "verifiers",
}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;! ]", name, maxsplit=1)[0]).lower()


@pytest.fixture(scope="module")
def declared(repository: Path) -> dict[str, set[str]]:
    """The distributions of each extra; of the base under the empty name."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {normalized(one) for one in wanted} for extra, wanted in groups.items()}


def imported(file: Path) -> Iterator[str]:
    """Top-level names of all absolute imports, wherever they are in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def test_every_import_is_declared(repository: Path, declared: dict[str, set[str]]) -> None:
    known = {*sys.stdlib_module_names, "primerl", *BROUGHT_BY, *EXTRAS}
    unknown = {
        (file.name, module)
        for file in (repository / "python" / "primerl").rglob("*.py")
        for module in imported(file)
        if module not in known and normalized(DISTRIBUTIONS.get(module, module)) not in declared[""]
    }
    assert not unknown, "add them to pyproject.toml, and those of an extra to primerl.process.extras.EXTRAS"


def test_each_extra_brings_its_modules(declared: dict[str, set[str]]) -> None:
    # transformers brings it.
    missing = {module for module, extra in EXTRAS.items() if normalized(module) not in declared[extra]} - {"tokenizers"}
    assert not missing
    assert not declared[""] & {normalized(module) for module in EXTRAS}
    assert {"train", "vllm", "wandb", "report", "data"} <= declared.keys()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module not in ("torch", "pip"))


@pytest.mark.usefixtures("without_torch")
def test_a_missing_module_is_named_with_its_extra_and_the_command() -> None:
    require("`primerl x`", "transformers")
    with pytest.raises(MissingExtraError, match="`primerl x` needs torch, which is not installed") as caught:
        require("`primerl x`", "transformers", "torch")
    assert caught.value.name == "torch"
    assert f"the extra `train` of primerl: {install_command('train')}" in str(caught.value)
    found = explained(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), "x")
    assert isinstance(found, MissingExtraError)


@pytest.mark.usefixtures("without_torch")
def test_other_missing_modules_stay_what_they_are() -> None:
    for name in ("my_project", "transformers.models.new", None):
        error = ModuleNotFoundError("no module", name=name)
        assert explained(error, "x") is error


class Installed:
    def __init__(self, origin: object) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.usefixtures("without_torch")
def test_the_command_names_what_primerl_was_installed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins = f"uv pip install --python {sys.executable}"
    wheel = tmp_path / "a folder" / "primerl-0.1.0-cp311-abi3-linux_x86_64.whl"
    wheel.parent.mkdir()
    origin: dict[str, object] = {"url": wheel.as_uri(), "archive_info": {}}
    declares = ["rich>=14", "wandb>=0.31 ; extra == 'wandb'", "vllm>=1 ; sys_platform == 'linux' and extra == 'vllm'"]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Installed(origin))
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: declares)
    # The file is gone.
    assert install_command("wandb") == f"{begins} 'wandb>=0.31'"
    assert install_command("vllm") == f"{begins} 'vllm>=1'"
    wheel.touch()
    assert install_command("wandb") == f"{begins} '{wheel}[wandb]'"
    origin = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    assert install_command("wandb") == f"{begins} -e '{tmp_path}[wandb]'"
    origin = {"url": "https://example.com/primerl.whl"}
    assert install_command("wandb") == f"{begins} 'wandb>=0.31'"

    def missing(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command("train", "torch") == f"{begins} torch"
    monkeypatch.setattr(extras, "is_installed", lambda _: True)
    assert install_command("train", "torch") == f"{sys.executable} -m pip install torch"


@pytest.mark.usefixtures("without_torch")
def test_a_command_ends_with_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name=arguments[1])

    monkeypatch.setattr(cli, "command", command)
    assert cli.main(["verify", "torch"]) == 2
    assert "error: `primerl verify` needs torch" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        cli.main(["verify", "my_project"])


@pytest.mark.usefixtures("without_torch")
def test_a_name_of_the_package_is_an_import_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "primerl.api", None)
    monkeypatch.delitem(vars(primerl), "Run", raising=False)
    monkeypatch.setattr(primerl, "_LAZY", {"Run": "primerl.api", "Other": "torch.not_there"})
    with pytest.raises(MissingExtraError, match=r"primerl\.Other needs torch"):
        _ = primerl.Other  # type: ignore[attr-defined]
    # Without the extra being what is missing.
    with pytest.raises(ModuleNotFoundError, match=r"primerl\.api"):
        _ = primerl.Run


def test_nothing_tells_to_install_by_the_bare_name(repository: Path) -> None:
    """The project of that name on the public index is not this one."""
    bare = re.compile(r"pip install (?:-\S+ )*[\"']?primerl\b(?![-\w]*\.whl|-\d)")
    files = subprocess.run(["git", "ls-files"], cwd=repository, check=True, capture_output=True, text=True).stdout
    for name in files.split():
        file = repository / name
        if file.suffix in (".md", ".py", ".rs", ".toml", ".js", ".html") and file != Path(__file__):
            found = bare.search(file.read_text())
            assert found is None, f"{name}: {found}"
