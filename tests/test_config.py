"""The config tree: what is accepted, what each process gets, and that every reader knows the same keys."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl.cli.processes import BadInputError, read_toml
from primerl.config.command_line.load import load
from primerl.config.describe.field_docs import field_doc
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.inference import InferenceConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.orchestrator import OrchestratorConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig, TinyModel
from primerl.config.schema.simulate import SimulateConfig
from primerl.config.schema.trainer import TrainerConfig
from primerl.launch.preflight.sft import LAUNCHER_ONLY
from primerl.models.tiny import TinyConfig
from pydantic import BaseModel, ValidationError

CONFIGS = [RLConfig, SFTConfig, TrainerConfig, OrchestratorConfig, InferenceRunConfig, EnvWorkerConfig, SimulateConfig]


def tree(**changes: Any) -> dict[str, Any]:
    """A small valid run; dotted keys change it."""
    values: dict[str, Any] = {
        "max_steps": 3,
        "model": {"path": "model"},
        "orchestrator": {
            "batch_size": 8,
            "group_size": 4,
            "sampling": {"max_tokens": 16},
            "train": {"env": [{"id": "reverse-text", "taskset": {"num_examples": 5}}]},
            "eval": {"env": [{"id": "reverse-text", "name": "held-out"}]},
        },
    }
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        node: Any = values
        for part in path:
            node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
        node[last] = value
    return values


def sections(cls: type[BaseModel]) -> set[type[BaseModel]]:
    """The config class and every section below it."""
    found = {cls}
    for info in cls.model_fields.values():
        for kind in kinds(info.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in found:
                found |= sections(kind)
    return found


def kinds(annotation: Any) -> list[Any]:
    arguments = typing.get_args(annotation)
    return [annotation] if not arguments else [kind for argument in arguments for kind in kinds(argument)]


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_knob_has_a_sentence(cls: type[BaseModel]) -> None:
    for section in sections(cls):
        for name, info in section.model_fields.items():
            described = field_doc(section, name) or any(
                isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__doc__
                for kind in kinds(info.annotation)
            )
            assert described, f"{section.__name__}.{name}"


def test_unknown_key_names_file_and_neighbour(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tree(orchestrator__bach_size=8)))
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["@", str(file)], program="primerl rl")
    assert str(caught.value) == f"orchestrator.bach_size (in {file}, line 9): unknown key; did you mean 'batch_size'?"


def test_unknown_key_in_a_list_and_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tree(orchestrator__train__env__0__ratioo=2)))
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["@", str(file), "--max-stepz", "4"], program="primerl rl")
    lines = str(caught.value).splitlines()
    assert f"orchestrator.train.env[0].ratioo (in {file}, line 14): unknown key; did you mean 'ratio'?" in lines
    assert "max_stepz (on the command line): unknown key; did you mean 'max_steps'?" in lines


TEACHER = {"base_url": "http://127.0.0.1:1/v1", "model": "teacher"}


def taught(mode: str) -> dict[str, Any]:
    return {"orchestrator__training_mode": mode, "orchestrator__teacher": {"client": dict(TEACHER)}}


@pytest.mark.parametrize(
    ("changes", "field", "mend"),
    [
        ({"max_steps": 0}, "max_steps", "greater than 0"),
        ({"max_steps": "many"}, "max_steps", "valid integer"),
        ({"max_steps": True}, "max_steps is true or false", "write the number"),
        ({"trainer__optim__lr": True}, "trainer.optim", ": lr is true or false, where a number"),
        ({"trainer__optim__betas": [False, 0.9]}, "trainer.optim", ": betas is true or false"),
        ({"trainer__optim__betas": "0.9; 0.95"}, "trainer.optim.betas", "expected two numbers, as in '[0.9, 0.95]'"),
        ({"trainer__threads": 100_000}, "trainer.threads", "less than or equal to 1024"),
        ({"inference__threads": 0}, "inference.threads", "greater than or equal to 1"),
        ({"seed": 2**63 - 1}, "seed", "less than or equal to"),
        ({"orchestrator__train__env__0__id": "../_"}, "orchestrator.train.env[0]", "set `name` to letters"),
        ({"orchestrator__batch_size": 10}, "orchestrator", "set batch_size to 8 or 12"),
        ({"orchestrator__min_group_size": 5}, "orchestrator", "at most group_size (4)"),
        ({"orchestrator__min_group_size": 1}, "orchestrator.min_group_size", "greater than or equal to 2"),
        ({"orchestrator__group_on_cancel": "keep"}, "orchestrator.group_on_cancel", "'refill' or 'drop'"),
        ({"orchestrator__admission__limit": "none"}, "orchestrator.admission.limit", "'adaptive' or 'fixed'"),
        ({"orchestrator__admission__min_per_engine": 300}, "orchestrator.admission", "move one of them"),
        ({"orchestrator__admission__evaluation_share": 1}, "orchestrator.admission.evaluation_share", "less than 1"),
        ({"orchestrator__train": {"env": []}}, "orchestrator.train.env", "at least 1 item"),
        ({"orchestrator__train": {"env": [{"id": "a"}] * 2}}, "orchestrator", "give one of them another `name`"),
        ({"orchestrator__train__env__0__name": "a/b"}, "orchestrator.train.env[0].name", "pattern"),
        ({"orchestrator__sampling__max_tokens": 4096}, "", "lower one or raise the other"),
        ({"orchestrator__sampling__top_p": 0.9}, "orchestrator.sampling", 'set truncated to "replay"'),
        (
            {"orchestrator__sampling__truncated": "replay", "orchestrator__sampling__top_p": 0},
            "orchestrator.sampling.top_p",
            "greater than 0",
        ),
        (
            {"orchestrator__sampling__truncated": "replay", "orchestrator__sampling__min_p": 2},
            "orchestrator.sampling.min_p",
            "less than or equal to 1",
        ),
        ({"orchestrator__sampling__top_k": -2}, "orchestrator.sampling.top_k", "greater than or equal to -1"),
        (
            {"orchestrator__sampling__temperature": 0.7, "inference__logprobs_mode": "raw_logprobs"},
            "",
            "omit inference.logprobs_mode",
        ),
        ({"orchestrator__buffer__hard_threshold": 0.8}, "orchestrator.buffer", "lower the first or raise the second"),
        ({"orchestrator__buffer__easy_threshold": float("nan")}, "orchestrator.buffer.easy_threshold", "finite"),
        ({"orchestrator__buffer__easy_fraction": 1.5}, "orchestrator.buffer.easy_fraction", "less than or equal to 1"),
        ({"orchestrator__buffer__env_ratios": [1, 2]}, "orchestrator", "one for each, in the order of train.env"),
        (
            {"orchestrator__buffer__env_ratios": [1], "orchestrator__train__env__0__ratio": 2},
            "orchestrator",
            "omit one of the two",
        ),
        ({"orchestrator__timeouts__rollout_s": 0}, "orchestrator.timeouts.rollout_s", "equal to 0.001"),
        ({"trainer__optim__lr": float("nan")}, "trainer.optim.lr", "finite"),
        ({"trainer__optim__schedule": "step"}, "trainer.optim.schedule", "'constant', 'linear', 'cosine' or 'wsd'"),
        ({"trainer__optim__type": "adam"}, "trainer.optim", "type is 'adam'; it must be one of 'adamw', 'muon', 'sgd'"),
        ({"trainer__loss__args": {"clip_low": 0.1}}, "trainer.loss", "unknown setting `args.clip_low`; known here"),
        ({"trainer__loss": {"type": "clip", "custom": "a:b"}}, "trainer.loss", "omit one of the two"),
        ({"trainer__weights__keep_last": 3}, "", "must be at least orchestrator.max_async_level + 2 (4)"),
        ({"orchestrator__training_mode": "opd"}, "orchestrator", "give [orchestrator.teacher.client]"),
        ({"orchestrator__teacher": {"client": TEACHER}}, "orchestrator", "omit teacher"),
        (
            taught("opd") | {"orchestrator__teacher__client__client_type": "openai_chat_completions"},
            "orchestrator",
            "gives log-probabilities of token ids; use renderer",
        ),
        (
            taught("sft") | {"orchestrator__teacher__client__base_url": ["http://a:1/v1", "http://b:1/v1"]},
            "orchestrator",
            "teacher.client.base_url names 2 servers, and only a teacher that scores",
        ),
        (
            taught("opd") | {"orchestrator__teacher__client__base_url": ["http://a:1/v1", "http://a:1/v1/"]},
            "orchestrator.teacher.client",
            "base_url names http://a:1/v1 twice",
        ),
        (
            taught("opd") | {"orchestrator__teacher__client__base_url": ["http://a:1/", "http://b:1", "http://a:1/v1"]},
            "orchestrator.teacher.client",
            "base_url names http://a:1/ twice",
        ),
        (
            taught("opd") | {"orchestrator__teacher__client__base_url": ["http://a:1/v1", 5]},
            "orchestrator.teacher.client.base_url",
            "it must be a URL like http://host:port/v1, or a list of URLs",
        ),
        (
            taught("opd") | {"orchestrator__teacher__client__base_url": []},
            "orchestrator.teacher.client",
            "base_url is an empty list",
        ),
        (
            taught("opd") | {"orchestrator__teacher__client__base_url": ["http://a:1/v1", "ftp://b:1/v1"]},
            "orchestrator.teacher.client",
            "base_url is no URL like",
        ),
        (
            taught("sft") | {"trainer__loss__rl_weight": 1},
            "",
            "trainer.loss.rl_weight is set, but orchestrator.training_mode",
        ),
        (taught("opd") | {"trainer__loss__ref_kl_weight": 0}, "", "trainer.loss.ref_kl_weight is 0"),
        (taught("opd") | {"trainer__loss__entropy_weight": 0.1}, "", "the bonus is over the rl tokens"),
        ({"trainer__loss__ref_kl_weight": 1}, "", "uses no such loss"),
        (
            taught("sft") | {"orchestrator__buffer__online_difficulty_filtering": True},
            "orchestrator",
            "learns from a teacher, not from rewards",
        ),
        ({"orchestrator__algorithm": {"type": "custom"}}, "orchestrator.algorithm", "set both or neither"),
        ({"orchestrator__algorithm__path": "no function"}, "orchestrator.algorithm.path", "pattern"),
        (
            {"orchestrator__train__env__0__algorithm": {"type": "rloo", "normalize_std": True}},
            "orchestrator.train.env[0].algorithm",
            "leave it false",
        ),
        (
            {"orchestrator__algorithm": {"type": "rloo", "length_penalty": {}}},
            "orchestrator.algorithm",
            "omit it, or set type to grpo or dr_grpo",
        ),
        ({"orchestrator__algorithm": {"decay": 0.5}}, "orchestrator.algorithm", 'type = "rae" only'),
        ({"orchestrator__algorithm": {"type": "rae", "decay": 1.0}}, "orchestrator.algorithm.decay", "less than 1"),
        (
            {"orchestrator__algorithm": {"type": "hierarchical_grpo"}},
            "orchestrator.algorithm",
            "set both or neither",
        ),
        ({"orchestrator__group_size": 1}, "orchestrator", "set group_size to at least 2"),
        ({"orchestrator__long_samples": "cut"}, "orchestrator.long_samples", "'drop' or 'truncate'"),
        ({"inference__replicas": 0}, "", "orchestrator.engines names no engine"),
        ({"inference__kv_cache_tokens": 100}, "", "inference.kv_cache_tokens (100) does not hold one sequence"),
        ({"inference__port": 4000, "orchestrator__port": 4000}, "", "choose another for one of them"),
        ({"orchestrator__client_type": "openai_chat_completions"}, "orchestrator", "nothing can be trained"),
        ({"orchestrator__client_type": "chat"}, "orchestrator.client_type", "'openai_chat_completions_token'"),
        (
            {"orchestrator__eval__env__0__client": {"base_url": "ftp://host/v1", "model": "m"}},
            "orchestrator.eval.env[0].client",
            "base_url is no URL like",
        ),
        (
            {"orchestrator__eval__env__0__client": {"base_url": "http://u:p@host/v1", "model": "m"}},
            "orchestrator.eval.env[0].client",
            "has a user",
        ),
        (
            {
                "orchestrator__eval__env__0__client": {
                    "base_url": "http://host/v1",
                    "model": "m",
                    "client_type": "renderer",
                }
            },
            "orchestrator.eval.env[0]",
            "which is for engines: messages go to this server",
        ),
        ({"inference__backend": "vlm"}, "inference.backend", "'torch'"),
        (
            {"ckpt__interval": 2, "trainer__ckpt__interval": 3},
            "ckpt and trainer.ckpt are the same settings",
            "omit one of them",
        ),
        (
            {"ckpt__resume_step": 4, "clean_output_dir": True},
            "clean_output_dir deletes the checkpoint that ckpt.resume_step names",
            "omit one of the two",
        ),
        (
            {"ckpt__weights__save_adapter_separately": True},
            "ckpt.weights.save_adapter_separately (in ",
            "there is no `model.lora`, so no adapter to save",
        ),
    ],
)
def test_refusal_names_the_field_and_the_mend(tmp_path: Path, changes: dict[str, Any], field: str, mend: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tree(**changes)))
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["@", str(file)], program="primerl rl")
    assert str(caught.value).startswith(field)
    assert mend in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Config file not found: .*absent\.toml"):
        load(RLConfig, ["@", str(tmp_path / "absent.toml")], program="primerl rl")
    broken = tmp_path / "broken.toml"
    broken.write_text("max_steps = = 3\n")
    with pytest.raises(ConfigError, match=r"Invalid TOML in .*broken\.toml"):
        load(RLConfig, ["@", str(broken)], program="primerl rl")
    broken.write_bytes(b'output_dir = "\xff"\n')
    for unreadable in (tmp_path, broken):
        with pytest.raises(ConfigError, match=rf"^{unreadable} cannot be read"):
            load(RLConfig, ["@", str(unreadable)], program="primerl rl")


def test_overrides_win_over_the_file_and_flags_need_no_value(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tree()))
    arguments = ["@", str(file), "--max-steps", "9", "--orchestrator.batch-size=16", "--clean-output-dir"]
    arguments += ["--orchestrator.algorithm.shuffle-advantages", "--no-dry-run"]
    config = load(RLConfig, arguments, program="primerl rl")
    assert (config.max_steps, config.orchestrator.batch_size, config.clean_output_dir) == (9, 16, True)
    assert config.orchestrator.algorithm.shuffle_advantages
    assert not config.dry_run


@pytest.mark.parametrize("name", ["ckpt", "trainer.ckpt"])
def test_checkpoints_are_asked_for_by_either_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tree()))

    def given(*flags: str) -> TrainerConfig:
        config = load(RLConfig, ["@", str(file), *flags], program="primerl rl")
        trainer = resolve.trainer(config, "http://o:1").config
        assert isinstance(trainer, TrainerConfig)
        return trainer

    assert given().ckpt is None
    # By itself: one, at the end.
    at_end = given(f"--{name}").ckpt
    assert at_end is not None
    assert at_end.interval is None
    assert not given(f"--{name}").can_go_on
    often = given(f"--{name}.interval", "5", f"--{name}.keep-last", "2", f"--{name}.resume-step", "-1")
    assert often.ckpt is not None
    assert often.can_go_on
    assert (often.ckpt.interval, often.ckpt.keep_last) == (5, 2)
    # The launcher goes back, once.
    assert often.ckpt.resume_step is None


def test_paths_of_fine_tuning_are_whole_before_any_process_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = SFTConfig.model_validate({**SFT, "output_dir": "~/run", "model": {"path": "~/m"}, "data": {"path": "a/b"}})
    resolved = resolve.sft(config)
    assert (resolved.output_dir, resolved.model.path) == ("/home/someone/run", "/home/someone/m")
    assert resolved.data.path == "a/b", "it may be a dataset of the hub"


SFT = {"max_steps": 1, "output_dir": "o", "model": {"path": "m"}, "data": {"path": "d"}}


@pytest.mark.parametrize(("config", "values"), [(RLConfig, tree()), (SFTConfig, SFT)])
def test_a_dry_run_does_not_delete(config: type[BaseModel], values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(values))
    with pytest.raises(ConfigError, match="a dry run deletes nothing; omit clean_output_dir"):
        load(config, ["@", str(file), "--dry-run", "--clean-output-dir"], program="primerl")


@pytest.mark.parametrize("given", [("[0.8, 0.99]",), ("0.8,0.99",)])
def test_a_pair_of_numbers_on_the_command_line(tmp_path: Path, given: tuple[str, ...]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tree()))
    arguments = ["@", str(file), "--trainer.optim.betas", *given, "--max-steps", "6"]
    config = load(RLConfig, arguments, program="primerl rl")
    assert (config.trainer.optim.betas, config.max_steps) == ((0.8, 0.99), 6)


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(f"a = {'[' * 50_000}{']' * 50_000}\n")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(RLConfig, ["@", str(file)], program="primerl rl")
    with pytest.raises(BadInputError, match="nested too deeply"):
        read_toml(file)


@pytest.mark.parametrize(
    ("train", "evaluated", "names"),
    [
        ([{"id": "a"}], [{"id": "b"}, {"id": "o/c@1"}], ["b", "c"]),
        ([{"id": "a"}], [{"id": "b", "name": "held-out"}], ["held-out"]),
        ([{"id": "a"}], [{"id": "a"}, {"id": "b"}], ["a-eval", "b"]),
        ([{"id": "a", "name": "b"}], [{"id": "a"}], ["a"]),
    ],
)
def test_the_orchestrator_knows_environments_by_the_names_of_their_workers(
    train: list[dict[str, str]], evaluated: list[dict[str, str]], names: list[str]
) -> None:
    entries = {"train": {"env": train}, "eval": {"env": evaluated}}
    config = RLConfig.model_validate({**tree(), "orchestrator": entries})
    orchestrator = resolve.orchestrator(config).config
    assert isinstance(orchestrator, OrchestratorConfig)
    workers: dict[str, list[str]] = {"train": [], "eval": []}
    for process in resolve.env_workers(config, "http://o:1"):
        assert isinstance(process.config, EnvWorkerConfig)
        workers[process.config.role].append(process.config.environment)
    assert workers["eval"] == names
    assert [environment.name for environment in orchestrator.eval.env] == workers["eval"]
    assert [environment.name for environment in orchestrator.train.env] == workers["train"]


def test_each_process_gets_its_part() -> None:
    config = RLConfig.model_validate(tree(keep_broadcasts=True, seed=7, seq_len=256))
    orchestrator = resolve.orchestrator(config).config
    assert isinstance(orchestrator, OrchestratorConfig)
    assert [environment.name for environment in orchestrator.train.env] == ["reverse-text"]
    assert orchestrator.eval.env[0].sampling.max_tokens == 16
    assert orchestrator.retention.keep_spool, "verify needs what was trained"
    (engine,) = resolve.inference(config, "http://o:1")
    assert isinstance(engine.config, InferenceConfig)
    assert (engine.config.join, engine.config.max_model_len, engine.config.seed) == ("http://o:1", 256, 7)
    train, held_out = resolve.env_workers(config, "http://o:1")
    assert isinstance(train.config, EnvWorkerConfig)
    assert train.config.args == {"taskset": {"num_examples": 5}}
    assert train.file.name == "env_reverse-text_0.toml"
    assert train.log.parts[-4:] == ("envs", "train", "reverse-text", "env_worker_0.log")
    assert held_out.log.parts[-4:] == ("envs", "eval", "held-out", "env_worker_0.log")
    trainer = resolve.trainer(config, "http://o:1").config
    assert isinstance(trainer, TrainerConfig)
    assert trainer.weights.keep_all
    assert trainer.max_steps == 3
    assert trainer.environments == ["reverse-text"]


@pytest.mark.parametrize(
    ("model", "changes", "packed"),
    [
        ({"model_type": "qwen3"}, {}, True),
        ({"model_type": "qwen3"}, {"trainer__shared_prefixes": "off"}, False),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, {}, False),
        ({"model_type": "nemotron_h"}, {}, False),
        (None, {}, False),
    ],
)
def test_batches_are_packed_as_trees_where_the_trainer_can_share(
    tmp_path: Path, model: dict[str, Any] | None, changes: dict[str, Any], packed: bool
) -> None:
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model))
    config = RLConfig.model_validate(tree(model__path=str(tmp_path), **changes))
    assert resolve.orchestrator(config).config.model_dump()["shared_prefixes"] is packed
    own = resolve.orchestrator(config, own_trainer=True)
    assert own.config.model_dump()["shared_prefixes"] is False, "a training loop of one's own"


@pytest.mark.parametrize(("backend", "seeds"), [("torch", [7, 7]), ("vllm", [7, 8])])
def test_replicas_that_seed_requests_by_their_ids_share_the_runs_seed(backend: str, seeds: list[int]) -> None:
    config = RLConfig.model_validate(tree(seed=7, inference__replicas=2, inference__backend=backend))
    engines = [engine.config for engine in resolve.inference(config, "http://o:1")]
    assert [engine.seed for engine in engines if isinstance(engine, InferenceConfig)] == seeds


@pytest.mark.parametrize(
    ("backend", "given", "expected"),
    [
        ("vllm", {"enforce-eager": True}, {"enforce-eager": True, "trust-remote-code": True}),
        ("vllm", {"trust-remote-code": False}, {"trust-remote-code": False}),
        ("torch", {}, {}),
        # The engine refuses them by name.
        ("torch", {"enforce-eager": True}, {"enforce-eager": True}),
    ],
)
def test_only_vllm_is_told_to_trust_a_models_code(
    backend: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    changes = {"inference__backend": backend, "inference__vllm": given, "model__trust_remote_code": True}
    (engine,) = resolve.inference(RLConfig.model_validate(tree(**changes)), "http://o:1")
    assert isinstance(engine.config, InferenceConfig)
    assert engine.config.vllm == expected


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "raw_logprobs"),
        ({"orchestrator__sampling__temperature": 0.7}, "processed_logprobs"),
        ({"orchestrator__sampling__truncated": "replay"}, "processed_logprobs"),
        ({"inference__logprobs_mode": "processed_logprobs"}, "processed_logprobs"),
    ],
)
def test_engines_give_the_log_probabilities_the_run_needs(changes: dict[str, Any], mode: str) -> None:
    (engine,) = resolve.inference(RLConfig.model_validate(tree(**changes)), "http://o:1")
    assert isinstance(engine.config, InferenceConfig)
    assert engine.config.logprobs_mode == mode


def test_weights_an_engine_may_still_load_are_kept() -> None:
    for level, kept in [(0, 4), (5, 7)]:
        config = RLConfig.model_validate(tree(orchestrator__max_async_level=level))
        trainer = resolve.trainer(config, "http://o:1").config
        assert isinstance(trainer, TrainerConfig)
        assert trainer.weights.keep_last == kept


def dataclass_keys(cls: Any) -> dict[str, Any]:
    """Field names of a dataclass, with those of nested ones."""
    hints = typing.get_type_hints(cls)
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        nested = [kind for kind in kinds(hints[field.name]) if dataclasses.is_dataclass(kind)]
        keys[field.name] = dataclass_keys(nested[0]) if nested else None
    return keys


def model_keys(cls: type[BaseModel]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, info in cls.model_fields.items():
        nested = [kind for kind in kinds(info.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        keys[name] = model_keys(nested[0]) if nested else None
    return keys


def defaults_of(cls: Any) -> list[str]:
    """Fields of a dataclass, and of those within, that have a default which is not None."""
    found = []
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING or field.default not in (dataclasses.MISSING, None):
            found.append(f"{cls.__name__}.{field.name}")
    for hint in typing.get_type_hints(cls).values():
        found += [name for kind in kinds(hint) if dataclasses.is_dataclass(kind) for name in defaults_of(kind)]
    return found


# Config class, reader, and keys the command itself acts on before the reader is called.
READERS = {
    "trainer": (TrainerConfig, "primerl.train.settings:TrainerConfig", set()),
    "sft": (SFTConfig, "primerl.train.sft_settings:SFTConfig", LAUNCHER_ONLY),
    "inference": (InferenceConfig, "primerl.inference.settings:InferenceConfig", set()),
    "env-worker": (EnvWorkerConfig, "primerl.envs.settings:WorkerConfig", set()),
}


@pytest.mark.parametrize("process", READERS)
def test_process_reads_the_same_keys_and_has_no_defaults(process: str) -> None:
    written, location, extra = READERS[process]
    module, name = location.split(":")
    read = getattr(importlib.import_module(module), name)
    keys = {name: value for name, value in model_keys(written).items() if name not in extra}
    assert keys == dataclass_keys(read)
    # The tiny model's are its own, as those of a loss's options are.
    assert [name for name in defaults_of(read) if not name.startswith("TinyConfig.")] == []


def test_defaults_of_the_tiny_model_are_its_own() -> None:
    assert TinyModel().model_dump() == dataclasses.asdict(TinyConfig())


def test_sections_refuse_unknown_keys_everywhere() -> None:
    for cls in CONFIGS:
        for section in sections(cls):
            with pytest.raises(ValidationError, match="no_such_key"):
                section.model_validate({"no_such_key": 1})


def test_union_types_are_seen_by_the_comparison() -> None:
    assert kinds(int | None) == [int, types.NoneType]


def tables(cls: type[BaseModel], path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], set[str]]:
    """Keys of each table of a file, by where the table is."""
    found = {path: set(cls.model_fields)}
    for name, info in cls.model_fields.items():
        for kind in kinds(info.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                many = typing.get_origin(info.annotation) is list
                found |= tables(kind, (*path, name, 0) if many else (*path, name))
    return found


@pytest.mark.processes
def test_native_orchestrator_reads_the_same_keys(tmp_path: Path) -> None:
    """Its own refusal of an unknown key lists what it knows, table by table."""
    config = RLConfig.model_validate(tree(output_dir=str(tmp_path / "run")))
    whole = resolve.orchestrator(config).config.model_dump(mode="json", exclude_none=True)
    for path, keys in tables(OrchestratorConfig).items():
        if "worker" in path:  # handed on to workers that join, which read it
            continue
        values = copy.deepcopy(whole)
        node: Any = values
        for part in path:
            # A table that may be left out is not there.
            node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        node["no_such_key"] = 1
        file = tmp_path / "orchestrator.toml"
        file.write_text(tomli_w.dumps(values))
        command = [sys.executable, "-m", "primerl", "orchestrator", "--config", str(file), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        match = re.search(r"unknown field `no_such_key`, expected (.*)", done.stderr)
        assert match, done.stderr
        assert set(re.findall(r"`(\w+)`", match[1])) == keys, path


def test_the_loss_follows_from_the_training_mode() -> None:
    def weights(**changes: Any) -> tuple[float, float, float]:
        loss = RLConfig.model_validate(tree(**changes)).trainer.loss
        return loss.rl_weight, loss.ce_weight, loss.ref_kl_weight

    assert weights() == (1, 0, 0)
    assert weights(**taught("opd")) == (0, 0, 1)
    assert weights(**taught("sft")) == (0, 1, 0)
    assert weights(**taught("opd"), trainer__loss__rl_weight=0) == (0, 0, 1)
    assert weights(**taught("opd"), trainer__loss__rl_weight=0.5, trainer__loss__ref_kl_weight=2) == (0.5, 0, 2)
    assert RLConfig.model_validate(tree(**taught("opd"), orchestrator__group_size=1)).orchestrator.teacher
    mixed = [{"id": "a"}, {"id": "b", "training_mode": "opd", "teacher": {"client": dict(TEACHER)}}]
    assert weights(orchestrator__train={"env": mixed}) == (1, 0, 1)
    assert weights(**taught("sft"), orchestrator__train={"env": mixed}) == (0, 1, 1)
    for changes, said in (
        ({"trainer__loss__ce_weight": 1}, 'training_mode "opd" and "rl" use no such loss'),
        ({"trainer__loss__rl_weight": 0}, 'rl_weight is 0, but it is what orchestrator.training_mode "rl" trains'),
        ({"trainer__loss__ref_kl_weight": 0}, 'ref_kl_weight is 0, but it is what orchestrator.training_mode "opd"'),
    ):
        with pytest.raises(ValidationError, match=said):
            weights(orchestrator__train={"env": mixed}, **changes)


def test_an_environments_own_groups_teacher_and_sampling() -> None:
    def checked(*environments: dict[str, Any], **changes: Any) -> Any:
        given = {"orchestrator__train": {"env": list(environments)}, **changes}
        return RLConfig.model_validate(tree(**given)).orchestrator

    teacher = {"client": dict(TEACHER)}
    replay = {"orchestrator__sampling": {"max_tokens": 100, "truncated": "replay"}}
    (own,) = checked({"id": "a", "sampling": {}}, orchestrator__sampling={"max_tokens": 100}).train.env
    assert own.sampling.max_tokens == 100
    found = checked({"id": "a", "sampling": {"top_p": 0.9}}, {"id": "b"}, **replay)
    own = found.train.env[0].sampling
    assert (own.top_p, own.max_tokens, own.truncated, found.train.env[1].sampling) == (0.9, 100, "replay", None)
    assert [key for key, _ in found.samplings()] == ["orchestrator.sampling", "orchestrator.train.env[0].sampling"]
    # Groups of 3 and 8: a batch is no multiple of either.
    assert checked({"id": "a", "group_size": 3}, {"id": "b"}, orchestrator__batch_size=20).batch_size == 20
    for environments, changes, said in (
        ([{"id": "a", "sampling": {"top_p": 0.9}}], {}, "orchestrator.train.env.0.sampling"),
        ([{"id": "a", "sampling": {"max_tokens": 4096}}], {}, r"train.env\[0\].sampling.max_tokens \(4096\) must be"),
        ([{"id": "a", "group_size": 1}], {}, r"train.env\[0\].group_size is 1"),
        ([{"id": "a", "group_size": 3}], {"orchestrator__batch_size": 8}, "must be a multiple of group_size"),
        ([{"id": "a", "group_size": 3}, {"id": "b", "group_size": 9}], {"orchestrator__batch_size": 8}, "at least the"),
        ([{"id": "a"}], {"orchestrator__token_batch_size": 99, "orchestrator__batch_size": 64}, "omit one of them"),
        ([{"id": "a"}], {"orchestrator__token_batch_size": 0}, "token_batch_size"),
        ([{"id": "a", "demonstration": {}}], {}, r"train.env\[0\].demonstration \({}\) is read only with"),
        ([{"id": "a"}], {"orchestrator__demonstration": {"key": "x"}}, "demonstration.key is read only with"),
        ([{"id": "a", "training_mode": "opsd", "teacher": teacher}], {}, "learns from the policy itself"),
        (
            [{"id": "a", "training_mode": "opsd", "demonstration": {"template": "x"}}],
            {},
            r"template has no \{demonstration\}",
        ),
        ([{"id": "a", "algorithm": {"echo": {"tool": 0}}}], {}, "system, user, assistant and tool are all 0"),
        ([{"id": "a", "teacher": teacher}], {}, r"train.env\[0\].teacher is given, but"),
        ([{"id": "a", "training_mode": "opd"}], {}, r"train.env\[0\].training_mode \(opd\) learns from a teacher"),
        ([{"id": "a", "training_mode": "rl"}], taught("opd"), "teacher is given, but"),
    ):
        with pytest.raises(ValidationError, match=said):
            checked(*environments, **changes)
