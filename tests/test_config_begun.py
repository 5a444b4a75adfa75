"""What a run was begun with, by the keys of its config: the orchestrator itself refuses, and only it knows why."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end import until
from primerl.config.command_line.load import load
from primerl.config.errors import orchestrator_refusal
from primerl.config.errors.error_locations import placed
from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.errors.orchestrator_refusal import Refusal
from primerl.config.hosted.load_run import is_short, load_run
from primerl.config.process_files import files, resolve
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.launch.preflight import training
from primerl.models.tiny import write_model
from primerl.process.problems import Problem

pytestmark = pytest.mark.processes

FULL = """\
output_dir = "{folder}/run"
max_steps = 2
seq_len = 256

[model]
path = "{folder}/model"

[orchestrator]
batch_size = 8
group_size = 4
sampling.max_tokens = 16
val.num_examples = 2

[[orchestrator.train.env]]
id = "reverse-text"

[[orchestrator.train.env]]
id = "sort-letters"
ratio = 2.0

[[orchestrator.train.env]]
id = "reverse-text"
name = "shown"
training_mode = "opsd"
group_size = 2
demonstration.key = "answer"
sampling.temperature = 0.5
algorithm.echo.user = 0.1

[[orchestrator.eval.env]]
id = "reverse-text"
name = "held"
interval = 3
sampling.max_tokens = 12
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that has begun."""
    folder = tmp_path_factory.mktemp("begun")
    write_model(folder / "model", seed=0)
    (folder / "rl.toml").write_text(FULL.format(folder=folder))
    orchestrator = resolve.orchestrator(given(folder))
    files.write(orchestrator)
    process = subprocess.Popen([sys.executable, "-m", "primerl", "orchestrator", "@", str(orchestrator.file)])
    try:
        until((folder / "run" / "run" / "orchestrator.json").is_file, 60, "the orchestrator")
    finally:
        process.kill()
        process.wait()
    return folder


def given(folder: Path, *overrides: str) -> RLConfig:
    return load_run(["@", str(folder / "rl.toml"), *overrides], program="primerl rl")


def refused(config: RLConfig) -> list[str]:
    words = functools.partial(orchestrator_refusal.in_words_of, config)
    return training.check_beside(resolve.orchestrator(config), [], 60.0, print, begins=False, words=words)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--orchestrator.train.env.1.ratio", "4"], "orchestrator.train.env[1].ratio = 2.0, and now {} = 4.0"),
        (["--orchestrator.train.env.1.name", "x"], 'orchestrator.train.env[1].name = "sort-letters", and now {} = "x"'),
        (["--orchestrator.train.env.2.group-size", "4"], "orchestrator.train.env[2].group_size = 2, and now {} = 4"),
        (
            ["--orchestrator.train.env.2.sampling.temperature", "0.7"],
            "orchestrator.train.env[2].sampling.temperature = 0.5, and now {} = 0.7",
        ),
        (
            ["--orchestrator.train.env.2.algorithm.echo.user", "0.2"],
            "orchestrator.train.env[2].algorithm.echo.user = 0.1, and now {} = 0.2",
        ),
        (
            ["--orchestrator.train.env.2.demonstration.template", "{demonstration}"],
            'orchestrator.train.env[2].demonstration = answer in "Here is an example of an expert response:',
        ),
        (["--orchestrator.batch-size", "16"], "orchestrator.batch_size = 8, and now {} = 16"),
        (["--orchestrator.algorithm.type", "rloo"], 'orchestrator.algorithm.type = "grpo", and now {} = "rloo"'),
        (["--seq-len", "512"], "seq_len = 256, and now {} = 512"),
        (["--seed", "5"], "seed = 0, and now {} = 5"),
        (["--trainer.ranks", "2"], "trainer.ranks = 1, and now {} = 2"),
        (
            ["--orchestrator.control-tokens", "neutralize"],
            "orchestrator.control_tokens = not set, and now {} = neutralize",
        ),
        (["--orchestrator.sampling.max-tokens", "20"], "orchestrator.sampling.max_tokens = 16, and now {} = 20"),
        (
            ["--orchestrator.sampling.rollout-max-tokens", "90"],
            "orchestrator.sampling.rollout_max_tokens = not set, and now {} = 90",
        ),
        (
            ["--orchestrator.eval.env.0.sampling.max-tokens", "9"],
            "orchestrator.eval.env[0].sampling.max_tokens = 12, and now {} = 9",
        ),
        (
            ["--orchestrator.buffer.easy-threshold", "0.5"],
            "orchestrator.buffer.easy_threshold = 0.8, and now {} = 0.5",
        ),
    ],
)
def test_a_change_is_named_by_its_key(folder: Path, overrides: list[str], said: str) -> None:
    (problem,) = refused(given(folder, *overrides))
    key = said.split(" = ", 1)[0]
    begun = f"{folder / 'run'} holds a run that was begun with {said.format(key)}"
    assert begun in problem
    assert f"and now {key} = " in problem
    assert ": resume with the same config" in problem


def test_a_run_without_a_journal_is_refused_in_the_same_words(folder: Path, tmp_path: Path) -> None:
    """What it was begun with is in its checkpoint, to which the start goes back."""
    state = tmp_path / "run" / "checkpoints" / "step_2" / "orchestrator"
    state.mkdir(parents=True)
    snapshot = next((folder / "run" / "journal").glob("*.snapshot"))
    shutil.copy(snapshot, state)
    elsewhere = ["--output-dir", str(tmp_path / "run")]
    for back in ([], ["--ckpt.resume-step", "2"]):
        config = given(folder, *elsewhere, *back, "--orchestrator.eval.env.0.sampling.max-tokens", "9")
        with pytest.raises(ConfigError) as caught:
            training.check(config)
        assert "begun with orchestrator.eval.env[0].sampling.max_tokens = 12, and now" in str(caught.value)
    assert not (tmp_path / "run" / "journal").exists()


def test_what_may_change_is_refused_by_nobody(folder: Path) -> None:
    assert refused(given(folder)) == []
    assert refused(given(folder, "--max-steps", "5", "--trainer.optim.lr", "1e-3")) == []
    assert refused(given(folder, "--orchestrator.eval.env.0.interval", "2", "--orchestrator.val.interval", "7")) == []


def test_another_model_is_one(folder: Path) -> None:
    other = folder / "other"
    write_model(other, seed=0)
    template = other / "chat_template.jinja"
    if not template.is_file():
        template = other / "tokenizer_config.json"
    template.write_text(template.read_text() + " ")
    (problem,) = refused(given(folder, "--model.path", str(other)))
    assert f"was begun with another model than the one in model.path ({template.name} differs): resume with" in problem


def test_the_place_is_told_as_well(folder: Path) -> None:
    arguments = ["@", str(folder / "rl.toml"), "--orchestrator.eval.env.0.sampling.max-tokens", "9"]
    with pytest.raises(ConfigError) as caught, placed(given(folder, *arguments[2:]), arguments):
        raise ConfigError(refused(given(folder, *arguments[2:]))[0])
    assert "orchestrator.eval.env[0].sampling.max_tokens = 12, and now" in str(caught.value)
    assert str(caught.value).endswith(" (on the command line)")


def test_the_short_form_has_its_own_words(folder: Path, tmp_path: Path) -> None:
    """The orchestrator's message, made by hand: this run was begun in the full form."""
    file = tmp_path / "short.toml"
    file.write_text(
        'model = "m"\nmax_steps = 2\nbatch_size = 8\nrollouts_per_example = 4\n[sampling]\nmax_tokens = 16\n'
        '[[env]]\nid = "a"\n[eval]\ninterval = 2\n[[eval.env]]\nid = "b"\ninterval = 3\n'
    )
    arguments = ["@", str(file)]
    config = load_run(arguments, program="primerl rl")
    for name, key, place in (
        ("environments.1.role.evaluate.interval", "eval.env[0].interval", f" (in {file}, line 13)"),
        ("group_size", "rollouts_per_example", f" (in {file}, line 4)"),
    ):
        message = f"/f holds a run that was begun with {name} = 1, and now {name} = 3: resume with the same config, or"
        refusal = Refusal("changed", message, name, "1", "3")
        with pytest.raises(ConfigError) as caught, placed(config, arguments, short=is_short(arguments)):
            raise ConfigError(orchestrator_refusal.in_words_of(config, refusal))
        assert f"begun with {key} = 1, and now {key} = 3: resume with" in str(caught.value)
        assert place.removeprefix(f" (in {file}") in str(caught.value)


ENTRY = "orchestrator.train.env[0]"


def test_a_refusal_has_the_place_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'max_steps = 1\nseq_len = 64\n[model]\npath = "m"\n[orchestrator]\nhost = "h"\nsampling.max_tokens = 16\n'
        '[[orchestrator.train.env]]\nid = "a"\nratio = 2.0\n'
    )
    arguments = ["@", str(file)]
    config = load_run(arguments, program="primerl rl")

    def placed_as(refusal: Refusal) -> str:
        with pytest.raises(ConfigError) as caught, placed(config, arguments):
            raise ConfigError(orchestrator_refusal.in_words_of(config, refusal))
        return str(caught.value)

    for key, message, said in (
        (
            "train.env.a.ratio",
            "train.env.a.ratio: is odd",
            f"orchestrator.train.env[0].ratio (in {file}, line 10): is odd",
        ),
        ("sampling.max_tokens", "words alone", f"words alone (in {file}, line 7)"),
        ("seq_len", "seq_len (64) is odd", f"seq_len (64) is odd (in {file}, line 2)"),
        ("data_ranks", "data_ranks: is odd", "trainer.ranks: is odd"),
        ("model.path", "model.path: is odd", f"model.path (in {file}, line 4): is odd"),
        ("gone", "no word of config", "no word of config"),
    ):
        assert placed_as(Refusal("config", message, key)) == said


def test_a_function_that_cannot_be_imported_is_named_by_its_environments_key(folder: Path, tmp_path: Path) -> None:
    own = "--orchestrator.train.env.1.algorithm"
    config = given(
        folder, "--output-dir", str(tmp_path / "run"), f"{own}.type", "custom", f"{own}.path", "no_such_module:f"
    )
    (problem,) = refused(config)
    assert isinstance(problem, Problem)
    assert problem.key == "orchestrator.train.env[1].algorithm.path"
    assert problem.startswith(f"{problem.key}: `no_such_module:f`: ")


def test_a_refusal_is_about_the_environment_that_it_names(tmp_path: Path) -> None:
    """Several have one id, or labels that begin like another's."""
    file = tmp_path / "run.toml"
    environment = 'id = "a"\ntraining_mode = "opd"\nteacher.client = {base_url = "http://t", model = "m"}\n'
    file.write_text(
        'max_steps = 1\nseq_len = 1024\n[model]\npath = "m"\n'
        f"[[orchestrator.train.env]]\n{environment}"
        f'[[orchestrator.train.env]]\nname = "a.hard"\n{environment}'
        '[[orchestrator.eval.env]]\nid = "a"\nname = "b"\nnum_examples = 1\n'
    )
    config = load_run(["@", str(file)], program="primerl rl")
    for key, place in (
        ("train.env.a.teacher.client.model", "orchestrator.train.env[0].teacher.client.model"),
        ("train.env.a.hard.teacher.client.model", "orchestrator.train.env[1].teacher.client.model"),
        ("train.env.a.hard", "orchestrator.train.env[1]"),
        ("eval.env.b.num_examples", "orchestrator.eval.env[0].num_examples"),
        ("teacher", "orchestrator.teacher"),
    ):
        assert orchestrator_refusal.in_words_of(config, Refusal("config", f"{key}: is odd", key)).key == place
    file.write_text('model = "m"\n[[env]]\nid = "a"\n[[env]]\nid = "a"\nname = "b"\n')
    several = load(EvalConfig, ["@", str(file)], program="primerl eval")
    for key, place in (
        ("eval.env.a.num_examples", "env[0].num_examples"),
        ("eval.env.b.num_examples", "env[1].num_examples"),
        ("eval.env.b.client.base_url", "base_url"),
    ):
        assert orchestrator_refusal.in_words_of(several, Refusal("config", f"{key}: is odd", key)).key == place


def test_each_problem_keeps_its_own_key(tmp_path: Path) -> None:
    file = tmp_path / "eval.toml"
    file.write_text('model = "m"\nmax_tokens = 8\nconcurrency = 2\n[[env]]\nid = "a"\nnum_examples = 3\n')
    arguments = ["@", str(file)]
    config = load(EvalConfig, arguments, program="primerl eval")
    problems = Problems()
    for key in ("sampling.max_tokens", "batch_size", "eval.env.a.num_examples"):
        problems.found.append(orchestrator_refusal.in_words_of(config, Refusal("config", f"{key}: is odd", key)))
    with problems.noted():
        raise ConfigError("words alone", "model")
    with pytest.raises(ConfigError) as caught, placed(config, arguments):
        problems.check()
    assert str(caught.value).split("\n") == [
        f"max_tokens (in {file}, line 2): is odd",
        f"concurrency (in {file}, line 3): is odd",
        f"env[0].num_examples (in {file}, line 6): is odd",
        f"words alone (in {file}, line 1)",
    ]


@pytest.mark.parametrize(
    "message", ["", "another", "holds a run that was begun with x = 1, and now y = 2: resume with"]
)
def test_other_messages_stay_as_they_are(folder: Path, message: str) -> None:
    assert orchestrator_refusal.in_words_of(given(folder), Refusal("changed", message, "x", "1", "2")) == message


def test_a_refusal_is_found_below_what_a_module_prints() -> None:
    said = json.dumps({"code": "changed", "message": "m", "key": "seed", "was": "0", "now": "5"})
    found = Refusal("changed", "m", "seed", "0", "5")
    assert orchestrator_refusal.read(f"{said}\n") == found
    assert orchestrator_refusal.read(f"loading rewards\n{{}}\n{said}\n") == found


@pytest.mark.parametrize("output", ["", "file: fine", "[1]", '{"code": "changed"}', "null"])
def test_what_is_no_refusal_is_none(output: str) -> None:
    assert orchestrator_refusal.read(output) is None
