"""Flags in the words of prime-rl and verifiers, and the losses and options that their files name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from primerl.cli import evaluation_arguments, gepa
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.foreign import translate
from primerl.config.foreign.table import RL
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.gepa import GepaConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig

SMALL = """[[orchestrator.train.source]]
env = { taskset = { id = "reverse-text" }, agent = { harness = { id = "null" } } }
[orchestrator]
batch_size = 8
group_size = 2
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of(*flags: str) -> RLConfig:
    Path("theirs.toml").write_text(SMALL, encoding="utf-8")
    config = load_run(["@", "theirs.toml", "--model.name", "m", *flags], program="primerl rl")
    assert isinstance(config, RLConfig)
    return config


def test_ipo_is_a_loss_here_too() -> None:
    text = f'{SMALL}[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.2\nadv_tau = 2.0\n'
    made = translate(tomllib.loads(text), RL)
    assert made.refused == []
    assert made.tree["trainer"]["loss"] == {"type": "ipo", "args": {"threshold": 0.2, "kl_tau": 0.0005}}


@pytest.mark.parametrize("name", ["data-parallel-size", "data_parallel_size"])
@pytest.mark.parametrize("table", ["vllm", "vllm_extra"])
def test_options_of_vllm_have_dashes_or_not(table: str, name: str) -> None:
    text = f"{SMALL}[deployment]\nnum_infer_gpus = 4\n[inference.{table}]\n{name} = 2\n"
    made = translate(tomllib.loads(text), RL)
    assert [left.theirs[-1] for left in made.notes] == ["data_parallel_size"]
    assert made.tree["inference"] == {"replicas": 4}
    # What is counted in engines of their size is, by either spelling.
    made = translate(tomllib.loads(text.replace("data", "tensor")), RL)
    assert made.tree["inference"]["replicas"] == 2


def test_tables_and_lists_of_theirs_may_be_flags() -> None:
    source = {"env": {"taskset": {"id": "sort-letters"}, "agent": {"harness": {"id": "null"}}}, "group_size": 4}
    config = run_of(f"--orchestrator.train.source={json.dumps([source])}", "--trainer.loss", '{"kl_tau": 0.3}')
    (environment,) = config.orchestrator.train.env
    assert (environment.id, environment.group_size) == ("sort-letters", 4)
    assert (config.trainer.loss.type, config.trainer.loss.args) == ("dppo", {"kl_tau": 0.3})
    config = run_of("--trainer.loss", '{"type": "ipo", "ipo_threshold": 0.3}')
    assert (config.trainer.loss.type, config.trainer.loss.args) == ("ipo", {"threshold": 0.3})
    # One of ours stays ours.
    config = run_of("--trainer.loss", '{"type": "clip", "args": {"clip_low": 0.1}}')
    assert (config.trainer.loss.type, config.trainer.loss.args) == ("clip", {"clip_low": 0.1})


def test_settings_of_another_loss_are_refused() -> None:
    for text, why in (
        ("ipo_threshold = 0.3", "'default' has no such setting, 'ipo' has it"),
        ('type = "ipo"\ndppo_mask_low = 0.1', "'ipo' has no such setting, 'default' has it"),
        ('type = "gspo"\nkl_tau = 0.1', "'gspo' has no such setting, 'default' or 'ipo' has it"),
        ("adv_tau = -1.0", "adv_tau is -1.0"),
    ):
        made = translate(tomllib.loads(f"{SMALL}[trainer.loss]\n{text}\n"), RL)
        assert any(why in left.why for left in made.refused), text


def test_what_follows_from_a_key_follows_from_its_flag() -> None:
    config = run_of("--trainer.loss.ipo-threshold", "0.3", "--trainer.loss.type", "ipo")
    assert (config.trainer.loss.type, config.trainer.loss.args) == ("ipo", {"threshold": 0.3})
    config = run_of("--seq-len", "512")
    assert config.orchestrator.sampling.max_tokens == 511
    config = run_of("--orchestrator.concurrency.max-inflight", "32", "--orchestrator.batch-size", "16")
    assert config.orchestrator.oversampling_factor == 2.0
    flags = ["--inference.vllm.tensor-parallel-size", "2", "--deployment.num-infer-gpus", "4"]
    Path("theirs.toml").write_text(f"{SMALL}[inference.vllm]\ntensor_parallel_size = 4\n", encoding="utf-8")
    config = load_run(["@", "theirs.toml", "--model.name", "m", *flags], program="primerl rl")
    assert (config.inference.replicas, config.inference.vllm) == (2, {"tensor-parallel-size": 2})
    # Where a run is written is ours, unless it is named in their way.
    assert run_of("--output-dir", "out").output_dir == "out"
    assert run_of("--output-dir", "out", "--run", '{"name": "one"}').output_dir == "out/one"


def test_a_batch_of_fine_tuning_is_of_rows_in_a_flag_too() -> None:
    Path("sft.toml").write_text(
        'max_steps = 1\n[model]\nname = "m"\n[data]\nname = "d"\nseq_len = 64', encoding="utf-8"
    )
    config = load(SFTConfig, ["@", "sft.toml", "--data.batch-size", "4"], program="primerl sft")
    assert config.data.batch_size == 4 * 64
    flags = ["--data.batch-size", "4", "--data.seq-len", "128"]
    assert load(SFTConfig, ["@", "sft.toml", *flags], program="primerl sft").data.batch_size == 4 * 128
    for given, named in (("abc", "data.batch_size is 'abc'"), ("1.5", "data.batch_size is 1.5")):
        with pytest.raises(ConfigError, match=named):
            load(SFTConfig, ["@", "sft.toml", "--data.batch-size", given], program="primerl sft")


def environment_of(*flags: str) -> object:
    (line,) = evaluation_arguments.expanded(["run", "words", "-m", "m", "-b", "http://h/v1", *flags])
    at = line.index("--env")
    assert "-b" not in line
    return json.loads(line[at + 1])[0]


def test_flags_of_an_environments_seats_are_of_the_one_that_is_named() -> None:
    flags = ["--env.taskset.split", "eval", "--env.agent.max-turns=3", "--no-env.agent.stream"]
    expected = {"id": "words", "taskset": {"split": "eval"}, "args": {"agent": {"max_turns": 3, "stream": False}}}
    assert environment_of(*flags) == expected
    rest = gepa.written_out(["run", "words", "-m", "m", "-b", "http://h/v1", *flags])
    assert json.loads(rest[rest.index("--env") + 1]) == [expected]
    # What is given in both ways is one.
    assert environment_of("-a", '{"x": 1}', "--env.taskset.n", "2") == {
        "id": "words",
        "args": {"x": 1},
        "taskset": {"n": 2},
    }
    assert environment_of("--env.agent.harness.id", "bash") == {
        "id": "words",
        "args": {"agent": {"harness": {"id": "bash"}, "runtime": {"type": "prime"}}},
    }
    assert environment_of("--env.agent.harness.id", "null") == {"id": "words"}
    # A limit of a seat is below that of its rollout, and text stays text.
    (line,) = evaluation_arguments.expanded(
        ["run", "words", "-m", "m", "-b", "http://h/v1", "--env.agent.timeout.rollout", "99999"]
    )
    assert "--timeouts.rollout-s=110058" in line
    given = {"id": "words", "taskset": {"d": "2024-01-01", "t": "None of these\nvalue = 3"}}
    assert environment_of("--env.taskset.d", "2024-01-01", "--env.taskset.t", given["taskset"]["t"]) == given  # type: ignore[index]
    assert environment_of("--env.agent", "5") == {"id": "words", "args": {"agent": 5}}
    with pytest.raises(ConfigError, match=r"--no-env\.agent\.stream takes no value"):
        environment_of("--no-env.agent.stream=true")
    with pytest.raises(ConfigError, match="nested too deeply"):
        environment_of("--env.taskset.x", "[" * 3000)
    # Keys of an entry of ours are no seats.
    (line,) = evaluation_arguments.expanded(["run", "words", "-m", "m", "--env.num-examples", "3"])
    assert "--env.num-examples" in line
    with pytest.raises(ConfigError, match=r"--env\.taskset\.id: the environment is named already"):
        environment_of("--env.taskset.id", "other")


def test_a_search_without_keys_of_its_own_is_read_as_one() -> None:
    """verifiers' guide has no more in it than an evaluation's file."""
    text = 'model = "m"\n[env]\ntaskset.id = "reverse-text"\nagent.harness.id = "null"\n[sampling]\nmax_tokens = 9\n'
    Path("gepa.toml").write_text(text, encoding="utf-8")
    config = load(GepaConfig, ["@", "gepa.toml", "--max-total-rollouts", "40"], program="primerl gepa run")
    assert (config.env[0].id, config.max_tokens, config.gepa.max_calls) == ("reverse-text", 9, 40)
    assert config.api_key_env == "PRIME_API_KEY"
