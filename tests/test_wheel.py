"""The wheel and the sdist: what is in them, and that the wheel works where there is neither a checkout nor cargo.

`make wheel` builds them once for this file, from the extension that the other tests have. They are installed into
empty virtualenvs, with the pinned versions, from uv's cache: what `make build` has installed is linked, not copied.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.message import Message
from pathlib import Path

import pytest
from end_to_end import steps_of, until
from packaging.specifiers import SpecifierSet
from primerl import run_key
from run_helpers import write_run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes and sizes as Linux has them"),
]
UV = Path(sys.executable).with_name("uv")
BASE_MB = 200
START_S = 180.0


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # A release where there is one: it would take minutes.
    is_release = (repository / ".make" / "extension").exists()
    kind = "--release" if is_release else "--features testing"
    command = ["make", "wheel", f"DIST={folder}", f"WHEEL={kind}"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("primerl-*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_is_for_every_supported_python_and_holds_the_package_only(repository: Path, wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        licences = [archive.read(name) for name in files if name.endswith(".dist-info/licenses/LICENSE")]
    assert licences == [(repository / "LICENSE").read_bytes()]
    assert {"primerl/py.typed", "primerl/_core.pyi", "primerl/_core.abi3.so"} <= files
    package = repository / "python"
    sources = {os.fspath(file.relative_to(package)) for file in (package / "primerl").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {"primerl"}


def test_the_metadata_says_what_an_index_shows(repository: Path, metadata: Message) -> None:
    manifest = tomllib.loads((repository / "Cargo.toml").read_text())["workspace"]["package"]
    assert (metadata["Name"], metadata["Version"]) == ("primerl", manifest["version"])
    assert metadata["License-Expression"] == manifest["license"]
    assert metadata["License-File"] == "LICENSE"
    assert "Apache License" in (repository / "LICENSE").read_text()
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(project["requires-python"])
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert str(metadata.get_payload()).startswith("# primerl")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(
        metadata.get_all("Classifier", [])
    )
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert urls["Repository"] == manifest["repository"]
    assert all(url.startswith(manifest["repository"]) for url in urls.values())
    assert {"train", "vllm", "wandb", "report", "data"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_sdist_has_what_compiling_it_needs(built: Path, tmp_path: Path) -> None:
    [file] = built.glob("primerl-*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "PKG-INFO", "Cargo.lock", "pyproject.toml"} <= {
        each.name for each in folder.iterdir()
    }
    # Every path of a manifest leads to a crate, and the lock file holds for them.
    command = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    members = {package["name"] for package in json.loads(done.stdout)["packages"] if package["source"] is None}
    assert "primerl-py" in members
    assert not (folder / "tests").exists()


@dataclass(frozen=True)
class Installed:
    """A virtualenv that was empty, and a folder outside the checkout to call its programs from."""

    python: Path
    folder: Path
    variables: dict[str, str]

    def primerl(self, *arguments: str) -> list[str]:
        return [os.fspath(self.python.with_name("primerl")), *arguments]

    def call(self, *arguments: str, code: int = 0) -> str:
        """All that a command of the package prints."""
        return self.run(self.primerl(*arguments), code)

    def evaluate(self, program: str, code: int = 0) -> str:
        return self.run([os.fspath(self.python), "-c", program], code)

    def run(self, command: list[str], code: int) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=START_S
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, output: Path, *arguments: str) -> subprocess.Popen[str]:
        with output.open("w") as file:
            return subprocess.Popen(
                self.primerl(*arguments),
                cwd=self.folder,
                env=self.variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )


def install(repository: Path, root: Path, *requirements: str) -> Installed:
    environment, folder = root / "venv", root / "elsewhere"
    folder.mkdir()
    python = environment / "bin" / "python"
    pins = os.fspath(repository / "constraints.txt")
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "UV_PYTHON")}
    for command in (
        ["venv", "--quiet", "--python", sys.executable, os.fspath(environment)],
        [
            "pip",
            "install",
            "--quiet",
            "--offline",
            "--python",
            os.fspath(python),
            "-c",
            pins,
            "-b",
            pins,
            *requirements,
        ],
    ):
        done = subprocess.run([UV, *command], cwd=root, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    # Neither cargo nor this environment's programs.
    paths = [path for path in ("/usr/local/bin", "/usr/bin", "/bin") if shutil.which("cargo", path=path) is None]
    state = {"PRIMERL_STATE_DIR": os.fspath(root / "state"), "HOME": os.fspath(folder), "OMP_NUM_THREADS": "1"}
    return Installed(python, folder, {"PATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **state})


@pytest.fixture(scope="module")
def base(repository: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(repository, tmp_path_factory.mktemp("base"), os.fspath(wheel))


HELP = """
from primerl.cli import COMMANDS, main
for name in COMMANDS:
    try:
        code = main([name, "--help"])
    except SystemExit as end:
        code = end.code
    assert not code, name
"""


def test_every_command_has_its_help_in_the_base(base: Installed) -> None:
    said = base.evaluate(HELP)
    assert "primerl sft" in said


def test_the_base_is_small_and_has_neither_torch_nor_transformers(base: Installed) -> None:
    assert "env-worker" in base.call("--help")
    assert base.evaluate("import primerl; print(primerl.__version__, primerl.__file__)").startswith("0.")
    absent = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'verifiers') if u.find_spec(m)])"
    assert base.evaluate(absent).strip() == "[]"
    installed = base.python.parents[1] / "lib"
    size = sum(file.stat().st_size for file in installed.rglob("*") if file.is_file())
    assert size < BASE_MB * 1e6, f"{size / 1e6:.0f} MB"


def test_what_the_base_lacks_is_named_with_its_extra_and_the_command(base: Installed, wheel: Path) -> None:
    file = write_run(base.folder)
    (base.folder / "finished" / "spool").mkdir(parents=True)
    sft = 'output_dir = "sft"\nmax_steps = 1\n[model]\npath = "tiny"\n[data]\npath = "rows.jsonl"\n'
    (base.folder / "sft.toml").write_text(sft)
    command = f"uv pip install --python {base.python} '{wheel}[train]'"
    for arguments in (["rl", "@", file.name], ["sft", "@", "sft.toml"], ["verify", "finished"]):
        said = base.call(*arguments, code=2)
        assert f"error: `primerl {arguments[0]}` needs torch, which is not installed" in said
        assert f"the extra `train` of primerl: {command}" in said
    assert not (base.folder / "outputs").exists()
    assert not (base.folder / "sft").exists()
    said = base.evaluate("import primerl; primerl.Run", code=1)
    assert "primerl.process.extras.MissingExtraError: primerl.Run needs torch" in said
    assert command in said
    said = base.run([os.fspath(base.python), "-m", "primerl.envs.check", "reverse-text"], 2)
    assert f"verifiers is not installed for {base.python}" in said
    assert f"the extra `envs` of primerl: {command.replace('[train]', '[envs]')}" in said


@pytest.fixture(scope="module")
def trained(repository: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    example = os.fspath(repository / "examples" / "reverse-text")
    return install(repository, tmp_path_factory.mktemp("train"), f"{wheel}[train]", example)


@pytest.fixture(scope="module")
def worker(repository: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The base and an environment, whose package brings verifiers."""
    example = os.fspath(repository / "examples" / "reverse-text")
    return install(repository, tmp_path_factory.mktemp("worker"), os.fspath(wheel), example)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


@pytest.mark.end_to_end
def test_three_steps_of_rl_with_an_env_worker_of_the_base(
    trained: Installed, worker: Installed, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    file, output, said = write_run(tmp_path), tmp_path / "run", tmp_path / "said"
    changes = {
        "--model.path": os.fspath(tmp_path / "tiny"),
        "--output-dir": os.fspath(output),
        "--max-steps": "3",
        "--orchestrator.train.env.0.num-workers": "0",
    }
    launcher = trained.start(said, "rl", "@", os.fspath(file), *[word for pair in changes.items() for word in pair])
    processes.append(launcher)
    address = output / "run" / "orchestrator.json"
    until(lambda: address.exists() or launcher.poll() is not None, START_S, "the orchestrator")
    assert address.exists(), said.read_text()
    url = json.loads(address.read_text())["url"]
    assert worker.evaluate("import importlib.util; print(importlib.util.find_spec('torch'))").strip() == "None"
    worker = replace(worker, variables={**worker.variables, run_key.VARIABLE: str(run_key.run_key(output))})
    joined = worker.start(tmp_path / "joined", "env-worker", "--join", url, "--env", "reverse-text")
    processes.append(joined)
    assert launcher.wait(START_S) == 0, said.read_text()
    assert joined.wait(START_S) == 0, (tmp_path / "joined").read_text()
    assert steps_of(output) == [1, 2, 3]
    assert (output / "weights" / "step_3" / "model.safetensors").exists()
