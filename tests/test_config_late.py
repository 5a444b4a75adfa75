"""What is wrong with files and environments, in both forms: told with the file, the line and the user's own key."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_texts import FULL, SHORT
from primerl.cli import main
from primerl.cli.evaluation_arguments import written_out
from primerl.config.command_line.load import load
from primerl.config.errors.error_locations import Source, placed, told
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import is_short, load_run
from primerl.config.schema.evaluation import EvalConfig
from primerl.launch import run
from primerl.process.problems import Problem
from primerl.train.objective import components

HOW = "give the path of a file of NAME=value lines, seen from here or from the folder of the config that names it"
PYTHON = "give the path of the `python` of a virtualenv, or of the virtualenv's folder"
NO_FOLDER = (
    "there is no folder HERE/gone; give the folder of a model, for example one that `primerl sft` has written "
    "(<output_dir>/weights/step_<N>)"
)
# A form, what of it is replaced, by what, the command line's overrides, the message.
# fmt: off
CASES: list[tuple[str, str, str, list[str], str]] = [
    (SHORT, "MODEL", "gone", [], f"model (in run.toml, line 1): {NO_FOLDER}"),
    (FULL, "MODEL", "gone", [], f"model.path (in run.toml, line 4): {NO_FOLDER}"),
    (SHORT, "", "", ["--model", "gone"], f"model (on the command line): {NO_FOLDER}"),
    (FULL, "", "", ["--model.path", "gone"], f"model.path (on the command line): {NO_FOLDER}"),
    (SHORT, "max_steps = 10", 'max_steps = 10\nenv_file = ["gone.env"]', [],
     f"env_file (in run.toml, line 3): there is no file HERE/gone.env; {HOW}"),
    (SHORT, "max_steps = 10", 'max_steps = 10\nenv_files = ["gone.env"]', [],
     f"env_files (in run.toml, line 3): there is no file HERE/gone.env; {HOW}"),
    (FULL, "max_steps = 10", 'max_steps = 10\nenv_files = ["gone.env"]', [],
     f"env_files (in run.toml, line 2): there is no file HERE/gone.env; {HOW}"),
    (SHORT, "", "", ["--env-file", '["gone.env"]'],
     f"env_file (on the command line): there is no file HERE/gone.env; {HOW}"),
    (SHORT, "max_steps = 10", 'max_steps = 10\nenv_file = ["broken.env"]', [],
     "env_file (in run.toml, line 3): HERE/broken.env, line 2 cannot be read; write NAME=value, and quotes that are "
     "closed"),
    (FULL, "max_steps = 10", 'max_steps = 10\nenv_files = ["broken.env"]', [],
     "env_files (in run.toml, line 2): HERE/broken.env, line 2 cannot be read; write NAME=value, and quotes that are "
     "closed"),
    (SHORT, "max_steps = 10", 'max_steps = 10\noutput_dir = "taken"', [],
     "output_dir (in run.toml, line 3): HERE/taken is not a folder; choose another output_dir"),
    (FULL, "", "", ["--output-dir", "taken"],
     "output_dir (on the command line): HERE/taken is not a folder; choose another output_dir"),
    (SHORT, "max_steps = 10", 'max_steps = 10\ncheckpoint_id = "gone/step_3"', [],
     "checkpoint_id (in run.toml, line 3): 'gone/step_3' is not READY in the store STATE/store; there is nothing of "
     "run gone"),
    (FULL, "max_steps = 10", 'max_steps = 10\ncheckpoint_id = "gone/step_3"', [],
     "checkpoint_id (in run.toml, line 2): 'gone/step_3' is not READY in the store STATE/store; there is nothing of "
     "run gone"),
    (SHORT, "max_steps = 10", "max_steps = 10\nseq_len = 1048576", [],
     "seq_len (1048576) is above what the model in MODEL can attend to (LIMIT); lower it (in run.toml, line 3)"),
    (SHORT, "max_tokens = 64", "max_tokens = LIMIT", [],
     "sampling.max_tokens (LIMIT) must be below what the model in MODEL can attend to (LIMIT), which holds the prompt "
     "too; lower it (in run.toml, line 7)"),
    (SHORT, "", "", ["--sampling.max-tokens", "1000000", "--seq-len", "1048576"],
     "sampling.max_tokens (1000000) must be below what the model in MODEL can attend to (LIMIT), which holds the "
     "prompt too; lower it (on the command line)\n"
     "seq_len (1048576) is above what the model in MODEL can attend to (LIMIT); lower it (on the command line)"),
    (FULL, "max_steps = 10", "max_steps = 10\nseq_len = 1048576", [],
     "seq_len (1048576) is above what the model in MODEL can attend to (LIMIT); lower it (in run.toml, line 2)"),
    (FULL, "max_steps = 10", "max_steps = 10\n[inference]\nport = BUSY", [],
     "inference.port (in run.toml, line 3): port BUSY is in use; choose another, or 0 for any free one"),
    (FULL, "[model]", "[ckpt]\nresume_step = 7\n\n[model]", [],
     "ckpt.resume_step (in run.toml, line 4): there is no checkpoint of step 7 in HERE/outputs/rl/checkpoints; there "
     "are: none"),
    (FULL, "[model]", '[store]\nurl = "nosuch://x"\n\n[model]', [],
     "store.url (in run.toml, line 4): nosuch://x cannot be opened: Protocol not known: nosuch"),
    (FULL, "[model]", '[store]\nurl = "run.toml"\n\n[model]', [],
     "store.url (in run.toml, line 4): HERE/run.toml is a file; give a folder"),
    (FULL, "[model]", '[store]\nurl = "run.toml/deeper"\n\n[model]', [],
     "store.url (in run.toml, line 4): HERE/run.toml is a file; give a folder"),
    (FULL, "[model]", '[trainer.loss]\ncustom = "no_such_module:fn"\n\n[model]', [],
     "trainer.loss.custom (in run.toml, line 4): there is no module 'no_such_module'; run from the folder that it is "
     "in, install it, or set PYTHONPATH"),
    (FULL, "[model]", '[trainer.loss]\ncustom = "primerl.train.objective.components:zzz"\n\n[model]', [],
     "trainer.loss.custom (in run.toml, line 4): LOSS has no 'zzz'; give the name of a function in it"),
    (FULL, "batch_size = 16", 'batch_size = 16\nhost = "0.0.0.0"', [],
     "orchestrator.host (in run.toml, line 8): 0.0.0.0 can be reached from other machines, and PRIMERL_API_KEY is not "
     "set; set it in the environment of the run and of everything that talks to it, or listen on 127.0.0.1"),
    (SHORT, "owner/reverse-text", "owner/no-such-environment", [],
     "env[0].id (in run.toml, line 10): environment 'no-such-environment': 'owner/no-such-environment' cannot be "
     "imported: there is no module 'no_such_environment'; install its package (for the examples: `pip install "
     "./examples/<name>`) into this virtual environment"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\n[[orchestrator.train.env]]\nid = "no-such"\n'
     '[orchestrator.val]\n[[orchestrator.eval.env]]\nid = "no-such"\nname = "measured"', [],
     "orchestrator.train.env[1].id (in run.toml, line 13): environment 'no-such' cannot be imported: there is no "
     "module 'no_such'; install its package (for the examples: `pip install ./examples/<name>`) into this virtual "
     "environment"),
    (FULL, "[model]", '[[monitors]]\npath = "no_such_module:Monitor"\n\n[model]', [],
     "monitors (in run.toml, line 3): 'no_such_module:Monitor' cannot be imported: "
     "ModuleNotFoundError: No module named 'no_such_module'"),
    (FULL, "[model]", '[trainer.model.lora]\nrank = 4\nadapter_path = "gone"\n\n[model]', [],
     "trainer.model.lora.adapter_path (in run.toml, line 5): there is no HERE/gone/adapter_config.json; give the "
     "folder of an adapter as peft saves it, for example weights/step_<N>/lora_adapters of a run with "
     "ckpt.weights.save_adapter_separately"),
    (SHORT, "[[env]]", "[tailscale]\nenabled = true\n\n[[env]]", [],
     "tailscale.enabled is set, and tailscaled and tailscale cannot be found on this machine; install Tailscale "
     "(https://tailscale.com/download; its static binaries need no root) and have both programs on PATH, or leave "
     "[tailscale] out (in run.toml, line 10)\n"
     "tailscale.enabled is set, and there is no key for 'reverse-text'; make a reusable auth key "
     "(https://login.tailscale.com/admin/settings/keys) and set it as TAILSCALE_AUTH_KEY, in the environment, in a "
     "file of env_files, or by `primerl secret set TAILSCALE_AUTH_KEY` (in run.toml, line 10)"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\n\n[env.python]\npath = "gone"', [],
     f"env[0].python.path (in run.toml, line 13): environment 'reverse-text': there is no interpreter HERE/gone; "
     f"{PYTHON}"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\npython.path = "gone"', [],
     "orchestrator.train.env[0].python.path (in run.toml, line 12): environment 'reverse-text': there is no "
     f"interpreter HERE/gone; {PYTHON}"),
    (FULL, "", "", ["--orchestrator.train.env.0.python.path", "gone"],
     "orchestrator.train.env[0].python.path (on the command line): environment 'reverse-text': there is no "
     f"interpreter HERE/gone; {PYTHON}"),
]
# fmt: on


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("primerl.launch.tailnet.program", lambda _: None)
    monkeypatch.delenv("TAILSCALE_AUTH_KEY", raising=False)
    monkeypatch.delenv("PRIMERL_API_KEY", raising=False)
    Path("broken.env").write_text("GOOD=1\nBAD='open\n")
    Path("taken").write_text("")
    return tmp_path


@pytest.fixture(scope="module")
def busy() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refusal(arguments: list[str]) -> list[str]:
    """As `primerl rl` finds it."""
    config = load_run(arguments, program="primerl rl")
    with pytest.raises(ConfigError) as caught, placed(config, arguments, short=is_short(arguments)):
        run.run(config)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(("form", "old", "new", "overrides", "message"), CASES)
def test_a_broken_config_is_explained(
    form: str, old: str, new: str, overrides: list[str], message: str, model: Path, busy: int, folder: Path
) -> None:
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert old in form
    meant = {
        "MODEL": model,
        "HERE": folder,
        "STATE": folder / "state",
        "LIMIT": limit,
        "BUSY": busy,
        "LOSS": components.__file__,
    }
    text = form.replace(old, new, 1)
    for name, value in meant.items():
        text, message = text.replace(name, str(value)), message.replace(name, str(value))
    Path("run.toml").write_text(text)
    assert refusal(["@", "run.toml", *overrides]) == message.split("\n")


# fmt: off
ENVIRONMENTS: list[tuple[str, str, list[str]]] = [
    (SHORT, """
[env.taskset]
splitt = "train"

[[env]]
id = "reverse-text"
name = "agent"

[env.harness]
max_turn = 3

[eval]
[[eval.env]]
id = "reverse-text"
name = "measured"
taskset.split = 4

[[env]]
id = "reverse-text"
name = "rewarded"

[[env.taskset.rewards]]
fn = "no_mod:fn"

[[env]]
id = "owner/reverse-text@9.9.9"
name = "newer"
""", [
        "env[0].taskset.splitt (in run.toml, line 13): environment 'reverse-text': 'owner/reverse-text' refuses its "
        "settings: taskset.splitt: there is no such setting",
        "env[1].harness.max_turn (in run.toml, line 20): environment 'agent': 'reverse-text' refuses its settings: ",
        "eval.env[0].taskset.split (in run.toml, line 26): environment 'measured': 'reverse-text' refuses its "
        "settings: taskset.split: ",
        "env[2].taskset.rewards[0].fn (in run.toml, line 33): environment 'rewarded': 'reverse-text': "
        "taskset.rewards[0].fn: 'no_mod:fn' cannot be imported: ModuleNotFoundError: ",
        "env[3].id (in run.toml, line 36): environment 'newer': 'owner/reverse-text@9.9.9' asks for version 9.9.9, and "
        f"{sys.executable} has reverse-text 0.1.0; install 9.9.9 there, or leave `@9.9.9` out of the id",
    ]),
    (FULL, """
[orchestrator.train.env.taskset]
splitt = "train"

[orchestrator.val]
num_examples = 100000000

[[orchestrator.eval.env]]
id = "reverse-text"
name = "measured"
taskset.split = 4
""", [
        "orchestrator.train.env[0].taskset.splitt (in run.toml, line 14): environment 'reverse-text' refuses its "
        "settings: taskset.splitt: there is no such setting",
        "orchestrator.eval.env[0].taskset.split (in run.toml, line 22): environment 'measured': 'reverse-text' refuses "
        "its settings: taskset.split: ",
        "orchestrator.val (in run.toml, line 16): environment 'reverse-text-val': 'reverse-text' refuses "
        "its settings: ",
    ]),
]
# fmt: on


@pytest.mark.processes
@pytest.mark.parametrize(("form", "more", "messages"), ENVIRONMENTS)
def test_what_environments_refuse_is_told_by_its_place(form: str, more: str, messages: list[str], model: Path) -> None:
    Path("run.toml").write_text(form.replace("MODEL", str(model)) + more)
    said = refusal(["@", "run.toml"])
    for message in messages:
        assert [line for line in said if line.startswith(message)], "\n".join(said)


def test_words_of_the_full_form_become_those_of_the_short_one() -> None:
    Path("run.toml").write_text(SHORT)
    arguments = ["@", "run.toml", "--env.0.max-retries", "3"]
    source = Source(load_run(arguments, program="primerl rl"), arguments, short=True)
    environment, group = "environment 'reverse-text'", "rewards the rollouts of a group by comparing them, and"
    said: dict[str, str] = {
        Problem.at(
            "orchestrator.sampling.max_tokens",
            "leaves no room for a prompt within seq_len = 64; lower it or raise seq_len",
        ): (
            "sampling.max_tokens (in run.toml, line 7): leaves no room for a prompt within seq_len = 64; lower it or "
            "raise seq_len"
        ),
        Problem(f"{environment} {group} group_size is 1; raise it", "group_size", environment="reverse-text"): (
            f"env[0].id (in run.toml, line 10): {environment} {group} rollouts_per_example is 1; raise it"
        ),
        Problem.at("checkpoint_id", "x is of another model; give the model that its run began with as model.path"): (
            "checkpoint_id: x is of another model; give the model that its run began with as model"
        ),
        Problem("importing them did not end within timeouts.check_s = 5 s; raise it", "timeouts.check_s"): (
            "importing them did not end within timeouts.check_s = 5 s; raise it (timeouts.check_s: of the full form, "
            "see docs/hosted.md)"
        ),
        Problem("max_steps is 10, but the batches of 20 steps are cut already", "max_steps"): (
            "max_steps is 10, but the batches of 20 steps are cut already (in run.toml, line 2)"
        ),
        # The place is of a further key, where the first is not written; and at the end of the first line.
        Problem("ckpt.interval must be below max_steps: the plan\n  max_steps", "ckpt.interval", "max_steps"): (
            "checkpoints.interval must be below max_steps: the plan (in run.toml, line 2)\n  max_steps"
        ),
        # What a parser shows of a file of ours.
        "TOML parse error at line 7, column 14\n  |\n7 | batch_size = 4\n  |              ^": (
            "TOML parse error at line 7, column 14\n  |\n7 | batch_size = 4\n  |              ^"
        ),
        "/tmp/model.path/env_files/x.toml is odd\n  a line of a log: model.path": (
            "/tmp/model.path/env_files/x.toml is odd\n  a line of a log: model"
        ),
    }
    assert {message: source.told(message) for message in said} == said


def test_an_evaluation_is_told_by_its_place(model: Path) -> None:
    Path("eval.toml").write_text(f'model = "{model}"\nenv_files = ["gone.env"]\n\n[[env]]\nid = "reverse-text"\n')
    arguments = ["@", "eval.toml"]
    config = load(EvalConfig, arguments, program="primerl eval")
    source = Source(config, arguments)
    without_examples = Problem("environment 'reverse-text' has no examples", environment="reverse-text")
    assert source.told(without_examples) == (
        "env[0].id (in eval.toml, line 5): environment 'reverse-text' has no examples"
    )
    assert source.told(Problem.at("env_files", "there is no file x")).startswith(
        "env_files (in eval.toml, line 2): there"
    )
    given = written_out(["reverse-text", "--model", str(model)])
    of_flags = Source(load(EvalConfig, given, program="primerl eval"), given)
    assert of_flags.told(without_examples).startswith("env[0].id (on the command line): ")


@pytest.mark.processes
def test_the_commands_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("eval.toml").write_text('model = "gone"\n\n[[env]]\nid = "reverse-text"\n')
    Path("sft.toml").write_text('output_dir = "out"\nmax_steps = 1\n[model.tiny]\n[data]\npath = "gone.jsonl"\n')
    Path("rl.toml").write_text(SHORT.replace("MODEL", "gone"))
    for command, file, beginning in (
        ("eval", "eval.toml", "  model (in eval.toml, line 1): there is no folder"),
        ("sft", "sft.toml", "  data.path (in sft.toml, line 5): there is no file"),
        ("rl", "rl.toml", "  model (in rl.toml, line 1): there is no folder"),
    ):
        assert main([command, "@", file]) == 2
        assert beginning in capsys.readouterr().err


def test_a_run_with_a_key_may_be_reached_from_other_machines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_API_KEY", "k")
    text = FULL.replace("MODEL", str(model)).replace(
        "batch_size = 16", 'batch_size = 16\nhost = "0.0.0.0"\nport = BUSY'
    )
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        Path("run.toml").write_text(text.replace("BUSY", str(listener.getsockname()[1])))
        (said,) = refusal(["@", "run.toml"])
    assert said.startswith("orchestrator.port (in run.toml, line 9): port ")
    assert not Path("outputs").exists()


def test_nothing_is_changed_outside_of_a_command() -> None:
    assert told(ConfigError.at("model.path", "no")) == "model.path: no"
