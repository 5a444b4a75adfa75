"""`primerl lab setup` and `primerl env`: what they write, and never write over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from eval_endpoint import KEY, Endpoint, serving
from primerl.cli import gepa, main
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted import HostedConfig, compile_hosted
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.evals import endpoints, published_file
from primerl.launch.preflight.environments import check_installed
from primerl.models.tiny import TinyConfig, write_model
from primerl.workspace import configs, names, writing
from run_helpers import told


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def uncommented(text: str) -> str:
    """With the keys that are commented out; a sibling of the active model stays a comment."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("model ="))
    kept = [line for line in lines[start:] if not line.startswith(("# model =", "# endpoint_id ="))]
    return "\n".join(line.removeprefix("# ") for line in kept)


def test_nothing_that_is_there_is_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "configs" / "rl").mkdir(parents=True)
    (folder / "configs" / "rl" / "qwen-3.toml").write_text("mine\n", encoding="utf-8")
    (folder / "AGENTS.md").symlink_to("elsewhere")
    said = told("lab", "setup", "--skip-install", capsys=capsys)
    assert "kept configs/rl/qwen-3.toml, which is there already\n" in said
    assert "kept AGENTS.md" in said
    first = contents(folder)
    assert first["configs/rl/qwen-3.toml"] == b"mine\n"
    assert said.count("wrote ") == len(first) - 1
    told("lab", "setup", "--skip-install", capsys=capsys)
    assert contents(folder) == first
    assert not (folder / "elsewhere").exists()


def test_a_file_in_the_way_is_named_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "configs").write_text("", encoding="utf-8")
    said = told("lab", "setup", "--skip-install", code=2, capsys=capsys)
    assert "configs is a file, and configs/" in said
    assert said.count("\n") == 2
    assert contents(folder).keys() == {"configs"}
    assert "has no word 'tidy'; there is `primerl lab setup`" in told("lab", "tidy", code=2, capsys=capsys)


def test_the_configs_are_sound_with_and_without_their_comments(folder: Path) -> None:
    writing.write_missing(folder, configs.files(full_form=False, guidance=True))
    writing.write_missing(folder, configs.files(full_form=True, guidance=True))
    for file in (folder / "configs" / "rl").glob("*.toml"):
        for text in (file.read_text(encoding="utf-8"), uncommented(file.read_text(encoding="utf-8"))):
            RLConfig.model_validate(compile_hosted(HostedConfig.model_validate(tomllib.loads(text))))
    full = (folder / "configs" / "prime-rl" / "sums.toml").read_text(encoding="utf-8")
    RLConfig.model_validate(tomllib.loads(full))
    for file in (folder / "configs" / "eval").glob("*.toml"):
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        assert published_file.is_published(tree)
        [one] = published_file.evaluations(file, tree)
        EvalConfig.model_validate({**one.settings, "env": one.environments})
    for file in (folder / "configs" / "gepa").glob("*.toml"):
        searched, _ = gepa.configured(["run", str(file)])
        assert searched.env[0].id == "sums"
        assert (searched.base_url, searched.teacher().model) == (None, "gpt-4.1-mini")
        assert searched.teacher().base_urls == ["https://api.openai.com/v1"]
    known = endpoints.read(folder / "configs" / "endpoints.toml")
    assert known.keys() == {"gpt-4.1-mini", "local"}
    models = {family.models[0] for family in configs.FAMILIES.values()}
    active = {
        tomllib.loads(file.read_text(encoding="utf-8"))["model"] for file in (folder / "configs/rl").glob("*.toml")
    }
    assert active == models


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/env", "has an owner or a folder in it"),
        ("9lives", "is no name of a package"),
        ("a--b", "is no name of a package"),
        ("", "is no name of a package"),
        ("my env", "is no name of a package"),
        ("ünder", "is no name of a package"),
        ("class", "would hide"),
        ("json", "would hide"),
        ("verifiers", "would hide"),
    ],
)
def test_a_name_that_no_package_can_have(
    name: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = told("env", "init", name, code=2, capsys=capsys)
    assert said in refusal
    assert refusal.count("\n") == 2
    assert not contents(folder)


def test_an_environment_is_written_whole_or_not_at_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names.package("My_Env") == "my-env"
    assert "python -m pytest environments/my_env" in told("env", "init", "My_Env", capsys=capsys)
    before = contents(folder)
    assert {path.split("/", 2)[1] for path in before} == {"my_env"}
    assert tomllib.loads(before["environments/my_env/pyproject.toml"].decode())["project"]["name"] == "my-env"
    said = told("env", "init", "my-env", code=2, capsys=capsys)
    assert "environments/my_env is there already; choose another name" in said
    assert "docs/environments-seats.md" in told("env", "init", "other", "--add-tool", code=2, capsys=capsys)
    assert contents(folder) == before
    readme, taskset = folder / "environments/my_env/README.md", folder / "environments/my_env/my_env/taskset.py"
    for file in (readme, taskset):
        file.write_text("changed", encoding="utf-8")
    told("env", "init", "my-env", "--rewrite-readme", capsys=capsys)
    assert (readme.read_bytes() == before[f"{readme.relative_to(folder)}"], taskset.read_text("utf-8")) == (
        True,
        "changed",
    )
    (folder / "environments/my_env/mine.py").write_text("mine", encoding="utf-8")
    told("env", "init", "my-env", "--force", capsys=capsys)
    assert contents(folder) == {**before, "environments/my_env/mine.py": b"mine"}
    folder.joinpath("file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        writing.write_folder(folder / "file" / "env", configs.files(full_form=True, guidance=False))


def test_environments_are_listed_and_what_is_none_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told("env", "init", "my-env", capsys=capsys)
    (folder / "environments" / "broken").mkdir()
    (folder / "environments" / "broken" / "pyproject.toml").write_text("= 1", encoding="utf-8")
    listed = told("env", "list", capsys=capsys).splitlines()
    assert [line.split() for line in listed[1:]] == [["my-env", "0.1.0", "no", "environments/my_env"]]
    assert json.loads(told("env", "list", "--json", capsys=capsys)) == [
        {"environment": "my-env", "version": "0.1.0", "installed": False, "folder": "environments/my_env"}
    ]
    for arguments, said in (
        (["install", "absent"], "there is no package 'absent' in environments"),
        (["install", "my-env", "absent"], "there are my-env"),
        (["install", "owner/name"], "names a package of a registry, and primerl has no registry"),
        (["uninstall", "my-env"], "my-env is not installed"),
    ):
        refusal = told("env", *arguments, code=2, capsys=capsys)
        assert said in refusal
        assert refusal.count("\n") == 2
    # A start names the command that installs it.
    config = EvalConfig.model_validate({"model": "m", "base_url": "http://e:1/v1", "env": [{"id": "my-env"}]})
    with pytest.raises(ConfigError, match="`primerl env install my-env`"):
        check_installed(config.env)


class Adder(Endpoint):
    """It can add."""

    def respond(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        status, body = super().respond(handler)
        if handler.command == "POST" and status == 200:
            numbers = [int(word) for word in self.asked[-1].replace("?", " ").split() if word.isdigit()]
            body["choices"][0]["message"]["content"] = f"<answer>{sum(numbers)}</answer>"
        return status, body


@pytest.mark.end_to_end
def test_from_an_empty_folder_to_a_run(folder: Path) -> None:
    """As the published guide has it: set up, write an environment, test it, measure a model, check a run."""
    environments = os.pathsep.join(str(folder / "environments" / name) for name in ("my_env", "sums"))
    variables = {**os.environ, "PYTHONPATH": environments, "OPENAI_API_KEY": KEY}

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], env=variables, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert main(["lab", "setup", "--skip-install"]) == 0
    assert main(["env", "init", "my-env"]) == 0
    assert "8 passed" in run("pytest", "-q", "-p", "no:cacheprovider", "environments/my_env")
    registry = folder / "configs" / "endpoints.toml"
    with serving(Adder()) as served:
        text = registry.read_text(encoding="utf-8")
        registry.write_text(text.replace("https://api.openai.com/v1", served.url), encoding="utf-8")
        measured = "primerl eval run my-env -m gpt-4.1-mini -n 4 -r 1 -t 16 -T 0 -s -A -o outputs/measured -a"
        said = run(*measured.split(), '{"config": {"taskset": {"split": "eval"}}}')
    assert ["my-env", "avg@1", "1.000"] in [line.split()[:3] for line in said.splitlines()]
    results = (folder / "outputs/measured/results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reward"] for line in results] == [1.0] * 4
    small = TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16)
    write_model(folder / "tiny", small, seed=3)
    started = "primerl rl @ configs/rl/qwen-3.toml --model tiny --output-dir outputs/rl --dry-run"
    assert "everything checked" in run(*started.split())
    unset = run(*["primerl", "eval", "run", "my-env", "-m", "local", "-n", "1", "--dry-run"], code=2)
    assert "VLLM_API_KEY is not set" in unset
