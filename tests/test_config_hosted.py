"""The short form: what each key becomes, that the full form it writes is the same run, and what workers get."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted import HostedConfig, compile_hosted
from primerl.config.hosted.compile import sequence_length
from primerl.config.hosted.load_run import load_run
from primerl.config.process_files import files as process_files
from primerl.config.process_files import resolve, run_file
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from primerl.envs.settings import WorkerConfig
from primerl.launch import secrets
from primerl.launch.placement.commands import environment_of
from primerl.launch.preflight import hub
from primerl.process.setting_checks import from_mapping

REPOSITORY = Path(__file__).parent.parent
LEAST: dict[str, Any] = {
    "model": "owner/name",
    "max_steps": 10,
    "batch_size": 16,
    "rollouts_per_example": 4,
    "sampling": {"max_tokens": 64},
    "env": [{"id": "owner/reverse-text@1.0"}],
}
TASKSET: dict[str, Any] = {
    "split": "train",
    "toolsets": {"search": {"tools": ["m:search"], "objects": {"index": "m:load"}, "bindings": {"search.k": 3}}},
    "rewards": [{"fn": "m:exact", "weight": 0.5}],
}
# Each key with a value other than its default.
MORE: dict[str, Any] = {
    "learning_rate": 3e-5,
    "lora_alpha": 32.0,
    "oversampling_factor": 1.5,
    "max_async_level": 1,
    "trajectory_strategy": "branching",
    "env_file": ["secrets.env"],
    "checkpoint_id": "ckpt-1",
    "sampling": {"max_tokens": 600, "temperature": 0.7, "reasoning_effort": "high"},
    "env": [
        {"id": "owner/a", "name": "first", "args": {"x": 1}, "taskset": TASKSET, "harness": {"max_turns": 8}},
        {"id": "owner/b", "max_retries": 0, "python": {"requirements": ["verifiers<0.4", "b==1.0"]}},
    ],
    "eval": {
        "interval": 50,
        "num_examples": 30,
        "rollouts_per_example": 2,
        "eval_base_model": False,
        "env": [
            {"id": "owner/c", "python": {"path": ".venv-c"}, "system_prompt": "Be brief."},
            {"id": "owner/d", "num_examples": -1, "rollouts_per_example": 4, "interval": 5},
        ],
    },
    "val": {"num_examples": 8, "rollouts_per_example": 2, "interval": 3},
    "buffer": {"online_difficulty_filtering": True, "easy_threshold": 0.9, "env_ratios": [1.0, 3.0], "seed": 5},
    "checkpoints": {"interval": 20, "keep_cloud": -1},
    "adapters": {"interval": 4, "keep_last": 7},
    "infrastructure": {"compute_size": "L"},
    "tailscale": {"enabled": True, "hostname_prefix": "lab"},
    "output_dir": "outputs/mine",
    "seq_len": 8192,
    "seed": 3,
}


def compiled(**changes: Any) -> RLConfig:
    return RLConfig.model_validate(compile_hosted(HostedConfig.model_validate({**LEAST, **changes})))


def test_what_is_left_out_has_the_defaults_of_hosted_training() -> None:
    config = compiled()
    lora = config.trainer.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, config.trainer.optim.lr) == (16, 16.0, 1e-4)
    orchestrator = config.orchestrator
    assert (orchestrator.batch_size, orchestrator.group_size) == (16, 4)
    assert (orchestrator.oversampling_factor, orchestrator.max_async_level) == (2.0, 2)
    assert (orchestrator.sampling.temperature, orchestrator.sampling.chat_template_kwargs) == (1.0, {})
    assert orchestrator.eval.env == []
    assert config.store is not None
    assert (config.store.keep, config.store.adapters.interval, config.store.adapters.keep) == (5, 0, 3)
    assert config.ckpt is not None
    assert (config.ckpt.interval, config.ckpt.weights.save_adapter_separately) == (None, True)
    assert config.model.path == "owner/name"
    [environment] = orchestrator.train.env
    assert (environment.label, environment.num_workers, environment.memory_mb) == ("reverse-text", 1, None)


def test_an_environment_may_be_trained_on_and_measured() -> None:
    """The orchestrator's names are unique across both, so the evaluation gets one of its own."""
    same = {"id": "owner/alphabet-sort@1.0"}
    config = compiled(env=[same], eval={"env": [same, {"id": "other/alphabet-sort", "name": "harder"}]}, val={})
    orchestrator = config.orchestrator
    assert [env.label for env in orchestrator.train.env] == ["alphabet-sort"]
    assert [env.label for env in orchestrator.eval.env] == ["alphabet-sort-val", "alphabet-sort-eval", "harder"]
    # As the resolved file is read again.
    again = RLConfig.model_validate(config.model_dump(mode="json", exclude_none=True))
    assert [env.label for env in again.orchestrator.eval.env] == [env.label for env in orchestrator.eval.env]
    names = [process.name for process in resolve.env_workers(config, "http://127.0.0.1:1", "run")]
    assert len(set(names)) == len(names) == 4


@pytest.mark.parametrize(
    "measured",
    [
        [{"id": "a"}, {"id": "a"}],
        [{"id": "a"}, {"id": "b", "name": "a-eval"}],
        [{"id": "b" * 100}],
    ],
)
def test_an_evaluation_that_cannot_be_renamed_is_refused(measured: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="two environments are called"):
        compiled(env=[{"id": "a"}, {"id": "b" * 100}], eval={"env": measured})


def test_every_key_becomes_something() -> None:
    config = compiled(**MORE)
    orchestrator, trainer = config.orchestrator, config.trainer
    assert trainer.model.lora is not None
    assert (trainer.optim.lr, trainer.model.lora.alpha) == (3e-5, 32.0)
    assert (orchestrator.oversampling_factor, orchestrator.max_async_level) == (1.5, 1)
    assert orchestrator.trajectory_strategy == "branching"
    assert (config.env_files, config.checkpoint_id) == (["secrets.env"], "ckpt-1")
    assert (orchestrator.sampling.max_tokens, orchestrator.sampling.temperature) == (600, 0.7)
    assert orchestrator.sampling.chat_template_kwargs == {"reasoning_effort": "high"}
    first, second = orchestrator.train.env
    assert (first.id, first.name, first.max_retries, second.max_retries) == ("owner/a", "first", 2, 0)
    interpreters = [env.python and env.python.model_dump(exclude_none=True) for env in orchestrator.eval.env]
    wanted = {"requirements": ["verifiers<0.4", "b==1.0"]}
    assert interpreters == [None, wanted, {"path": ".venv-c"}, None]
    assert (first.python, second.python) == (None, orchestrator.eval.env[1].python)
    assert [env.system_prompt for env in orchestrator.eval.env] == [None, None, "Be brief.", None]
    assert first.arguments == {"x": 1, "harness": {"max_turns": 8}, "taskset": TASKSET}
    assert (orchestrator.buffer.easy_threshold, orchestrator.buffer.env_ratios) == (0.9, [1.0, 3.0])
    assert (orchestrator.buffer.online_difficulty_filtering, orchestrator.buffer.seed) == (True, 5)
    measured = [
        (env.label, env.num_examples, env.rollouts_per_example, env.interval, env.base_model, env.sampling.temperature)
        for env in orchestrator.eval.env
    ]
    assert measured == [
        ("first-val", 8, 2, 3, True, 0.7),
        ("b-val", 8, 2, 3, True, 0.7),
        ("c", 30, 2, 50, False, 0.7),
        ("d", None, 4, 5, False, 0.7),
    ]
    assert orchestrator.eval.env[0].arguments == first.arguments, "validation is on the training environment"
    assert {(env.num_workers, env.memory_mb, env.cpus) for env in [first, *orchestrator.eval.env]} == {(4, 16384, 4)}
    assert config.store is not None
    assert config.ckpt is not None
    assert (config.ckpt.interval, config.store.keep) == (20, -1)
    assert (config.store.adapters.interval, config.store.adapters.keep) == (4, 7)
    assert (config.tailscale.enabled, config.tailscale.hostname_prefix, compiled().tailscale.enabled) == (
        True,
        "lab",
        False,
    )
    assert (config.output_dir, config.seq_len, config.seed) == ("outputs/mine", 8192, 3)


def test_limits_are_those_of_the_full_form() -> None:
    limits = {"time_s": 60.0, "turns": 3, "tokens": 500}
    measured = {"env": [{"id": "b", "limits": {"turns": 1}}]}
    orchestrator = compiled(env=[{"id": "a", "limits": limits}, {"id": "c"}], eval=measured, val={}).orchestrator
    assert [env.limits.model_dump() for env in orchestrator.train.env] == [limits, dict.fromkeys(limits)]
    found = {env.label: env.limits.model_dump(exclude_none=True) for env in orchestrator.eval.env}
    assert found == {"a-val": limits, "c-val": {}, "b": {"turns": 1}}
    with pytest.raises(ValueError, match=r"not below timeouts\.rollout_s"):
        compiled(env=[{"id": "a", "limits": {"time_s": 1e6}}])


def test_a_time_limit_of_an_environment_is_that_of_the_full_form() -> None:
    measured = {"env": [{"id": "b", "rollout_s": 30.0}]}
    orchestrator = compiled(env=[{"id": "a", "rollout_s": 60.0}, {"id": "c"}], eval=measured, val={}).orchestrator
    assert [env.rollout_s for env in orchestrator.train.env] == [60.0, None]
    assert {env.label: env.rollout_s for env in orchestrator.eval.env} == {"a-val": 60.0, "c-val": None, "b": 30.0}
    with pytest.raises(ValueError, match=r"rollout_s \(1000\) of environment 'a' is above timeouts.rollout_s \(600\)"):
        compiled(env=[{"id": "a", "rollout_s": 1000.0}])
    with pytest.raises(ValueError, match=r"limits.time_s \(60\) of environment 'a' is not below its rollout_s \(60\)"):
        compiled(env=[{"id": "a", "rollout_s": 60.0, "limits": {"time_s": 60.0}}])


def test_the_table_of_keys_is_whole() -> None:
    from primerl.config.hosted import compile as compiler

    documented = compiler.__doc__ or ""
    page = (REPOSITORY / "docs" / "hosted.md").read_text()
    for name in HostedConfig.model_fields:
        assert name in documented, name
        assert f"`{name}" in page, name


@pytest.mark.parametrize(("max_tokens", "seq_len"), [(1, 2048), (512, 2048), (513, 4096), (4096, 16384)])
def test_sequences_have_room_for_several_answers(max_tokens: int, seq_len: int) -> None:
    assert sequence_length(max_tokens) == seq_len


def test_weights_and_biases_is_told_or_refused() -> None:
    wandb = {"project": "p", "name": "n", "entity": "e"}
    if "wandb" in RLConfig.model_fields:
        assert compiled(wandb=wandb).model_dump()["wandb"].items() >= wandb.items()
    else:
        with pytest.raises(ValueError, match="wandb: this version"):
            compiled(wandb=wandb)


def variants() -> list[dict[str, Any]]:
    """Each key alone, all together, and seeded mixtures."""
    generator = random.Random(0)
    keys = list(MORE)
    chosen = [[key] for key in keys] + [keys] + [generator.sample(keys, generator.randint(2, 9)) for _ in range(24)]
    # Ratios are of two environments.
    return [{key: MORE[key] for key in {*some, *(["env"] if "buffer" in some else [])}} for some in chosen]


def test_the_full_form_that_is_written_is_the_same_run(tmp_path: Path) -> None:
    short, full = tmp_path / "short.toml", tmp_path / "rl.toml"
    for changes in variants():
        short.write_text(tomli_w.dumps({**LEAST, **changes}))
        config = load_run(["@", str(short), "--dry-run"], program="primerl rl")
        full.write_text(run_file.to_toml(config))
        again = load_run(["@", str(full), "--dry-run"], program="primerl rl")
        assert again == config
        assert run_file.to_toml(again) == full.read_text()
        # What is decided by whether it was given is decided alike.
        for of in (resolve.orchestrator, lambda config: resolve.trainer(config, "http://o:1")):
            assert of(again).config == of(config).config


def test_overrides_are_in_the_words_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text(tomli_w.dumps(LEAST))
    arguments = ["--max-steps", "3", "--sampling.temperature=0.5", "--val.interval", "2", "--env-file", "a", "b"]
    config = load_run(["@", str(file), *arguments], program="primerl rl")
    assert (config.max_steps, config.orchestrator.sampling.temperature) == (3, 0.5)
    assert [(env.label, env.interval) for env in config.orchestrator.eval.env] == [("reverse-text-val", 2)]
    assert config.env_files == ["a", "b"]


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "short.json"
    file.write_text(json.dumps(LEAST))
    assert load_run(["@", str(file)], program="primerl rl").model.path == "owner/name"
    file.write_text(json.dumps({**LEAST, "max_step": 1}))
    with pytest.raises(ConfigError, match=rf"^max_step \(in {file}\): unknown key; did you mean 'max_steps'"):
        load_run(["@", str(file)], program="primerl rl")


def test_the_command_line_alone_may_be_of_either_form() -> None:
    environment = '[{"id": "owner/e"}]'
    short = ["--model", "owner/name", "--max-steps", "1", "--batch-size", "4", "--rollouts-per-example", "2"]
    config = load_run([*short, "--sampling.max-tokens", "8", "--env", environment], program="primerl rl")
    assert (config.model.path, config.orchestrator.train.env[0].id) == ("owner/name", "owner/e")
    full = ["--model.path", "m", "--max-steps", "1", "--orchestrator.train.env", environment]
    assert load_run(full, program="primerl rl").orchestrator.train.env[0].id == "owner/e"


# Variables of env workers


def test_env_files_have_two_names_in_the_short_form() -> None:
    assert compiled(env_files=["a"]).env_files == compiled(env_file=["a"]).env_files == ["a"]
    # Nothing is said twice by naming none.
    assert compiled(env_files=["a"], env_file=[]).env_files == ["a"]


@pytest.mark.parametrize("key", ["env_files", "env_file"])
def test_files_of_variables_are_looked_for_beside_the_config(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "configs", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    for place, name in ((folder, "a.env"), (folder, "both.env"), (here, "both.env"), (here, "b.env")):
        env_file(place, f"WHERE={place.name}\n", name)
    absolute = str(here / "both.env")
    names = ["a.env", "both.env", "b.env", "~/a.env", absolute, "none.env"]
    (folder / "run.toml").write_text(tomli_w.dumps({**LEAST, key: names}))
    found = [str(folder / "a.env"), str(folder / "both.env"), *names[2:]]
    # Wherever the config is named from, and the same when its full form is gone on with.
    for file in ("../configs/run.toml", str(folder / "run.toml")):
        config = load_run(["@", file], program="primerl rl")
        assert config.env_files == found
    written = here / "rl.toml"
    written.write_text(run_file.to_toml(config))
    assert load_run(["@", str(written)], program="primerl rl").env_files[:2] == found[:2]
    # Of the command line they are what a shell shows.
    assert load_run(
        ["@", str(folder / "run.toml"), f"--{key.replace('_', '-')}", '["a.env"]'], program="primerl rl"
    ).env_files == ["a.env"]


def env_file(folder: Path, text: str, name: str = "secrets.env") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def test_env_files_reach_env_workers_only_and_no_file(tmp_path: Path) -> None:
    first = env_file(tmp_path, "# keys\nexport JUDGE_KEY='s3cret # 1'\nBASE=http://j\nURL=${BASE}/v1\n\nTWICE=a\n")
    second = env_file(tmp_path, 'TWICE="b"\n', "more.env")
    config = compiled(env_file=[first, second], output_dir=str(tmp_path / "run"))
    expected = {"JUDGE_KEY": "s3cret # 1", "BASE": "http://j", "URL": "http://j/v1", "TWICE": "b"}
    variables = secrets.of_workers(config)
    assert variables == {"reverse-text": expected}
    [worker] = resolve.env_workers(config, "http://o:1")
    told = secrets.with_variables(worker, variables)
    assert environment_of(told).items() >= expected.items()
    assert "s3cret" not in repr(told) + process_files.to_toml(told.config) + run_file.to_toml(config)
    for other in [resolve.orchestrator(config), resolve.trainer(config, "http://o:1")]:
        assert secrets.with_variables(other, variables).variables == {}
        assert "JUDGE_KEY" not in environment_of(other)


def test_env_files_are_read_once_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, files = secrets.read_file, []
    monkeypatch.setattr(secrets, "read_file", lambda file: files.append(file) or read(file))
    file = env_file(tmp_path, "A=1\n")
    environments = [{"id": "owner/a"}, {"id": "owner/a", "name": "again"}, {"id": "owner/b"}]
    config = compiled(env_file=[file], env=environments, output_dir=str(tmp_path / "run"))
    assert secrets.of_workers(config) == {"a": {"A": "1"}, "again": {"A": "1"}, "b": {"A": "1"}}
    assert files == [file]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\n\nB\n", "line 3: B has no value; write B=value"),
        ("A=1\nB='open\n", "line 2 cannot be read; write NAME=value, and quotes that are closed"),
        ("A=1\n1B=SECRET\n", "line 2: '1B' is no name of a variable; use letters, digits and '_'"),
        ("PRIMERL_API_KEY=SECRET\n", "line 1: PRIMERL_API_KEY is primerl's own; export it where primerl is started"),
    ],
)
def test_a_bad_line_of_an_env_file_is_named_without_its_value(tmp_path: Path, text: str, message: str) -> None:
    file = env_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        secrets.read_files([file])
    assert str(caught.value) == f"env_files: {file}, {message}"


def test_an_env_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^env_files: there is no file {tmp_path}/none; give the path"):
        secrets.read_files([str(tmp_path / "none")])
    (tmp_path / "bytes").write_bytes(b"A=\xff\n")
    for unreadable in (tmp_path, tmp_path / "bytes"):
        with pytest.raises(ConfigError, match=rf"^env_files: {unreadable} cannot be read: "):
            secrets.read_files([str(unreadable)])


# The model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with one model, on a machine that reaches no hub."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    for name, value in [("HF_HUB_CACHE", str(folder)), ("HF_HUB_OFFLINE", True)]:
        monkeypatch.setattr(constants, name, value)
    snapshot = folder / "models--owner--name" / "snapshots" / "0" / ""
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    refs = folder / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    return folder


def test_a_name_of_the_hub_is_looked_for_in_the_cache(cache: Path) -> None:
    config = hub.with_model(compiled())
    assert config.model.path == str(cache / "models--owner--name" / "snapshots" / "0")
    assert resolve.model_name(config) == "name"


def test_fine_tuning_begins_with_a_name_of_the_hub_too(cache: Path) -> None:
    given = {"output_dir": "out", "max_steps": 1, "data": {"path": "rows.jsonl"}}
    config = hub.with_start(SFTConfig.model_validate({**given, "model": {"path": "owner/name"}}))
    assert config.model.path == str(cache / "models--owner--name" / "snapshots" / "0")
    with pytest.raises(ConfigError, match=r"model\.path: there is no folder \S+/owner/none, nor a model 'owner/none'"):
        hub.with_start(SFTConfig.model_validate({**given, "model": {"path": "owner/none"}}))
    made = SFTConfig.model_validate({**given, "model": {"tiny": {}}})
    assert hub.with_start(made) is made


@pytest.mark.usefixtures("cache")
def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model\.path: there is no folder \S+/owner/none, nor a model 'owner/none' in the hub",
    ) as no:
        hub.with_model(compiled(model="owner/none"))
    assert "give the path of a model folder" in str(no.value)


@pytest.mark.parametrize(
    ("limit", "max_tokens", "given", "seq_len"),
    [
        (40960, 600, {}, 4096),
        (2048, 600, {}, 2048),
        (40960, 8193, {}, 40960),
        (1024, 64, {}, 1024),
        # What was given is not changed, and refused.
        (2048, 600, {"seq_len": 4096}, 4096),
        # No sequence holds such an answer: that is refused, not what follows from it.
        (512, 600, {}, 4096),
        (None, 600, {}, 4096),
    ],
)
def test_sequences_are_no_longer_than_the_model_can_attend_to(
    limit: int | None, max_tokens: int, given: dict[str, int], seq_len: int, tmp_path: Path
) -> None:
    model, file = tmp_path / "model", tmp_path / "run.toml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({} if limit is None else {"max_position_embeddings": limit}))
    changes = {"model": str(model), "sampling": {"max_tokens": max_tokens}, **given}
    file.write_text(tomli_w.dumps({**LEAST, **changes}))
    config = hub.with_model(load_run(["@", str(file)], program="primerl rl"))
    assert config.seq_len == seq_len
    # It goes on as it has begun, whatever the model says then.
    file.write_text(run_file.to_toml(config))
    assert tomllib.loads(file.read_text())["seq_len"] == seq_len
    assert load_run(["@", str(file)], program="primerl rl").seq_len == seq_len


def test_a_length_that_the_full_form_leaves_out_fits_the_model_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    train = {"batch_size": 8, "group_size": 4, "train": {"env": [{"id": "a"}]}}
    given = {"max_steps": 1, "model": {"path": str(tmp_path)}, "orchestrator": train}
    assert hub.with_model(RLConfig.model_validate(given)).seq_len == 1024
    assert hub.with_model(RLConfig.model_validate({**given, "seq_len": 2048})).seq_len == 2048


def test_a_folder_is_meant_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert hub.with_model(compiled()).model.path == "owner/name"
    # No name of the hub: the checks say that there is no such folder.
    assert hub.with_model(compiled(model="./no/such")).model.path == "./no/such"


# Other


def test_the_key_of_a_tailnet_is_kept_and_never_dumped() -> None:
    config = compiled(tailscale={"auth_key": "tskey-auth-SECRET", "hostname_prefix": "lab"})
    assert config.tailscale.auth_key is not None
    assert config.tailscale.auth_key.get_secret_value() == "tskey-auth-SECRET"
    assert config.model_dump(mode="json")["tailscale"]["hostname_prefix"] == "lab"
    assert "auth_key" not in config.model_dump()["tailscale"]
    assert "SECRET" not in repr(config) + run_file.to_toml(config)


@pytest.mark.processes
def test_a_worker_gets_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """A real process: what it allocates, and what a process that it starts does."""
    config = compiled(infrastructure={"compute_size": "S"}, output_dir=str(tmp_path))
    [worker] = resolve.env_workers(config, "http://o:1")
    assert isinstance(worker.config, EnvWorkerConfig)
    assert worker.config.memory_mb == 4096
    code = (
        "import subprocess, sys\nfrom primerl.envs.machine import limit_memory\nlimit_memory(512)\n"
        "def fits(mb):\n    try:\n        bytearray(mb << 20)\n        return True\n"
        "    except MemoryError:\n        return False\n"
        "child = subprocess.run([sys.executable, '-c', 'bytearray(3000 << 20)'], capture_output=True, text=True)\n"
        "print(fits(64), fits(600), child.stderr.strip().splitlines()[-1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout.strip() == "True False MemoryError", done.stderr


@pytest.mark.parametrize(("size", "workers", "memory_mb", "cpus"), [("S", 1, 4096, 1), ("M", 2, 8192, 2)])
def test_workers_are_spread_over_the_cores(size: str, workers: int, memory_mb: int, cpus: int, tmp_path: Path) -> None:
    changes = {"infrastructure": {"compute_size": size}, "env": [{"id": "a"}, {"id": "b"}], "val": {}}
    config = compiled(**changes, output_dir=str(tmp_path))
    told = [process.config for process in resolve.env_workers(config, "http://o:1")]
    assert len(told) == 4 * workers
    assert {(worker.memory_mb, worker.cpus) for worker in told} == {(memory_mb, cpus)}
    assert [worker.first_cpu for worker in told] == [number * cpus for number in range(len(told))]
    # As the file of the process has it, which a worker that is started again reads.
    read = from_mapping(WorkerConfig, tomllib.loads(process_files.to_toml(told[-1])))
    assert read.first_cpu == (len(told) - 1) * cpus


def test_workers_without_a_bound_are_told_none(tmp_path: Path) -> None:
    [worker] = resolve.env_workers(compiled(output_dir=str(tmp_path)), "http://o:1")
    assert (worker.config.cpus, worker.config.first_cpu) == (None, 0)


def test_the_example_is_in_the_short_form() -> None:
    file = REPOSITORY / "examples" / "reverse-text" / "hosted.toml"
    config = load_run(["@", str(file)], program="primerl rl")
    assert [env.label for env in config.orchestrator.eval.env] == ["reverse-text-val", "reverse-text-eval"]
    keys = set(tomllib.loads(file.read_text()))
    assert keys <= set(HostedConfig.model_fields)
    assert not list(itertools.chain(keys & {"orchestrator", "trainer"}))
