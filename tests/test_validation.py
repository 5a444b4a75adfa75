"""Validation: examples that are held out and never trained, measured as `val/<name>`."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from primerl.config.hosted import HostedConfig, compile_hosted
from primerl.config.hosted.compile import written_at
from primerl.config.process_files import resolve, run_file
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.rl import RLConfig
from primerl.envs.generations import v1
from primerl.monitors.collect import evaluation_metrics

TASK = {"split": "train", "num_examples": 20, "letters": "a-j"}


def config(val: dict[str, Any] | None, **environment: Any) -> RLConfig:
    trained = {"id": "reverse-text", "taskset": TASK, "num_workers": 2, **environment}
    orchestrator: dict[str, Any] = {"train": {"env": [trained]}, "eval": {"env": [{"id": "sort-letters"}]}}
    if val is not None:
        orchestrator["val"] = val
    return RLConfig.model_validate({"max_steps": 1, "model": {"path": "m"}, "orchestrator": orchestrator})


def workers(given: RLConfig) -> dict[str, EnvWorkerConfig]:
    found = {}
    for process in resolve.env_workers(given, "http://o:1"):
        assert isinstance(process.config, EnvWorkerConfig)
        found[process.name] = process.config
    return found


def test_validation_holds_examples_out_of_training() -> None:
    given = config({"num_examples": 8, "interval": 3})
    validation, other = given.orchestrator.eval.env
    assert (validation.label, validation.validates, validation.num_examples) == ("reverse-text-val", "reverse-text", 8)
    assert (validation.interval, validation.rollouts_per_example, validation.base_model) == (3, 1, True)
    assert (validation.arguments, validation.num_workers) == ({"taskset": TASK}, 2)
    assert (other.label, other.validates) == ("sort-letters", None)
    assert {name: worker.held_out for name, worker in workers(given).items()} == {
        "env_reverse-text_0": 8,
        "env_reverse-text_1": 8,
        "env_reverse-text-val_0": 0,
        "env_reverse-text-val_1": 0,
        "env_sort-letters_0": 0,
    }
    assert {worker.held_out for worker in workers(config(None)).values()} == {0}


def test_a_split_of_the_taskset_takes_the_place_of_held_out_examples() -> None:
    given = config({"num_examples": None, "taskset": {"split": "eval"}})
    validation = given.orchestrator.eval.env[0]
    assert (validation.num_examples, validation.taskset) == (None, {**TASK, "split": "eval"})
    assert {worker.held_out for worker in workers(given).values()} == {0}


@pytest.mark.parametrize(
    ("val", "environment", "said"),
    [
        ({"num_examples": None}, {}, "none is left to train on; give how many, or name the validation split"),
        ({"num_examples": 0}, {}, "greater than 0"),
        ({"num_examples": 8}, {"held_out": 3}, "its held_out is 3; omit one of the two"),
        ({"num_examples": 8, "taskset": {"split": "eval"}}, {"harness": {"id": 1}, "args": {"harness": {}}}, "harness"),
    ],
)
def test_what_cannot_be_validated_is_refused(val: dict[str, Any], environment: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        config(val, **environment)
    assert said in str(refused.value)


def test_one_environment_is_validated_by_one_evaluation() -> None:
    tree: dict[str, Any] = {"max_steps": 1, "model": {"path": "m"}}
    tree["orchestrator"] = {"train": {"env": [{"id": "a"}]}, "val": {}}
    tree["orchestrator"]["eval"] = {"env": [{"id": "a", "name": "mine", "validates": "a"}]}
    with pytest.raises(ValueError, match=r"val validates 'a', and so does eval\.env 'mine'"):
        RLConfig.model_validate(tree)
    tree["orchestrator"]["eval"]["env"][0]["validates"] = "b"
    del tree["orchestrator"]["val"]
    with pytest.raises(ValueError, match=r"validates \(b\) is no training environment"):
        RLConfig.model_validate(tree)


def by_hand(evaluated: dict[str, Any], **trained: Any) -> RLConfig:
    environments = {
        "train": {"env": [{"id": "reverse-text", "name": "a", "taskset": TASK, **trained}]},
        "eval": {"env": [{"id": "reverse-text", "name": "mine", "validates": "a", "taskset": TASK, **evaluated}]},
    }
    return RLConfig.model_validate({"max_steps": 1, "model": {"path": "m"}, "orchestrator": environments})


@pytest.mark.parametrize(
    ("evaluated", "trained", "said"),
    [
        (
            {"num_examples": 8},
            {},
            "measures the first 8 examples, and none of them is held out of training; set num_ex",
        ),
        ({"num_examples": 8}, {}, "held_out = 8 in train.env 'a', or name the validation split in taskset"),
        ({"num_examples": 8}, {"held_out": 5}, "the first 8 examples, and only 5 of them are held out"),
        (
            {},
            {"held_out": 5},
            "measures all examples, and only 5 of them are held out of training; set num_examples = 5",
        ),
        ({}, {}, "measures all examples, and none of them is held out of training; set num_examples = N here"),
        ({"num_examples": 5, "harness": {"id": "null"}}, {}, "none of them is held out"),
        (
            {"id": "sort-letters", "num_examples": 5},
            {"held_out": 5},
            "validates (a) is environment 'reverse-text', and this one is 'sort-letters', whose examples are others",
        ),
    ],
)
def test_what_is_trained_cannot_validate(evaluated: dict[str, Any], trained: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"eval\.env 'mine': validates \(a\) ") as refused:
        by_hand(evaluated, **trained)
    assert said in str(refused.value)


def test_held_out_examples_and_splits_validate() -> None:
    by_hand({"num_examples": 5}, held_out=5)
    by_hand({"num_examples": 4, "harness": {"id": "null"}}, held_out=5)
    by_hand({"taskset": {**TASK, "split": "eval"}})
    by_hand({"args": {"split": "eval"}})
    with pytest.raises(ValueError, match="none of them is held out of training"):
        config({"num_examples": 8, "taskset": {"split": TASK["split"]}})


def test_what_is_written_down_can_be_changed_and_read_again() -> None:
    written = tomllib.loads(run_file.to_toml(config({"num_examples": 8})))
    assert "held_out" not in written["orchestrator"]["train"]["env"][0]
    assert [entry["id"] for entry in written["orchestrator"]["eval"]["env"]] == ["sort-letters"]
    written["orchestrator"]["val"]["num_examples"] = 5
    again = RLConfig.model_validate(written)
    assert again.orchestrator.train.env[0].held_out == 5
    assert again == RLConfig.model_validate(again.model_dump()), "what was read is read as it is"
    alone = RLConfig.model_validate({**written, "orchestrator": {"train": {"env": [{"id": "a"}]}, "val": {}}})
    assert "eval" not in tomllib.loads(run_file.to_toml(alone))["orchestrator"]


def test_the_held_out_examples_and_the_others_are_the_whole_list() -> None:
    v1.prepare()
    env = v1.load("reverse-text", {"taskset": TASK}, "http://127.0.0.1:1/v1")

    def texts(seed: int, held_out: int = 0) -> list[str]:
        return [task.data.text for task in v1.list_examples(env, "reverse-text", seed, held_out=held_out)]

    validated, trained = texts(3)[:8], texts(3, 8)
    assert validated + trained == texts(3)
    assert not set(validated) & set(trained)
    assert texts(4)[:8] != validated, "the seed says which"
    with pytest.raises(v1.EnvironmentRefusedError, match=r"has 20 examples, and 20 are held out .* none is left"):
        texts(3, 20)


def test_the_short_form_says_it_in_the_same_words() -> None:
    short: dict[str, Any] = {"model": "m", "max_steps": 1, "batch_size": 4, "rollouts_per_example": 2}
    short |= {"sampling": {"max_tokens": 9}, "env": [{"id": "o/a"}], "eval": {"env": [{"id": "o/b"}]}}
    full = compile_hosted(HostedConfig.model_validate({**short, "val": {}}))
    assert full["orchestrator"]["val"]["num_examples"] == 64
    # A place in the full form is that of the key in the short one, although validations come first in the run.
    assert [entry["id"] for entry in full["orchestrator"]["eval"]["env"]] == ["o/b"]
    assert written_at(("orchestrator", "eval", "env", 0, "id")) == ("eval", "env", 0, "id")
    assert written_at(("orchestrator", "val", "num_examples")) == ("val", "num_examples")
    labels = [entry.label for entry in RLConfig.model_validate(full).orchestrator.eval.env]
    assert labels == ["a-val", "b"]
    with pytest.raises(ValueError, match="name the validation split in taskset"):
        HostedConfig.model_validate({**short, "val": {"num_examples": -1}})
    split = HostedConfig.model_validate({**short, "val": {"num_examples": -1, "taskset": {"split": "eval"}}})
    validation = RLConfig.model_validate(compile_hosted(split)).orchestrator.eval.env[0]
    assert (validation.num_examples, validation.taskset) == (None, {"split": "eval"})


def test_monitors_tell_validations_by_the_training_environment() -> None:
    line = {"environment": "a-val", "validates": "a", "version": 3, "avg@1": 0.5, "metrics": {"exact": 1.0}}
    metrics = evaluation_metrics("a-val", line)
    assert (metrics["val/a/avg@1"], metrics["val/a/exact"]) == (0.5, 1.0)
    assert all(name.startswith("val/a/") for name in metrics)
