"""How flags of a command line are read: what a key takes decides, `--key=value` is `--key value`, slips are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl.config.command_line import flags
from primerl.config.command_line.load import load
from primerl.config.describe import forms
from primerl.config.describe.fields import Knob
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted import HostedConfig
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from pydantic import BaseModel
from test_config import SFT, tree

VALUES = {"true or false": "false", "list of tables": '[{"a": -1}]'}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(tomli_w.dumps(tree()))
    Path("sft.toml").write_text(tomli_w.dumps(SFT))


def rl(*arguments: str) -> RLConfig:
    return load(RLConfig, ["@", "run.toml", *arguments], program="primerl rl")


def said(cls: type[BaseModel], *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        flags.read(cls, list(arguments))
    return str(caught.value)


def a_value(knob: Knob) -> str:
    if knob.kind in VALUES:
        return VALUES[knob.kind]
    return "[-1, -2]" if knob.kind.startswith("list") else '{"a": 1}' if knob.kind.startswith("table") else "-1"


@pytest.mark.parametrize("form", forms.FORMS)
def test_every_key_takes_its_value_by_a_space_or_an_equals_sign(form: str) -> None:
    cls = forms.FORMS[form].cls
    for knob in forms.tree(form).all_knobs():
        name, value = "--" + knob.path.replace("[]", ".0").replace("_", "-"), a_value(knob)
        (spaced,) = flags.read(cls, [name, value])
        (joined,) = flags.read(cls, [f"{name}={value}"])
        assert spaced == joined, knob.path
        assert spaced.value != {}, knob.path
        if not knob.path.endswith(".type"):  # of several sections
            (dashed,) = flags.read(cls, [f"--{knob.path.replace('[]', '[0]')}", value])
            assert dashed.place == spaced.place


def test_optional_sections_and_values_with_dashes() -> None:
    config = rl("--ckpt.interval=20", "--ckpt.resume-step=-1", "--wandb.name=--odd", "--wandb.tags=a,b")
    assert config.ckpt is not None
    assert (config.ckpt.interval, config.ckpt.resume_step) == (20, -1)
    assert config.wandb is not None
    assert (config.wandb.name, config.wandb.tags) == ("--odd", ["a,b"])
    both = load(
        SFTConfig, ["@", "sft.toml", "--ckpt.resume-step=-1", "--val.data.path=held-out"], program="primerl sft"
    )
    assert both.ckpt is not None
    assert both.ckpt.resume_step == -1
    assert both.val is not None
    assert both.val.data.path == "held-out"


def test_lists_tables_and_switches() -> None:
    config = rl(
        *("--env-files=a.env", "--orchestrator.engines", "http://a:1", "http://b:1", "--dry-run=false"),
        *("--inference.vllm.max-logprobs=4", '--orchestrator.sampling.chat-template-kwargs={"on": true}'),
        *("--orchestrator.train.env.0.taskset.deep.letters", "a-j", "--orchestrator.train.env.0.args.strict"),
        "--no-orchestrator.train.env.0.args.loose",
    )
    assert (config.env_files, config.orchestrator.engines) == (["a.env"], ["http://a:1", "http://b:1"])
    assert (config.inference.vllm, config.dry_run) == ({"max_logprobs": 4}, False)
    assert config.orchestrator.sampling.chat_template_kwargs == {"on": True}
    (environment,) = config.orchestrator.train.env
    assert environment.taskset == {"num_examples": 5, "deep": {"letters": "a-j"}}
    assert environment.args == {"strict": True, "loose": False}
    without = rl(
        "--orchestrator.train.env.0.taskset.num-examples", "None", '--inference.vllm={"seed": null, "quick": {}}'
    )
    assert (without.orchestrator.train.env[0].taskset, without.inference.vllm) == ({}, {"quick": {}})
    with pytest.raises(ConfigError, match=r"taskset \(on the command line\): a\.b\[1\] is null, which lists of TOML"):
        rl("--orchestrator.train.env.0.taskset", '{"a": {"b": [1, null]}}')


def test_the_last_one_counts_and_none_leaves_out() -> None:
    assert rl("--max-steps=4", "--max-steps", "5").max_steps == 5
    assert rl("--max-steps", "5", "--max-steps=4").max_steps == 4
    assert (
        rl("--orchestrator.min-group-size", "2", "--orchestrator.min-group-size=None").orchestrator.min_group_size
        is None
    )
    assert rl("--ckpt", "--ckpt=None").ckpt is None
    assert rl("--inference.dtype", "None").inference.dtype is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-steps.x", "1"], "--max-steps.x: max_steps has no keys of its own (integer); give --max-steps VALUE"),
        (["--model.path"], "--model.path requires a value"),
        (["--max-steps", "--dry-run"], "--max-steps requires a value"),
        (
            ["--clean-output-dir", "maybe"],
            "--clean-output-dir maybe: a switch is true or false; give it alone, or --no-clean-output-dir to turn it "
            "off (a config file is given as `@ FILE.toml`)",
        ),
        (["--dry-run", "--max-steps", "3", "run.toml"], "Unrecognized arguments: run.toml; a config file is given as"),
        (["--no-dry-run=1"], "--no-dry-run takes no value; give --dry-run VALUE, or --no-dry-run alone"),
        (
            ["--trainer", "mine"],
            "--trainer mine: [trainer] is a section; set keys of it, as in --trainer.dtype VALUE "
            "(or `--trainer external`: it is the only word that is known)",
        ),
        (["--trainer"], "--trainer: [trainer] is a section; set keys of it, as in --trainer.dtype VALUE"),
        (["--wandb", "sk-SECRET"], "--wandb: [wandb] is a section; set keys of it, as in --wandb.project VALUE"),
        (
            ["--orchestrator.train.env.id", "x"],
            "name an entry by its number, counted from 0, as in --orchestrator.train.",
        ),
        (["--orchestrator.train.env", "x"], "--orchestrator.train.env: a list of tables is given as JSON, as in"),
        (["--env-files", "[a"], "--env-files: the value is not valid JSON: Expecting value: line 1 column 2"),
        (["--inference.vllm", "[1]"], "--inference.vllm: the value is no table; give --inference.vllm '{\"key\": ..}'"),
        (["--orchestrator.train.env={}"], "--orchestrator.train.env: a list of tables is given as JSON"),
        (["--"], "--: no key has such a name; give --KEY VALUE"),
        (["--model..path=3"], "--model..path: no key has such a name; give --KEY VALUE"),
        (["--ckpt", "None", "--ckpt.interval=3"], "--ckpt unsets [ckpt], and --ckpt.interval gives it"),
    ],
)
def test_slips_are_named(arguments: list[str], message: str) -> None:
    found = said(RLConfig, *arguments)
    assert message in found
    assert "SECRET" not in found


def test_entries_of_the_short_form_are_named_by_their_number() -> None:
    assert said(HostedConfig, "--env.zero.id", "x") == (
        "--env.zero.id: env is a list of tables; name an entry by its number, counted from 0, as in --env.0.id"
    )
    (flag,) = flags.read(HostedConfig, ["--env.0.taskset.toolsets.search.tools", '["a:b"]'])
    assert flag.place == ("env", 0, "taskset", "toolsets", "search", "tools")
    (free,) = flags.read(HostedConfig, ["--env.0.taskset.split=7"])
    assert free.value == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--foo.bar=3"], "foo (on the command line): unknown key; known keys here: "),
        (["--no-such.key"], "no_such (on the command line): unknown key"),
        (["--model.0.path", "x"], "model.0 (on the command line): unknown key; known keys here: name, path"),
        (["--ckpt.interval=0"], "ckpt.interval (on the command line): Input should be greater than 0 (it is '0')"),
        (["--clean-output-dir=maybe"], "clean_output_dir (on the command line): Input should be a valid boolean"),
    ],
)
def test_what_the_class_refuses_is_on_the_command_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rl(*arguments)
    assert str(caught.value).startswith(message)


def test_short_flags_of_other_commands_take_an_equals_sign_too() -> None:
    from primerl.cli.evaluation_arguments import written_out

    given: list[Any] = [
        load(EvalConfig, written_out(["a-env", *more]), program="primerl eval")
        for more in (["-m=model", "-n=8", "-k=2"], ["-m", "model", "-n", "8", "-k", "2"])
    ]
    assert given[0] == given[1]
    assert (given[0].num_examples, given[0].rollouts_per_example) == (8, 2)
