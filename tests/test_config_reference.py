"""What is told about keys: help, explain, schemas, and the page that is generated."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from primerl.cli import main
from primerl.cli.config import schema
from primerl.config.describe import fields, forms, reference
from primerl.config.describe.help import UnknownFieldError, explain
from primerl.config.schema.base import Section
from pydantic import Field
from test_config import CONFIGS

COMMANDS = [name for name, form in forms.FORMS.items() if not form.called]


class ShortSampling(Section):
    """How it is sampled."""

    max_tokens: int
    """Longest answer."""


class Short(Section):
    """Another shape of config."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    sampling: ShortSampling


def said(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main([*arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    return capsys.readouterr().out


def test_every_config_is_a_form() -> None:
    assert {form.cls for form in forms.FORMS.values()} >= set(CONFIGS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_can_be_explained_and_means_something(name: str) -> None:
    for knob in forms.tree(name).all_knobs():
        assert fields.find(forms.tree(name), knob.path) is not None
        assert knob.meaning, knob.path
        assert knob.kind, knob.path
        assert "|" not in knob.kind, knob.path


@pytest.mark.parametrize(
    ("annotation", "is_one"),
    [
        (Literal["a", "b"], True),
        (Literal["a"] | None, True),
        (Annotated[Literal["a"], Field()], True),
        (Literal["a"] | int, True),
        (int | Literal["a"], False),
        (list[Literal["a"]], False),
        (str | None, False),
    ],
)
def test_a_key_of_a_few_values_is_known_as_a_choice(annotation: Any, is_one: bool) -> None:
    assert fields.is_choice(annotation) is is_one
    assert fields.type_text(annotation).startswith("one of ") is is_one


def test_explain_tells_type_default_bound_reader_and_the_other_places() -> None:
    assert explain("trainer.optim.lr").splitlines() == [
        "trainer.optim.lr  (primerl rl)",
        "  Peak learning rate.",
        "",
        "  type       number",
        "  default    1e-5",
        "  bound      > 0",
        "  read by    the trainer",
        "  in a file  [trainer.optim] lr = ..",
        "  or         --trainer.optim.lr on the command line",
        "  also       primerl sft: optim.lr; primerl trainer: optim.lr",
    ]


@pytest.mark.parametrize("asked", ["env[].ratio", "env.ratio", "env[0].ratio", "env.0.ratio"])
def test_keys_of_lists_are_found_however_they_are_written(asked: str) -> None:
    text = explain(f"--orchestrator.train.{asked}")
    assert text.startswith("orchestrator.train.env[].ratio  (primerl rl)")
    assert "[[orchestrator.train.env]] ratio = .." in text
    assert "read by    the orchestrator" in text


def test_explain_shows_sections_and_both_forms_of_a_key() -> None:
    section = explain("orchestrator.sampling")
    assert "[orchestrator.sampling]  (primerl rl)" in section
    assert "max_tokens  integer, > 0; 512" in section
    both = explain("max_steps")
    assert "max_steps  (primerl rl)" in both
    assert "max_steps  (primerl sft)" in both
    assert "(primerl rl)" not in explain("max_steps", "sft")


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("lr", "trainer.optim.lr"),
        ("trainer.optim.lrr", "trainer.optim.lr"),
        ("orchestrator.samplin", "orchestrator.sampling"),
    ],
)
def test_an_unknown_key_has_the_nearest_ones(asked: str, near: str) -> None:
    with pytest.raises(UnknownFieldError, match=rf"did you mean .*\b{re.escape(near)}\b"):
        explain(asked)
    with pytest.raises(UnknownFieldError, match=r"sections are .*\bmodel, store, ckpt"):
        explain("zzzzzzzzz")


@pytest.mark.parametrize("name", forms.FORMS)
def test_how_a_key_is_written_is_valid_toml(name: str) -> None:
    for knob in forms.tree(name).all_knobs():
        if not isinstance(fields.find(forms.tree(name), knob.path), fields.Knob):
            continue  # explained as a section
        (line,) = re.findall(r"in a file  (.*)", re.sub(r"\n {13}", " ", explain(knob.path, name)))
        header, _, key = line.removesuffix(" = ..").rpartition(" ")
        tree: Any = tomllib.loads(f"{header}\n{key} = 1\n")
        for part in re.sub(r"\[\]", "", knob.path).split("."):
            tree = tree[0][part] if isinstance(tree, list) else tree[part]
        assert tree == 1, knob.path


def test_sections_whose_names_are_the_users_have_a_level_for_them() -> None:
    for asked in (
        "env.taskset.toolsets.tools",
        "env[].taskset.toolsets.NAME.tools",
        "env.taskset.toolsets.search.tools",
    ):
        assert "[env.taskset.toolsets.NAME] tools = .." in explain(asked, "hosted")
    assert explain("env.taskset.toolsets", "hosted").startswith("[env.taskset.toolsets.NAME]  (primerl rl, short form)")
    assert "### `[env.taskset.toolsets.NAME]`" in reference.page()


@pytest.mark.parametrize(
    ("form", "path", "fact"),
    [
        ("hosted", "sampling.temperature", "number, 0.001 to 10; 1.0"),
        ("hosted", "checkpoints.keep_cloud", "integer, -1 or at least 1; 5"),
        ("hosted", "adapters.keep_last", "integer, -1 or at least 1; 3"),
        ("hosted", "val.num_examples", "integer, -1 or at least 1; 64"),
        ("hosted", "eval.env[].num_examples", "integer, -1 or at least 1; unset"),
        ("hosted", "max_steps", "integer, > 0; required"),
        ("rl", "store.keep", "integer, -1 or at least 1; 5"),
        ("rl", "orchestrator.sampling.top_p", "number, > 0, <= 1; 1.0"),
        ("rl", "orchestrator.sampling.min_p", "number, 0 to 1; 0.0"),
        ("rl", "tailscale.hostname_prefix", 'string, 1 to 30 of a-z, 0-9 and -, the first a letter; "primerl"'),
        ("rl", "tailscale.auth_key", "string; unset"),
        ("rl", "wandb.api_key", "string; unset"),
        ("rl", "inference.max_num_seqs", "integer, > 0, <= 65536; 128"),
        ("rl", "orchestrator.oversampling_factor", "number, 1 to 1000; 1.0"),
    ],
)
def test_types_and_bounds_are_those_that_are_checked(form: str, path: str, fact: str) -> None:
    knob = fields.find(forms.tree(form), path)
    assert isinstance(knob, fields.Knob)
    assert f"{knob.kind}{', ' + knob.bound if knob.bound else ''}; {knob.default}" == fact


def test_explain_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gradients" in said("config", "explain", "optim.max_norm", "--of", "sft", capsys=capsys).lower()
    assert main(["config", "explain", "no.such.key"]) == 2
    assert "there is no key or section 'no.such.key'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_fits_a_terminal_and_says_where_the_rest_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = forms.FORMS[name].command.removeprefix("primerl ")
    text = said(*command.split(), "--help", capsys=capsys)
    assert text.startswith(f"usage: primerl {command} @ FILE.toml")
    assert len(text.splitlines()) <= 80
    assert max(map(len, text.splitlines())) <= 80
    for most_used in forms.FORMS[name].most_used:
        assert f"--{most_used.replace('[]', '.0').replace('_', '-')}" in text
    everything = said(*command.split(), "--help-all", capsys=capsys)
    assert all(f"  {knob.name}  " in everything for knob in forms.tree(name).all_knobs())
    for hint in re.findall(rf"primerl {command} --help (\S+)|primerl config explain (\S+)", text):
        assert explain("".join(hint), name)


def test_help_names_the_other_form_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "  primerl rl @ SHORT_FORM.toml --help " in said("rl", "--help", capsys=capsys)
    (tmp_path / "short.toml").write_text('model = "owner/name"\n')
    short = said("rl", "@", str(tmp_path / "short.toml"), "--help", capsys=capsys)
    assert "--rollouts-per-example" in short
    assert "SHORT_FORM" not in short
    assert "  primerl env-worker --join --help " in said("env-worker", "--help", capsys=capsys)


def test_help_of_a_section_and_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[trainer.optim]  (primerl rl)" in said("rl", "--help", "trainer.optim", capsys=capsys)
    assert "[trainer.optim]  (primerl rl)" in said("rl", "--help=trainer.optim", capsys=capsys)
    assert main(["rl", "--help", "trainer.optimm"]) == 2
    assert "did you mean trainer.optim" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_schema_has_every_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(said("config", "schema", "--of", name, capsys=capsys))
    assert schema["additionalProperties"] is False
    tables = [schema, *schema.get("$defs", {}).values()]
    known = {key for table in tables for key in table.get("properties", {})}
    assert {knob.name for knob in forms.tree(name).all_knobs()} <= known


def test_another_form_of_a_command_is_told_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of another shape that the same command reads."""
    monkeypatch.setitem(forms.FORMS, "short", forms.Form("primerl rl", f"{__name__}:Short", called="short form"))
    assert explain("learning_rate", "short").startswith(
        "learning_rate  (primerl rl, short form)\n  Peak learning rate."
    )
    assert "[sampling]  (primerl rl, short form)" in explain("sampling", "short")
    assert forms.form_of(Short) == "short"
    page = reference.page()
    assert "## `primerl rl`, short form" in page
    assert "| `learning_rate` | number, `> 0` | `0.0001` |" in page


def test_the_committed_page_is_what_is_generated(repository: Path) -> None:
    page = repository / "docs" / "configuration.md"
    assert page.read_text() == reference.page(), "run `make reference`"


def test_the_native_binary_has_the_defaults_and_bounds_of_the_classes(repository: Path) -> None:
    compiled_in = repository / "rust/primerl-orchestrator/src/config/schema.json"
    assert json.loads(compiled_in.read_text()) == schema("orchestrator"), "run `make reference`"


def test_the_page_has_every_key_and_no_dead_link() -> None:
    page = reference.page()
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= set(anchors)
    for name in forms.FORMS:
        for table in forms.tree(name).all_tables():
            if table.path:
                assert reference.anchor(name, table.path, table.variant) in anchors
    rows = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    assert {knob.name for name in forms.FORMS for knob in forms.tree(name).all_knobs()} <= rows


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    assert main(["config", "reference", "--output", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == reference.page()


def test_who_reads_a_key_of_a_run_is_known() -> None:
    known = {knob.path: forms.FORMS["rl"].read_by(knob.path) for knob in forms.tree("rl").all_knobs()}
    assert known["orchestrator.train.env[].taskset"] == "the env workers"
    assert known["inference.max_num_seqs"] == "the engines"
    for role in ("train", "eval"):
        assert known[f"orchestrator.{role}.env[].metrics_port"] == "the env workers"
        assert known[f"orchestrator.{role}.env[].python.path"].startswith("the launcher, ")
    assert forms.FORMS["eval"].read_by("env[].python.requirements").startswith("the launcher, ")
    stale = {path for path in forms.RL_READERS if path and fields.find(forms.tree("rl"), path) is None}
    assert not stale


@pytest.mark.parametrize("name", ["rl", "sft"])
def test_what_commands_share_is_listed_after_what_they_are_for(name: str) -> None:
    paths = [table.path for table in forms.tree(name).tables]
    assert paths[-3:] == ["wandb", "monitors[]", "monitor"]
    assert not paths[0].startswith(("wandb", "monitor"))
