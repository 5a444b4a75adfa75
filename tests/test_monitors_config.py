"""Settings of monitors, what is checked before the start, and the page about them."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from monitor_servers import PrimeServer
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files, monitored, resolve, run_file
from primerl.config.schema.monitors import MonitorEntry
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from primerl.launch import monitors as launched
from primerl.launch.preflight import training
from primerl.launch.registration import stored_copy
from primerl.launch.secrets import of_workers as secrets_of_workers
from primerl.monitors import Distribution, Run, extras
from primerl.monitors.load import find
from primerl.monitors.monitor import RefusedError
from primerl.monitors.services.prime import PrimeMonitor
from primerl.runs import secrets

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reverse-text" / "rl-ci.toml"
SFT = {"output_dir": "out", "max_steps": 1, "model": {"tiny": {}}, "data": {"path": "data.jsonl"}}


def rl(*arguments: str) -> RLConfig:
    return load(RLConfig, ["@", str(EXAMPLE), *arguments], program="primerl rl")


def test_flags_turn_monitors_on_and_off(tmp_path: Path) -> None:
    def names(*arguments: str) -> list[str]:
        return [entry.name for entry in monitored.entries(rl(*arguments))]

    assert names() == []
    assert names("--wandb") == ["wandb"]
    with pytest.raises(ConfigError, match=r"--no-wandb unsets \[wandb\], and --wandb gives it"):
        names("--wandb", "--no-wandb")
    file = tmp_path / "wandb.toml"
    file.write_text('[wandb]\nproject = "p"\n')
    assert names("@", str(file)) == ["wandb"]
    assert names("@", str(file), "--no-wandb") == []
    assert names("--orchestrator.prime-monitor.run-name", "x", "--wandb.offline") == ["wandb", "prime"]
    (wandb,) = monitored.entries(rl("--wandb.project", "p", "--wandb.tags", '["a"]', "--wandb.entity", "me"))
    assert wandb.args == {"project": "p", "tags": ["a"], "entity": "me", "offline": False}
    assert (wandb.samples_interval, wandb.sample_ratio, wandb.distributions_interval) == (10, 0.1, 10)
    config = rl(
        "--wandb", "--no-trainer.wandb.log-extras.distributions", "--orchestrator.wandb.log-extras.interval", "5"
    )
    (wandb,) = monitored.entries(config)
    assert (wandb.samples_interval, wandb.trainer_interval) == (5, None)
    assert resolve.trainer(config, "http://h:1").config.model_dump()["distributions_interval"] is None
    assert resolve.trainer(rl("--wandb"), "http://h:1").config.model_dump()["distributions_interval"] == 10
    # Set for both at once, as the published guide does, and over it what one of them has of its own.
    (wandb,) = monitored.entries(
        rl("--wandb", "--wandb.log-extras.interval", "3", "--wandb.log-extras.sample-ratio", "0.5")
    )
    assert (wandb.samples_interval, wandb.sample_ratio, wandb.trainer_interval) == (3, 0.5, 3)
    assert "log_extras" not in wandb.args
    (wandb,) = monitored.entries(
        rl("--no-wandb.log-extras.distributions", "--wandb.log-extras.interval", "3",
           "--orchestrator.wandb.log-extras.interval", "5", "--trainer.wandb.log-extras.distributions")
    )  # fmt: skip
    assert (wandb.samples_interval, wandb.distributions_interval, wandb.trainer_interval) == (5, None, 3)
    (wandb,) = monitored.entries(rl("--no-wandb.log-extras", "--wandb.project", "p"))
    assert (wandb.samples_interval, wandb.distributions_interval, wandb.trainer_interval) == (None, None, None)
    flags = ["--no-trainer.wandb.log-extras", "--no-orchestrator.wandb.log-extras"]
    (wandb,) = monitored.entries(rl("--wandb", *flags))
    assert (wandb.samples_interval, wandb.distributions_interval, wandb.trainer_interval) == (None, None, None)
    flags[:1] = ["--trainer.wandb.log-extras", "None"]
    off = rl("--wandb", *flags)
    for text in (run_file.to_toml(off), stored_copy(off)):
        file.write_text(text)
        (wandb,) = monitored.entries(load(RLConfig, ["@", str(file)], program="primerl rl"))
        assert (wandb.samples_interval, wandb.distributions_interval, wandb.trainer_interval) == (None, None, None)
    with pytest.raises(ConfigError, match=r"\[monitor\] is always there"):
        rl("--no-monitor")
    with pytest.raises(ConfigError, match="known keys here: log_extras"):
        rl("--trainer.wandb.project", "x")


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandbs_own_variable_has_the_last_word(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert [entry.args["offline"] for entry in monitored.entries(rl("--wandb"))] == {"offline": [True]}.get(mode, [])


def test_keys_are_looked_for_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "PRIME_API_KEY", "NETRC", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"wandb: there is no key: set WANDB_API_KEY .*--no-wandb"):
        launched.check(rl("--wandb"))
    with pytest.raises(ConfigError, match=r"orchestrator\.prime_monitor: there is no key: set PRIME_API_KEY"):
        launched.check(rl("--orchestrator.prime-monitor"))
    with pytest.raises(ConfigError, match="wandb: there is no key"):
        launched.check(SFTConfig.model_validate({**SFT, "wandb": {}}))
    launched.check(rl("--wandb.offline"))
    launched.check(rl("--wandb.api-key", "secret"))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    launched.check(rl("--wandb"))
    (tmp_path / ".prime").mkdir()
    (tmp_path / ".prime" / "config.json").write_text('{"api_key": "secret"}')
    launched.check(rl("--orchestrator.prime-monitor"))
    config = rl("--wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install the extra `wandb` of primerl: .*\[wandb\]"):
        launched.check(config)


def test_a_key_may_be_in_env_files_or_among_the_stored_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))

    def key_of(config: RLConfig | SFTConfig) -> str | None:
        launched.check(config)
        process = launched.wanted(config)
        assert process is not None
        assert "stored-key" not in repr(process)
        return process.variables.get("WANDB_API_KEY")

    secrets.put("WANDB_API_KEY", "stored-key")
    assert key_of(rl("--wandb")) == "stored-key"
    assert key_of(SFTConfig.model_validate({**SFT, "wandb": {}})) == "stored-key"
    file = tmp_path / "secrets.env"
    file.write_text("WANDB_API_KEY=key-of-file\n")
    config = rl("--wandb", "--env-files", f'["{file}"]')
    assert key_of(config) == "key-of-file"
    assert secrets_of_workers(config)["reverse-text"]["WANDB_API_KEY"] == "key-of-file"
    monkeypatch.setenv("WANDB_API_KEY", "exported")
    assert key_of(config) == "exported"
    monkeypatch.delenv("WANDB_API_KEY")
    file.write_text("WANDB_API_KEY='no key'\n")
    with pytest.raises(ConfigError, match="wandb: the key in WANDB_API_KEY of env_files or the stored secrets is no"):
        launched.check(config)
    # One file that cannot be read is one problem.
    file.unlink()
    with pytest.raises(ConfigError) as refusal:
        training.check(config)
    assert str(refusal.value).count(f"there is no file {file}") == 1
    # Of a run without W&B nobody asks.
    assert launched.wanted(rl("--no-wandb")) is None


def test_a_key_with_a_newline_is_taken_without_it_and_another_is_refused_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "PRIME_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = rl("--wandb", "--orchestrator.prime-monitor")
    for bad in ("se cret", "se\ncret", "sécret", "se\x00cret"):
        monkeypatch.setattr(os, "environ", {**os.environ, "WANDB_API_KEY": bad, "PRIME_API_KEY": bad})
        with pytest.raises(ConfigError) as refusal:
            launched.check(config)
        said = str(refusal.value)
        assert "wandb: the key in WANDB_API_KEY is no key" in said
        assert "orchestrator.prime_monitor: the key in PRIME_API_KEY is no key" in said
        assert "cret" not in said
        with pytest.raises(RefusedError, match="the key in PRIME_API_KEY is no key"):
            PrimeMonitor().start(Run(tmp_path, "rl", "n", "m", 1, {}))
    server = PrimeServer()
    monkeypatch.setenv("WANDB_API_KEY", "secret\r\n")
    monkeypatch.setenv("PRIME_API_KEY", f"{server.key}\r\n")
    launched.check(config)
    assert launched.wanted(rl("--wandb.api-key", "secret\n")).variables == {"WANDB_API_KEY": "secret"}  # type: ignore[union-attr]
    with server.serving():
        monitor = PrimeMonitor(base_url=f"{server.url}/rft")
        monitor.start(Run(tmp_path, "rl", "n", "m", 1, {}, state={"id": "run-1"}))
        monitor.log(1, {"a": 1.0})
    assert len(server.bodies("/metrics")) == 1


def test_calls_to_prime_have_keys_of_their_own_and_the_same_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PrimeServer()
    monkeypatch.setenv("PRIME_API_KEY", server.key)
    state: dict[str, Any] = {}

    def remember(**values: Any) -> None:
        if "id" in values and len(server.bodies("/external-runs")) == 1:
            raise OSError("the answer gets lost")
        state.update(values)

    def monitor() -> PrimeMonitor:
        return PrimeMonitor(base_url=f"{server.url}/rft")

    run = Run(tmp_path, "rl", "n", "m", 1, {}, state=state, remember=remember)
    with server.serving():
        with pytest.raises(OSError, match="gets lost"):
            monitor().start(run)
        for _ in range(2):
            told = monitor()
            told.start(run)
            told.number = 7
            told.finish("finished", "")  # and the run goes on, with a record of the same number
            told.log(1, {"a": 1.0})
        keys = [(call[1], call[2]["Idempotency-Key"]) for call in server.calls]
    assert len(keys) == 6
    created = [key for path, key in keys if path == "/rft/external-runs"]
    assert created == [state["asked"]] * 2
    assert len(set(keys)) == len({key for _, key in keys}) == 3


def test_a_key_is_in_the_monitors_environment_and_nowhere_else() -> None:
    config = rl("--wandb.api-key", "very-secret", "--orchestrator.prime-monitor")
    process = launched.wanted(config)
    assert process is not None
    assert process.variables == {"WANDB_API_KEY": "very-secret"}
    shown = [files.to_toml(process.config), files.to_toml(config), repr(process), repr(config)]
    assert not [text for text in shown if "very-secret" in text]
    with pytest.raises(ConfigError) as refusal:
        load(SFTConfig, ["--wandb.api-key", "1.5e3", "--data.path", "x"], program="x")
    assert "1.5e3" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "args", "problem"),
    [
        ("nowhere_to_be_found:M", {}, "cannot be imported: ModuleNotFoundError"),
        ("test_monitors:Nobody", {}, "module test_monitors has no 'Nobody'"),
        ("test_monitors:Noting", {"path": "x"}, "does not take these args: missing a required argument: 'file'"),
        ("test_monitors:Folder", {"folder": "x"}, "has no start, log, finish; derive it from primerl.monitors.Monitor"),
    ],
)
def test_monitors_of_ones_own_are_checked(path: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        find(path, args)
    config = RLConfig.model_validate({**rl().model_dump(), "monitors": [{"path": path, "args": args}]})
    with pytest.raises(ConfigError, match=problem):
        launched.check(config)


def test_names_of_monitors_are_their_own() -> None:
    given = {**SFT, "monitors": [{"path": "a:B"}, {"path": "c:B"}]}
    with pytest.raises(ValueError, match="two are called 'B'"):
        SFTConfig.model_validate(given)
    given["monitors"][1]["name"] = "wandb"  # type: ignore[index]
    with pytest.raises(ValueError, match="two are called 'wandb'"):
        SFTConfig.model_validate(given)


def test_values_are_counted_in_bins() -> None:
    found = Distribution.of([0.0, 0.0, 1.0], bins=2)
    assert (found.edges, found.counts, found.values) == ([0.0, 0.5, 1.0], [2, 1], [0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    "values",
    [[1.0, 0.9999999999999999], [1.0, 1.0], [0.0, 0.0], [0.0, 5e-324], [1e17, 1e17], [-1e300, -1e300], [0.0, 1e300]],
)
def test_values_that_hardly_differ_are_counted_too(values: list[float]) -> None:
    found = Distribution.of(values)
    assert sum(found.counts) == len(values)
    assert len(found.edges) == 33
    assert all(left < right for left, right in itertools.pairwise(found.edges))


@pytest.mark.parametrize("reward", [math.inf, math.nan])
def test_a_distribution_that_cannot_be_had_is_left_out(reward: float, caplog: pytest.LogCaptureFixture) -> None:
    line = {"reward": 0.5, "advantage": 0.1, "loss_tokens": 3, "staleness": None}
    content = {"samples": [line, {**line, "reward": reward}], "of_trainer": {}}
    entry = MonitorEntry(name="m", path="m:M", distributions_interval=2)
    assert sorted(extras.distributions_for(entry, 2, content)) == ["advantages", "lengths"]
    assert "step 2 is reported without the distribution of rewards" in caplog.text


def test_tokens_are_counted_in_fixed_bins() -> None:
    import torch
    from primerl.train.distributed.ranks import ALONE
    from primerl.train.loop.statistics import Histograms
    from primerl.train.objective.components import TokenValues

    histograms = Histograms()
    sampled = torch.tensor([True, True, True, False])
    columns = {"entropy": torch.tensor([0.1, 99.0, 0.3, 5.0]), "log_ratio": torch.tensor([-7.0, 0.01, 0.03, 0.0])}
    none = torch.zeros_like(sampled)
    histograms.add(TokenValues(columns, sampled, none))
    histograms.add(TokenValues(columns, sampled, none))
    found = histograms.over(ALONE).line()
    assert len(found["entropy"]["edges"]) == 49
    assert {place: count for place, count in enumerate(found["entropy"]["counts"]) if count} == {0: 2, 1: 2, 47: 2}
    assert {place: count for place, count in enumerate(found["log_ratio"]["counts"]) if count} == {0: 2, 25: 4}
    assert Histograms().line() == {}


def test_trainers_distributions_have_an_interval_that_suits_everybody() -> None:
    config = rl("--wandb", "--trainer.wandb.log-extras.interval", "6")
    own = [{"path": "test_monitors:Noting", "log_extras": {"interval": 4}}]
    config = RLConfig.model_validate({**config.model_dump(), "monitors": own})
    assert monitored.trainer_interval(config) == 2
    assert isinstance(monitored.entries(config)[1], MonitorEntry)


def test_the_page(repository: Path) -> None:
    page = (repository / "docs" / "monitors.md").read_text()
    blocks = dict(re.findall(r"^```(python|bash)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    tables = [tomllib.loads(text) for text in re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    for table in tables:
        own = rl("--wandb").model_dump()
        for name, values in table.items():
            own[name] = {**own[name], **values} if isinstance(values, dict) else values
        assert monitored.entries(RLConfig.model_validate(own))
    commands = [line for line in blocks["bash"].splitlines() if line.startswith("primerl rl")]
    assert len(commands) == 2
    for command in commands:
        rl(*shlex.split(command, comments=True)[4:])
    server = PrimeServer()
    names: dict[str, Any] = {}
    exec(blocks["python"], names)
    with server.serving():
        monitor = names["Webhook"](f"{server.url}/storage/")
        monitor.start(Run(Path("x"), "rl", "called", "m", 1, {}))
        monitor.log(1, {"reward/all/mean": 0.5})
        monitor.finish("finished", "")
    told = [json.loads(call[3]) for call in server.calls]
    assert told[0] == {"run": "called", "step": 1, "reward": 0.5, "number": 0}
    assert told[1]["ended"] == "finished"
