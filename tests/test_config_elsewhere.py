"""Names of prime-rl and Hosted Training that are none here, or mean another thing: each is told what to write."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import settings_helpers
import tomli_w
from primerl.config.command_line.load import load
from primerl.config.describe import fields, forms
from primerl.config.errors import foreign_keys
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.sft import SFTConfig
from primerl.train.sft_settings import SFTConfig as Settings

FULL: dict[str, Any] = {
    "max_steps": 1,
    "model": {"path": "m"},
    "orchestrator": {
        "batch_size": 8,
        "group_size": 4,
        "train": {"env": [{"id": "a"}]},
        "eval": {"env": [{"id": "b"}]},
    },
}
SHORT: dict[str, Any] = {
    "model": "owner/name",
    "max_steps": 1,
    "batch_size": 8,
    "rollouts_per_example": 4,
    "sampling": {"max_tokens": 8},
    "env": [{"id": "a"}],
    "eval": {"env": [{"id": "b"}]},
}
SFT: dict[str, Any] = {
    "output_dir": "o",
    "max_steps": 1,
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "val": {},
}
FORMS = {
    "rl": (FULL, foreign_keys.PRIME_RL),
    "hosted": (SHORT, foreign_keys.HOSTED),
    "sft": ({**SFT, "val": {"data": {"path": "d.jsonl"}}}, foreign_keys.PRIME_RL_SFT),
}
# What is here too, and means another thing.
KNOWN = {
    "rl": {
        "model.name",
        "orchestrator.train.env.taskset.id",
        "orchestrator.eval.env.taskset.id",
        "trainer.loss.type = default",
        "trainer.loss.type = custom",
    },
    "hosted": {"loss", "env.taskset.id", "eval.env.taskset.id"},
    "sft": {"data.subsets"},
}
UNKNOWN = [(form, key) for form, (_, names) in FORMS.items() for key in names if key not in KNOWN[form]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_key(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The config with the key in it; of a list, in its first entry."""
    config = deepcopy(config)
    node = config
    *tables, name = key.split(".")
    for table in tables:
        node = node.setdefault(table, {})
        node = node[0] if isinstance(node, list) else node
    node[name] = 1
    return config


def refusal(form: str, config: dict[str, Any]) -> str:
    Path("run.toml").write_text(tomli_w.dumps(config))
    read = partial(load, SFTConfig) if form == "sft" else load_run
    with pytest.raises(ConfigError) as caught:
        read(["@", "run.toml"], program="primerl")
    return re.sub(r"\[\d+\]| \(in run.toml, line \d+\)", "", str(caught.value))


@pytest.mark.parametrize(("form", "key"), UNKNOWN)
def test_a_name_of_another_program_is_told_what_to_write(form: str, key: str) -> None:
    config, names = FORMS[form]
    assert refusal(form, with_key(config, key)) == f"{key}: no key here: {names[key]}"


@pytest.mark.parametrize("form", FORMS)
def test_what_means_another_thing_here_is_a_key(form: str) -> None:
    for key in KNOWN[form]:
        # A taskset has any settings.
        name = key.split(" = ")[0].removesuffix(".id")
        assert fields.find(forms.tree(form), name) is not None, key
        assert key in FORMS[form][1]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_to_be_written_exists(form: str) -> None:
    sections = {knob.path.split(".")[0] for knob in forms.tree(form).all_knobs()}
    seen = 0
    for key, reason in FORMS[form][1].items():
        for word in re.findall(r"(?<![\w./{])([a-z_]+(?:\.[a-z_]+)+)(?![\w/])", reason):
            is_full = word.startswith(("orchestrator.", "trainer."))
            if word.split(".")[0] not in sections and not is_full:
                continue
            # The short form sends some users to the full one.
            tree = forms.tree("rl" if is_full else form)
            assert fields.find(tree, word) is not None, (key, word)
            seen += 1
    assert seen > (50 if form == "rl" else 1)


def test_a_model_by_its_name_is_told_of_the_path() -> None:
    said = refusal("rl", {**FULL, "model": {"name": "owner/name"}})
    assert said.startswith("model.path: missing; it has no default, so set it; the model is model.path")
    # Who gave neither is told what is missing, and no more.
    assert refusal("rl", {**FULL, "model": {"tie": 1}}).startswith(
        "model.path: missing; it has no default, so set it\n"
    )


def test_what_is_missing_is_not_explained_by_other_keys() -> None:
    """Each of these is told where it stands; of the missing key they say nothing."""
    given = {**{name: value for name, value in FULL.items() if name != "max_steps"}, "slurm": {"a": 1}, "tokenizer": 1}
    first, *others = refusal("rl", given).splitlines()
    assert first == "max_steps (in run.toml): missing; it has no default, so set it"
    assert len(others) == 2
    env = {"name": "b", "max_turns": 3, "timeout": 4}
    said = refusal("rl", {**FULL, "orchestrator": {**FULL["orchestrator"], "train": {"env": [env]}}})
    assert "orchestrator.train.env.id: missing; it has no default, so set it\n" in said + "\n"


@pytest.mark.parametrize("form", ["rl", "sft"])
def test_a_table_where_there_is_a_list_is_told_what_was_meant(form: str) -> None:
    base = FORMS[form][0]
    assert refusal(form, {**base, "monitors": {"mine": {"path": "a:B"}}}) == (
        "monitors: `monitors` is a list: write `[[monitors]]` instead of `[monitors.mine]`"
    )
    assert refusal(form, {**base, "monitors": {"path": "a:B"}}) == (
        "monitors: `monitors` is a list: write `[[monitors]]` instead of `[monitors]`"
    )


def test_environments_of_a_fine_tuning_are_told_of_their_command() -> None:
    said = refusal("sft", {**FORMS["sft"][0], "eval": {"env": [{"id": "a"}]}})
    assert said.startswith("eval: no key here: rows are measured by [val]")
    assert "primerl eval" in said


def test_an_id_within_the_taskset_is_told_of_its_place() -> None:
    mend = "the environment's id is not in taskset but next to it: as id"
    for form, config in (("rl", FULL), ("hosted", SHORT)):
        for place in ("train", "eval"):
            given = deepcopy(config)
            tables = given["orchestrator"] if form == "rl" else {"train": given, "eval": given["eval"]}
            entry = tables[place]["env"][0]
            entry["taskset"] = {"id": entry.pop("id"), "split": "train"}
            assert refusal(form, given).endswith(f"env.id: missing; it has no default, so set it; {mend}")


def test_a_value_of_another_program_is_told_of_ours() -> None:
    config = {**FULL, "trainer": {"loss": {"type": "default"}}}
    assert 'prime-rl\'s "default" is "dppo"' in refusal("rl", config)
    assert "prime-rl" not in refusal("rl", {**FULL, "trainer": {"loss": {"type": "no_such"}}})


def test_datasets_of_prime_rl_are_told_of_tables() -> None:
    config = {**SFT, "data": {"name": "owner/data", "subsets": ["a", "b"]}}
    del config["val"]
    assert "they are tables here: [[data.subsets]] with path" in refusal("sft", config)


def test_what_hosted_training_ignores_or_has_by_default_is_taken() -> None:
    Path("run.toml").write_text(tomli_w.dumps({**SHORT, "loss": "rl", "eval": {"interval": 10}}))
    config = load_run(["@", "run.toml"], program="primerl rl")
    assert config.orchestrator.eval.env == []


@pytest.mark.parametrize(("data", "is_told"), [({"name": "owner/data"}, True), ({}, False), ({"path": "d"}, None)])
def test_a_dataset_by_its_name_is_told_of_the_path(data: dict[str, str], is_told: bool | None) -> None:
    settings = {"output_dir": "o", "max_steps": 1, "model": {"path": "m"}, "data": data}
    message = settings_helpers.refusal(Settings, settings)
    if is_told is None:
        assert not message
        return
    assert message.startswith("data: give either `path` or")
    assert ("prime-rl calls that `name`" in message) == is_told
