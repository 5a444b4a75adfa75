"""Secrets: kept privately, given to env workers alone, printed nowhere."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from end_to_end import start, until
from primerl._core import PrimerlError, inspect_run
from primerl.cli import main
from primerl.config.errors.fail import ConfigError, fail
from primerl.config.schema.rl import RLConfig
from primerl.launch.report.console import Console
from primerl.launch.secrets import of_workers
from primerl.launch.supervise.failures import RunFailedError
from primerl.process import redaction
from primerl.runs import secrets
from primerl.runs.registry import Registry
from run_helpers import CONFIG, write_run

pytestmark = pytest.mark.usefixtures("state")

VALUE = "correct horse battery staple"
JUDGE = "sk-judge-0123456789abcdef"
ENVIRONMENTS = Path(__file__).parent / "environments"


def tell(monkeypatch: pytest.MonkeyPatch, content: bytes, *arguments: str) -> int:
    """With the content on standard input."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(content)))
    return main(list(arguments))


def test_set_list_delete(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(monkeypatch, f"{VALUE}\n".encode(), "secret", "set", "API_KEY") == 0
    assert tell(monkeypatch, b"other value", "env", "secret", "set", "owner/words", "API_KEY") == 0
    file = state / "secrets" / "secrets.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == state.stat().st_mode & 0o777 == 0o700
    assert main(["secret", "list"]) == 0
    assert main(["env", "secret", "list", "owner/words"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("API_KEY") == 4
    assert VALUE not in printed.out + printed.err
    assert secrets.of_environment("words", "owner/words") == {"API_KEY": "other value"}
    assert secrets.of_environment("other") == {"API_KEY": VALUE}
    assert main(["env", "secret", "delete", "owner/words", "API_KEY"]) == 0
    assert main(["env", "secret", "delete", "owner/words", "API_KEY"]) == 1
    assert secrets.of_environment("words", "owner/words") == {"API_KEY": VALUE}


@pytest.mark.parametrize(
    ("arguments", "content", "complaint"),
    [
        (["secret", "set", f"KEY={VALUE}"], b"", "expected a name alone"),
        (["secret", "set", "KEY", VALUE], b"", "too much on the command line"),
        (["secret", "set", "2KEY"], b"x", "cannot name a variable"),
        (["secret", "set", "PRIMERL_API_KEY"], b"x", "primerl's own"),
        (["secret", "set", "KEY"], b"\n", "the value is empty"),
        (["secret", "set", "KEY"], b"a\0b", "null character"),
        (["secret", "set", "KEY"], b"x" * 200_000, "KEY: the value is too long for a variable, which has at most 128"),
        (["secret", "set", "KEY"], b"\xff", "not UTF-8"),
        (["secret", "set"], b"x", "takes the name of one"),
        (["secret", "show", "KEY"], b"x", "expected one of"),
        (["env", "secret", "set", "a b", "KEY"], b"x", "is no environment"),
        (["env", "secrets"], b"x", "arguments are required: action, environment"),
        (["env", "keys"], b"x", "expected `primerl env secret`"),
        (["env", "secrets", "link", "KEY", "e"], b"x", "every environment has them"),
    ],
)
def test_what_is_refused_is_not_repeated(
    arguments: list[str],
    content: bytes,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tell(monkeypatch, content, *arguments) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert VALUE not in printed.out + printed.err
    assert secrets.names() == []


def test_a_damaged_file_is_named_without_its_content(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "secrets").mkdir(parents=True)
    (state / "secrets" / "secrets.json").write_text(f'{{"all": {{"KEY": "{VALUE}')
    assert main(["secret", "list"]) == 2
    printed = capsys.readouterr()
    assert "secrets.json" in printed.err
    assert VALUE not in printed.err


def test_a_damaged_file_is_bad_input_of_a_start(state: Path) -> None:
    (state / "secrets").mkdir(parents=True)
    (state / "secrets" / "secrets.json").write_text(f'{{"all": {{"KEY": "{VALUE}')
    with pytest.raises(ConfigError, match=r"secrets\.json") as caught:
        of_workers(RLConfig.model_validate(tomllib.loads(CONFIG)))
    assert VALUE not in str(caught.value)


def test_what_validates_an_environment_has_its_secrets(state: Path) -> None:
    values = tomllib.loads(CONFIG)
    values["orchestrator"]["train"]["env"][0]["name"] = "mine"
    values["orchestrator"]["val"] = {"num_examples": 1}
    secrets.put("JUDGE_KEY", "k" * 20, "mine")
    assert {name: list(found) for name, found in of_workers(RLConfig.model_validate(values)).items()} == {
        "mine": ["JUDGE_KEY"],
        "mine-val": ["JUDGE_KEY"],
    }


def test_an_evaluation_of_the_training_environment_has_its_secrets(state: Path) -> None:
    values = tomllib.loads(CONFIG)
    (trained,) = values["orchestrator"]["train"]["env"]
    trained["name"] = "mine"
    values["orchestrator"]["eval"] = {"env": [{"id": trained["id"], "name": "mine"}, {"id": "other"}]}
    secrets.put("JUDGE_KEY", "k" * 20, "mine")
    assert {name: list(found) for name, found in of_workers(RLConfig.model_validate(values)).items()} == {
        "mine": ["JUDGE_KEY"],
        "mine-eval": ["JUDGE_KEY"],
        "other": [],
    }


@pytest.mark.processes
def test_two_that_set_at_once_lose_nothing(tmp_path: Path) -> None:
    code = """
import sys
from primerl.runs import secrets
for number in range(15):
    secrets.put(f"{sys.argv[1]}_{number}", "value")
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "AB"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(secrets.names()) == 30


def test_known_values_are_left_out_of_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    redaction.note([VALUE, 'with "quotes" and\nlines', "short"])
    assert redaction.redact(f"key {VALUE}!") == "key <secret>!"
    assert redaction.redact(json.dumps({"said": 'with "quotes" and\nlines'})) == '{"said": "<secret>"}'
    assert redaction.redact('  with "quotes" and') == "  <secret>"
    assert redaction.redact("short") == "short"
    output = io.StringIO()
    Console(output).say(f"the run has failed: {VALUE}")
    assert fail(f"environment 'e': {VALUE} is wrong") == 2
    assert VALUE not in output.getvalue() + capsys.readouterr().err
    # What `primerl.Run` raises quotes the ends of logs.
    assert str(RunFailedError(f"env_e_0 exited with code 1:\n  {VALUE}")).endswith("  <secret>")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.end_to_end
def test_env_workers_alone_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets.put("OF_ALL", VALUE)
    secrets.put("OF_ENVIRONMENT", "of reverse-text", "reverse-text")
    secrets.put("OF_ANOTHER", "of another", "another")
    secrets.put("JUDGE_KEY", JUDGE, "trial-env")
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "outputs" / "small"
    environments = tomllib.loads(CONFIG)["orchestrator"]["train"]["env"]
    environments.append({"id": "trial-env", "taskset": {"kinds": ["tells_a_secret"]}})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ENVIRONMENTS), *sys.path]))
    # Of a fork, /proc shows no variables.
    given = ["--max-steps", "100000", "--orchestrator.train.env", json.dumps(environments), "--no-fork-server"]
    run = start(output, "@", str(write_run(tmp_path)), *given)
    told = output / "logs" / "envs" / "train" / "trial-env" / "env_worker_0.log"

    def variables(name: str) -> set[str]:
        pid = until(lambda: run.pid_of(name), 90, name)
        return {entry.split(b"=")[0].decode() for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}

    try:
        ours = {"OF_ALL", "OF_ENVIRONMENT", "OF_ANOTHER"}
        assert variables("env_reverse-text_0") & ours == {"OF_ALL", "OF_ENVIRONMENT"}
        for name in ("orchestrator", "trainer", "inference"):
            assert not variables(name) & ours, name
        until(lambda: told.is_file() and "refused" in told.read_text(), 90, "a rollout that fails")
        until(lambda: failures(output), 90, "a failure in the journal")
        run.note_mark()
    finally:
        run.kill()
    for line in ("printed: <secret>", "by a child: <secret>", "half a line: <secret>", "the judge refused <secret>"):
        assert f"{line}\n" in told.read_text()
    assert set(failures(output)) == {"RuntimeError: the judge refused <secret>"}
    written = [path for path in output.rglob("*") if path.is_file()]
    assert len(written) > 8
    for value in (VALUE, JUDGE):
        assert not [path for path in written if value.encode() in path.read_bytes()]
    with (output / "logs" / "envs" / "train" / "reverse-text" / "env_worker_0.log").open("a") as log:
        log.write(f"an environment that says: {VALUE}\n")
    (found,) = _runs()
    assert main(["run", "logs", found, "--component", "env-worker", "-n", "1"]) == 0
    assert "an environment that says: <secret>\n" in capsys.readouterr().out


def failures(output: Path) -> list[str]:
    """What the journal says of rollouts that failed."""
    try:
        dropped = json.dumps(inspect_run(output, "dropped"))
    except PrimerlError:
        return []
    return re.findall(r"RuntimeError: [^\"]*", dropped)


def test_values_of_a_runs_own_files_are_left_out_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "run"
    (output / "logs").mkdir(parents=True)
    (output / "logs" / "orchestrator.log").write_text(f"it says {JUDGE}\n")
    (tmp_path / "judge.env").write_text(f"JUDGE_KEY={JUDGE}\n")
    config = 'env_files = ["judge.env", "absent.env"]\n' + CONFIG
    with Registry() as registry:
        given = {"name": "run", "model": "/models/m", "environments": ["e"]}
        run = registry.begin(output, config, goes_on=False, form="full", **given)
    monkeypatch.chdir(output)  # relative paths begin where it was started
    assert main(["run", "logs", run]) == 0
    assert capsys.readouterr().out == "it says <secret>\n"
    # What a journal of before has of them.
    monkeypatch.setattr(redaction, "_known", set())
    monkeypatch.setattr("primerl._core.inspect_run", lambda *_: {"message": f"it says {JUDGE}"})
    assert main(["trace", str(output), "--dropped", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"message": "it says <secret>"}


def _runs() -> list[str]:
    with Registry() as registry:
        return [run.id for run in registry.all()]
