"""docs/hosted.md: its configs and commands work as they stand; the example in the short form passes every check."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from primerl.cli import main
from primerl.config.hosted.load_run import load_run
from primerl.config.process_files import run_file
from primerl.models.tiny import write_model

EXAMPLE = "examples/reverse-text/hosted.toml"


def blocks(repository: Path) -> tuple[list[str], list[str]]:
    """TOML, and commands."""
    page = (repository / "docs" / "hosted.md").read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = [line.split("  #")[0].strip() for kind, text in found if not kind for line in text.splitlines()]
    return [text for kind, text in found if kind == "toml"], commands


def test_the_page(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (whole, keys), commands = blocks(repository)
    Path("hosted.toml").write_text(whole)
    *ours, secret, tailnet = commands
    assert secret == "primerl secret set TAILSCALE_AUTH_KEY"
    joined = load_run(shlex.split(tailnet)[2:], program="primerl rl").tailscale
    assert (joined.enabled, joined.hostname_prefix) == (True, "lab")
    assert len(ours) == 4
    for command in ours:
        program, process, *arguments = shlex.split(command)
        assert (program, process) == ("primerl", "rl")
        config = load_run(arguments, program="primerl rl")
        if "--dry-run" in arguments:  # as the launcher does, for the last command
            run_file.write(config)
    assert config.trainer.model.lora is not None
    assert (config.trainer.model.lora.rank, config.output_dir, config.dry_run) == (32, "outputs/rank-32", False)
    Path("hosted.toml").write_text(whole.split("[env.taskset]")[0] + keys)
    [environment] = load_run(["@", "hosted.toml"], program="primerl rl").orchestrator.train.env
    assert set(environment.taskset) == {"rewards", "toolsets"}
    assert environment.args == {"harness": {"max_turns": 8}}


@pytest.mark.processes
def test_a_dry_run_of_the_example_writes_the_full_form(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "owner" / "model", seed=0)
    output = tmp_path / "run"
    changes = ["--model", "owner/model", "--output-dir", str(output), "--dry-run"]
    assert main(["rl", "@", str(repository / EXAMPLE), *changes]) == 0
    names = {"orchestrator", "trainer", "inference", "env_reverse-text_0", "env_reverse-text-val_0"}
    written = {path.stem: tomllib.loads(path.read_text()) for path in (output / "configs").iterdir()}
    assert set(written) == names | {"rl", "env_reverse-text-eval_0"}
    assert written["trainer"]["model"]["lora"]["rank"] == 16
    assert [environment["name"] for environment in written["orchestrator"]["eval"]["env"]] == [
        "reverse-text-val",
        "reverse-text-eval",
    ]
    # The full form goes through the same checks, and becomes the same files.
    again = tmp_path / "again"
    full = ["@", str(output / "configs" / "rl.toml"), "--output-dir", str(again), "--dry-run"]
    assert main(["rl", *full]) == 0
    for path in (again / "configs").iterdir():
        text = path.read_text().replace(str(again), str(output))
        assert text == (output / "configs" / path.name).read_text(), path.name
