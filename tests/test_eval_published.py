"""What verifiers' commands and files say of an evaluation, as keys of `primerl eval`."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl import cli
from primerl.cli.evaluation_arguments import expanded, written_out
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.evaluation import EvalConfig
from primerl.evals import endpoints
from primerl.launch.preflight import checker

ENDPOINTS = """\
[[endpoint]]
endpoint_id = "mine"
model = "org/the-model"
api_base_url = "http://127.0.0.1:9/v1"
api_key_var = "MY_KEY"
type = "openai_chat_completions"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "endpoints.toml").write_text(ENDPOINTS, encoding="utf-8")
    return tmp_path


def config(*arguments: str) -> EvalConfig:
    return load(EvalConfig, written_out(list(arguments)), program="primerl eval")


def asked(*arguments: str) -> tuple[str, str | None, str | None]:
    found = config(*arguments)
    return found.model, found.base_url, found.api_key_env


def test_a_models_name_is_looked_for_among_endpoints_then_at_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ("org/the-model", "http://127.0.0.1:9/v1", "MY_KEY")
    assert asked("env", "-m", "mine") == mine
    assert asked("env", "--model=mine", "-p", "openai") == mine, "the file comes first"
    assert asked("env", "-m", "mine", "-b", "http://e/v1", "-k", "OTHER") == ("org/the-model", "http://e/v1", "OTHER")
    assert asked("env", "-m", "gpt", "-p", "openai") == ("gpt", "https://api.openai.com/v1", "OPENAI_API_KEY")
    assert asked("env", "-m", "x", "-p", "local") == ("x", "http://localhost:8000/v1", None)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert asked("env", "-m", "x", "-p", "local")[2] == "VLLM_API_KEY"
    assert asked("env", "-m", "folder") == ("folder", None, None), "a checkpoint"
    Path("elsewhere").mkdir()
    Path("elsewhere/endpoints.toml").write_text(ENDPOINTS.replace("mine", "other"), encoding="utf-8")
    assert asked("env", "-m", "other", "-e", "elsewhere") == mine
    assert asked("env", "-m", "mine", "-e", "elsewhere") == ("mine", None, None)
    others = ENDPOINTS.replace("mine", "claude").replace("openai_chat_completions", "anthropic_messages")
    Path("configs/endpoints.toml").write_text(ENDPOINTS + others, encoding="utf-8")
    assert asked("env", "-m", "mine") == mine, "the other one is not asked"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[endpoint]\nmodel = 'x'", r"`endpoint` is a list of tables; write \[\[endpoint\]\]"),
        (ENDPOINTS.replace("api_key_var", "client_type"), "endpoint 1: unknown key 'client_type'"),
        (
            ENDPOINTS.replace('api_key_var = "MY_KEY"\n', ""),
            "endpoint 1: `key` is missing, or is no text; give the NAME",
        ),
        (ENDPOINTS.replace('"org/the-model"', "5"), "endpoint 1: `model` is missing, or is no text"),
        (ENDPOINTS + 'url = "http://other/v1"', "url and its other name differ"),
        (ENDPOINTS.replace("_chat_completions", "_responses"), "primerl asks servers by openai_chat_completions only"),
        (ENDPOINTS + 'headers = { A = "b" }', "headers: primerl sends a key and no headers"),
        (ENDPOINTS + ENDPOINTS.replace(":9/", ":8/"), "two endpoints are called 'mine', and differ"),
        ("endpoint = [", "Invalid TOML in configs/endpoints.toml"),
    ],
)
def test_a_file_of_endpoints_that_cannot_be_used(text: str, said: str) -> None:
    endpoints.DEFAULT.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as refused:
        config("env", "-m", "mine")
    assert "\n" not in str(refused.value)


def test_options_of_prime_eval_run() -> None:
    found = config(
        *(
            "run",
            "a",
            "b",
            "-m",
            "mine",
            "-n",
            "-1",
            "-r",
            "2",
            "-t",
            "9",
            "-c",
            "3",
            "-w",
            "2",
            "-s",
            "-A",
            "-d",
            "-v",
        ),
        *("-S", '{"temperature": 0.5, "reasoning_effort": "low"}', "--timeout", "30"),
        *("-a", '{"k": 1, "config": {"taskset": {"split": "eval"}}}'),
    )
    assert (found.num_examples, found.rollouts_per_example, found.max_tokens, found.concurrency) == (None, 2, 9, 3)
    assert (found.temperature, found.timeouts.rollout_s, found.log.level) == (0.5, 30.0, "debug")
    assert found.chat_template_kwargs == {"reasoning_effort": "low"}
    for entry in found.env:
        assert (entry.args, entry.taskset, entry.num_workers) == ({"k": 1}, {"split": "eval"}, 2)
    assert config("a", "-m", "mine", "-k", "4").rollouts_per_example == 4, "the k of pass@k"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env", "-m", "x", "-p", "nowhere"], "provider: there is no 'nowhere'; there are prime, openai"),
        (["env", "-p", "openai"], "--provider: there is no model to ask it for"),
        (["env", "-m", "x", "-a", "{"], "--env-args: the value is not valid JSON"),
        (["env", "-m", "x", "-a", "[1]"], "--env-args: the value is no table"),
        (["env", "-m", "x", "-a"], "--env-args requires a value"),
        (["-m", "x", "-a", "{}"], "there is no environment to give it to"),
        (["env", "-m", "x", "-S", '{"top_p": 0.5}'], "--sampling-args: sampling argument 'top_p' has no counterpart"),
        (["env", "-m", "x", "-w", "many"], "--num-workers: 'many' is no number"),
        (["env", "-m", "x", "-C", "state"], "-C has no counterpart: results.jsonl has messages"),
        (["env", "-m", "x", "--resume", "folder"], "--output-dir resumes an evaluation"),
        (["env", "eval.toml"], "eval.toml and env are both given"),
        (["eval.toml", "@", "other.toml"], "stands alone; give no other file"),
        (["eval.toml", "-a", "{}"], "write `env_args` there"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("eval.toml").write_text('model = "m"\n[[eval]]\nenv_id = "a"\n', encoding="utf-8")
    Path("other.toml").write_text("", encoding="utf-8")
    assert cli.main(["eval", "run", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 2


FILE = """\
model = "m"
max_tokens = 100
num_examples = 7

[[eval]]
id = "owner/a"
rollouts_per_example = 2
args = { level = 3 }

[[eval]]
env_id = "owner/a"
num_examples = -1
temperature = 0.0
[eval.taskset]
split = "eval"
"""


def of_file(text: str, *arguments: str) -> list[EvalConfig]:
    Path("eval.toml").write_text(text, encoding="utf-8")
    return [load(EvalConfig, given, program="primerl eval") for given in expanded(["eval.toml", *arguments])]


def test_a_file_of_evaluations() -> None:
    [found] = of_file(FILE)
    assert (found.model, found.base_url) == ("m", None)
    first, second = found.env
    assert (first.id, first.label, second.label) == ("owner/a", "a", "a-2")
    assert (first.num_examples, first.rollouts_per_example, first.max_tokens, first.temperature) == (7, 2, 100, 1.0)
    assert (second.num_examples, second.rollouts_per_example, second.temperature) == (None, 3, 0.0)
    assert (first.args, second.taskset) == ({"level": 3}, {"split": "eval"})
    [changed] = of_file(FILE, "-m", "mine", "-n", "2", "-t", "5", "--dry-run")
    assert (changed.model, changed.api_key_env, changed.dry_run) == ("org/the-model", "MY_KEY", True)
    assert [(entry.num_examples, entry.max_tokens) for entry in changed.env] == [(None, None)] * 2
    assert (changed.num_examples, changed.max_tokens) == (2, 5)
    [same] = [load(EvalConfig, given, program="primerl eval") for given in expanded(["@", "eval.toml"])]
    assert same == found


def test_several_models_follow_each_other_and_a_sweep_is_every_combination() -> None:
    several = 'model = "m"\n[[eval]]\nenv_id = "a"\n[[eval]]\nenv_id = "b"\nendpoint_id = "mine"\n'
    assert [(one.model, one.base_url, one.env[0].id) for one in of_file(several)] == [
        ("m", None, "a"),
        ("org/the-model", "http://127.0.0.1:9/v1", "b"),
    ]
    with pytest.raises(ConfigError, match="has evaluations of 2 models or settings, each with a folder of its own"):
        of_file(several, "-o", "there")
    swept = 'model = "m"\n[[ablation]]\nenv_id = "a"\n[ablation.sweep]\ntemperature = [0.0, 1.0]\n'
    [found] = of_file(f"{swept}[ablation.sweep.args]\nlevel = [1, 2]\n")
    assert [(entry.label, entry.temperature, entry.args["level"]) for entry in found.env] == [
        ("a", 0.0, 1),
        ("a-2", 0.0, 2),
        ("a-3", 1.0, 1),
        ("a-4", 1.0, 2),
    ]


def test_evaluations_are_made_until_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(Path("state").absolute()))
    monkeypatch.setattr(checker, "environments_ahead", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("primerl.forking.servers.begin", lambda *_, **__: None)
    made: list[str] = []
    codes = {"m": 1, "org/the-model": 0, "n": 0}

    def run(config: EvalConfig) -> int:
        made.append(config.model)
        return codes[config.model]

    monkeypatch.setattr("primerl.launch.evaluation.run", run)
    entries = [f"[[eval]]\nenv_id = 'a'\nmodel = '{model}'\n" for model in ("m", "mine", "n")]
    Path("eval.toml").write_text("".join(entries), encoding="utf-8")
    assert cli.main(["eval", "run", "eval.toml"]) == 1
    assert made == ["m", "org/the-model", "n"]
    made.clear()
    codes["org/the-model"] = 130
    assert cli.main(["eval", "run", "eval.toml"]) == 130
    assert made == ["m", "org/the-model"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_exmples": 3}, "eval.toml.num_exmples: unknown key; did you mean 'num_examples'?"),
        ({"model": None}, "`model` is missing; give it, or --model"),
        ({"endpoint_id": "mine"}, "model and endpoint_id are both given"),
        ({"eval": [{"args": {}}]}, "eval[0].env_id is missing"),
        ({"eval": [{"id": "a", "env_id": "b"}]}, "eval[0].env_id: env_id is given twice"),
        ({"eval": {"env_id": "a"}}, "are lists of tables; write [[eval]]"),
        ({"eval": [1]}, "are lists of tables; write [[eval]]"),
        ({"headers": {"A": "b"}}, "eval.toml.headers: primerl sends a key and no headers"),
        ({"save_to_hf_hub": True}, "primerl uploads no results"),
        ({"sampling": {"top_k": 3}}, "sampling argument 'top_k' has no counterpart"),
        ({"sampling": {}, "sampling_args": {}}, "sampling_args and sampling are both given"),
        (
            {"ablation": [{"id": "a", "sweep": {"temperature": 1}}]},
            "ablation[0].sweep: give at least one key with a list",
        ),
        ({"provider": "nowhere"}, "eval[0]: provider: there is no 'nowhere'"),
        ({"endpoints_path": "absent.toml"}, "absent.toml"),
    ],
)
def test_a_file_of_evaluations_that_cannot_be_used(
    changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model": "m", "eval": [{"env_id": "a"}], **changed}
    Path("eval.toml").write_text(
        tomli_w.dumps({key: value for key, value in given.items() if value is not None}), encoding="utf-8"
    )
    assert cli.main(["eval", "run", "eval.toml"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 2, told
    assert "outputs" not in {path.name for path in Path().iterdir()}


def test_what_changes_nothing_here_is_taken() -> None:
    tree = tomllib.loads(FILE) | {"save_results": True, "verbose": True, "headers": {}, "save_to_hf_hub": False}
    assert of_file(tomli_w.dumps(tree)) == of_file(FILE)
    assert json.loads(expanded(["eval.toml"])[0][-1])[0]["id"] == "owner/a"


@pytest.mark.parametrize(("level", "meant"), [("debug", "debug"), ("WARNING", "warn"), ("trace", "trace")])
def test_a_log_level_of_the_environment(level: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_LOG_LEVEL", level)
    assert config("a", "-m", "m").log.level == meant
    assert config("a", "-m", "m", "--log.level", "error").log.level == "error"
    monkeypatch.setenv("PRIME_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="PRIME_LOG_LEVEL is 'loud'; set it to one of trace, debug, info"):
        config("a", "-m", "m")
