"""Several files, files for a section, entries of lists, switches: what a command line makes of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tomli_w
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.inference.settings import InferenceConfig
from primerl.launch import configs, secrets
from settings_helpers import refusal
from test_config import tree


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the current folder, as on a command line."""
    monkeypatch.chdir(tmp_path)
    whole = tree(orchestrator__train__env=[{"id": "reverse-text", "taskset": {"split": "train"}}, {"id": "second"}])
    contents = {
        "run.toml": whole,
        "more.toml": {"max_steps": 5, "trainer": {"optim": {"lr": 1e-3}}},
        "trainer.toml": {"optim": {"lr": 2e-3}, "ckpt": {"interval": 2}},
        "slower.toml": {"optim": {"lr": 5e-4}},
        "orchestrator.toml": {"sampling": {"temperature": 0.5}},
        "inference.toml": {"replicas": 2},
        "entry.toml": {"ratio": 3, "taskset": {"letters": "ab"}},
    }
    for name, content in contents.items():
        Path(name).write_text(tomli_w.dumps(content))


def given(*arguments: str) -> RLConfig:
    return load(RLConfig, ["@", "run.toml", *arguments], program="primerl rl")


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        given(*arguments)
    return str(caught.value)


def test_files_are_merged_and_the_later_one_wins() -> None:
    config = given("@", "more.toml")
    assert (config.max_steps, config.trainer.optim.lr) == (5, 1e-3)
    assert config.orchestrator.sampling.max_tokens == 16, "what the later file does not have stays"


@pytest.mark.parametrize(
    "arguments",
    [["@run.toml", "--max-steps", "7"], ["--max-steps", "7", "@run.toml"], ["--max-steps=7", "@run.toml"]],
)
def test_a_file_may_be_glued_to_its_sign(arguments: list[str]) -> None:
    assert load(RLConfig, arguments, program="primerl rl") == given("--max-steps", "7")
    with pytest.raises(ConfigError, match=r"no\.toml"):
        load(RLConfig, ["@no.toml"], program="primerl rl")


def test_files_for_sections_win_over_those_of_the_whole_wherever_they_stand() -> None:
    first = [
        "--trainer",
        "@",
        "trainer.toml",
        "--orchestrator",
        "@orchestrator.toml",
        "--inference",
        "@",
        "inference.toml",
    ]
    config = given(*first, "@", "more.toml")
    assert (config.max_steps, config.trainer.optim.lr, config.inference.replicas) == (5, 2e-3, 2)
    assert (config.orchestrator.sampling.temperature, config.orchestrator.batch_size) == (0.5, 8)
    assert given(*first, "--trainer.optim.lr", "1").trainer.optim.lr == 1, "flags win over all files"


def test_a_file_after_a_switch_is_for_the_whole() -> None:
    config = load(RLConfig, ["--dry-run", "@", "run.toml"], program="primerl rl")
    assert (config.dry_run, config.orchestrator.sampling.max_tokens) == (True, 16)


def test_several_files_for_one_section_are_merged_too() -> None:
    trainer = given("--trainer", "@", "trainer.toml", "--trainer", "@", "slower.toml").trainer
    assert trainer.optim.lr == 5e-4
    assert trainer.ckpt is not None
    assert trainer.ckpt.interval == 2


def test_a_flag_sets_one_entry_of_a_list() -> None:
    config = given(
        *("--orchestrator.train.env.0.ratio", "2", "--orchestrator.train.env[1].num-workers=3"),
        *("--orchestrator.train.env.0.taskset.num-examples", "7", "--orchestrator.train.env.1.name", "2"),
        *("--orchestrator.train.env.2.id", "third", "--no-orchestrator.eval.env.0.base-model"),
    )
    first, second, third = config.orchestrator.train.env
    assert (first.id, first.ratio, first.taskset) == ("reverse-text", 2, {"split": "train", "num_examples": 7})
    assert (second.name, second.num_workers, third.id) == ("2", 3, "third")
    assert not config.orchestrator.eval.env[0].base_model
    assert Path("run.toml").read_text() == tomli_w.dumps(
        tree(orchestrator__train__env=[{"id": "reverse-text", "taskset": {"split": "train"}}, {"id": "second"}])
    )


def test_a_file_for_an_entry_of_a_list() -> None:
    second = given("--orchestrator.train.env.1", "@", "entry.toml").orchestrator.train.env[1]
    assert (second.id, second.ratio, second.taskset) == ("second", 3, {"letters": "ab"})


def test_switches_and_optional_sections_are_switched_off() -> None:
    config = given("--trainer", "@", "trainer.toml", "--no-trainer.ckpt", "--no-trainer.weights.probe", "--no-dry-run")
    assert config.trainer.ckpt is None
    assert not config.trainer.weights.probe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-ckpt", "--ckpt.interval", "4"], "--no-ckpt unsets [ckpt], and --ckpt.interval gives it"),
        (["--no-max-steps"], "--no-max-steps: max_steps is no switch (integer); give --max-steps VALUE"),
        (["--no-orchestrator.min-group-size"], "or None to unset it"),
        (["--no-trainer"], "--no-trainer: [trainer] is always there"),
        (["--orchestrator.train.env.3.ratio", "2"], "there are 2 entries, counted from 0; the next one is 2"),
        (["--orchestrator.train.env.0.ratio", "-2"], "env[0].ratio (on the command line): Input should be greater"),
        (["--orchestrator.train.env.0.ratioo", "2"], "unknown key; did you mean 'ratio'?"),
        (
            ["--orchestrator.train.env", '[{"id": "x"}]', "--orchestrator.train.env.0.ratio", "2"],
            "--orchestrator.train.env gives the whole list, and --orchestrator.train.env.0.ratio an entry of it",
        ),
        (["--trainer", "@", "absent.toml"], "Config file not found: absent.toml"),
        (["--trainer", "@", "."], ". cannot be read"),
        (["--trainer", "@"], "nothing follows `@`"),
        (["more.toml"], "Unrecognized arguments: more.toml; a config file is given as `@ FILE.toml`"),
        (["--trainer", "@", "run.toml"], "trainer.orchestrator"),
    ],
)
def test_what_contradicts_itself_is_named(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_file_without_tables_is_named() -> None:
    Path("list.json").write_text("[1]")
    assert refused("@", "list.json").startswith("list.json holds no tables")
    Path("broken.json").write_text("{")
    assert refused("@", "broken.json").startswith("Invalid JSON in broken.json")
    Path("more.json").write_text('{"max_steps": 7}')
    assert given("@", "more.json").max_steps == 7


def test_the_whole_config_that_is_written_starts_the_same_processes(tmp_path: Path) -> None:
    """Also what follows from other keys: were it left out, another default or version would decide."""
    arguments = ["--orchestrator.max-async-level", "7", "--ckpt.interval", "3", "--log.level", "debug"]
    arguments += ["--keep-broadcasts", "--trainer.model.lora.rank", "4", "--output-dir", "out"]
    config = given(*arguments)
    variables = secrets.of_workers(config)
    first = {process.name: process.config for process in configs.write(config, "http://o:1", variables)}
    again = load(RLConfig, ["@", os.fspath(tmp_path / "out" / "configs" / "rl.toml")], program="primerl rl")
    second = {process.name: process.config for process in configs.write(again, "http://o:1", variables)}
    assert first == second
    assert resolve.orchestrator(config).config == resolve.orchestrator(again).config
    assert not again.dry_run


def test_the_runs_level_is_that_of_all_who_have_none() -> None:
    def levels(*arguments: str) -> dict[str, str]:
        config = given(*arguments)
        found = [resolve.orchestrator(config), resolve.trainer(config, "http://o:1")]
        found += [resolve.inference(config, "http://o:1")[0], resolve.env_workers(config, "http://o:1")[0]]
        return {process.kind: process.config.log.level for process in found}  # type: ignore[attr-defined]

    kinds = ("orchestrator", "trainer", "inference", "env-worker")
    assert levels() == dict.fromkeys(kinds, "info")
    assert levels("--log.level", "warn") == {**dict.fromkeys(kinds, "warn"), "trainer": "warning"}
    own = levels("--log.level", "error", "--trainer.log.level", "info", "--orchestrator.log.level", "trace")
    assert own == {"orchestrator": "trace", "trainer": "info", "inference": "error", "env-worker": "trace"}


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ({"level": "loud"}, "log.level: Input should be 'trace', 'debug'"),
        ({"lvl": "info"}, "log.lvl: unknown key; did you mean 'level'?"),
    ],
)
def test_an_engine_refuses_a_level_that_is_none(log: dict[str, str], message: str) -> None:
    assert message in refusal(InferenceConfig, {"model": {"path": "m"}, "log": log})


def test_harness_and_level_of_verifiers_reach_the_env_workers() -> None:
    config = given("--orchestrator.train.env.0.harness.id", "null", "--orchestrator.log.vf-level", "debug")
    worker = resolve.env_workers(config, "http://o:1")[0].config
    assert worker.args == {"taskset": {"split": "train"}, "harness": {"id": "null"}}  # type: ignore[attr-defined]
    assert worker.log.vf_level == "debug"  # type: ignore[attr-defined]
    assert "args.harness are both given" in refused(
        "--orchestrator.train.env.0.harness.id", "a", "--orchestrator.train.env.0.args.harness", "{}"
    )
