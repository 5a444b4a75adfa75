"""`primerl convert`: what it writes can be started, and what it cannot read writes nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from primerl.cli import main
from primerl.config.command_line.load import load
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.evaluation import EvalConfig

SOURCE = """
[[orchestrator.train.source]]
name = "words"
env = { taskset = { id = "reverse-text" }, agent = { harness = { id = "null" }, runtime = { type = "subprocess" } } }
"""
RUN = f"""
max_steps = 2
seq_len = 256

[model]
name = "MODEL"

[orchestrator]
batch_size = 8
group_size = 4

[orchestrator.train.sampling]
max_completion_tokens = 16

[orchestrator.renderer]
name = "prime-qwen3"

[trainer.optim]
lr = 3e-6

[inference.vllm]
gpu_memory_utilization = 0.5
{SOURCE}"""
PARTS = {
    "orch.toml": "max_steps = 5\nbatch_size = 8\ngroup_size = 4\n[[train.source]]\nenv = { taskset = { id = 'e' } }\n",
    "train.toml": "max_steps = 5\n[model]\nseq_len = 256\n[optim]\nlr = 3e-6\n",
    "infer.toml": '[model]\nname = "owner/name"\n',
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


@pytest.mark.processes
def test_what_is_written_starts_and_so_does_their_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("theirs.toml", RUN.replace("MODEL", str(model)))
    assert main(["convert", "theirs.toml", "--output", "ours.toml"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "ours.toml: 10 keys translated, 1 have no counterpart and do not matter, 0 have none and do" in said.err
    for number, file in enumerate(("ours.toml", "theirs.toml")):
        command = [sys.executable, "-m", "primerl", "rl", "@", file, "--dry-run", "--output-dir", f"out{number}"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)
        assert done.returncode == 0, done.stderr
        assert ("a file of prime-rl's `rl`" in done.stderr) == (file == "theirs.toml")
    first, second = (tomllib.loads(Path(f"out{n}/configs/orchestrator.toml").read_text("utf-8")) for n in range(2))
    assert {**first, "output_dir": ""} == {**second, "output_dir": ""}
    assert first["train"]["env"][0]["id"] == "reverse-text"
    # The embedded engine takes over where there is no vLLM, and has no use for its options.
    engine = tomllib.loads(Path("out0/configs/inference.toml").read_text("utf-8"))
    assert (engine["backend"] == "vllm") == ("gpu-memory-utilization" in engine["vllm"])


def test_the_comments_name_each_key_once_by_subject(capsys: pytest.CaptureFixture[str]) -> None:
    write("theirs.toml", RUN + "[trainer.data.fake]\n[trainer.model]\nattn = 'sdpa'\nimpl = 'custom'\nep = 4\n")
    assert main(["convert", "theirs.toml"]) == 1
    text, problems = capsys.readouterr()
    tomllib.loads(text)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0] == "# Made by `primerl convert` from theirs.toml, a file of prime-rl's `rl`."
    for key in ("trainer.data.fake", "trainer.model.attn", "trainer.model.ep", "model.name -> model.path"):
        assert sum(key in line for line in comments) == 1, key
    assert "#     trainer.model.attn, trainer.model.impl: models are transformers' own" in text
    assert problems.startswith("no counterpart: trainer.data.fake: a trainer learns from rollouts")


def test_parts_of_a_run_become_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in PARTS.items():
        write(name, text)
    assert main(["convert", *PARTS]) == 0
    write("run.toml", capsys.readouterr().out)
    config = load_run(["@", "run.toml"], program="p")
    assert (config.model.path, config.max_steps, config.seq_len) == ("owner/name", 5, 256)
    assert config.trainer.optim.lr == 3e-6
    assert config.orchestrator.engines == ["http://localhost:8000"]
    assert main(["convert", "train.toml"]) == 1
    assert "to be set: the rest of the run, of which this is the trainer" in capsys.readouterr().err


def test_the_short_form_becomes_the_full_one(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "max_steps = 3\nbatch_size = 8\nrollouts_per_example = 4\n"
    write("short.toml", f'model = "owner/name"\n{numbers}[sampling]\nmax_tokens = 8\n[[env]]\nid = "reverse-text"\n')
    assert main(["convert", "short.toml"]) == 0
    write("full.toml", capsys.readouterr().out)
    assert load_run(["@", "full.toml"], program="p").model.path == "owner/name"


def test_an_evaluation_names_environments_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    write("eval.toml", 'model = "m"\n[[eval]]\nenv_id = "owner/no-such"\n[[eval]]\nenv_id = "no-other"\n')
    assert main(["convert", "eval.toml", "-o", "ours.toml"]) == 0
    said = capsys.readouterr().err
    assert "environments 'owner/no-such', 'no-other' are not installed for this Python; install their packages" in said
    assert [one.id for one in load(EvalConfig, ["@", "ours.toml"], program="p").env] == ["owner/no-such", "no-other"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Words\n\nthat are *no* TOML", "Invalid TOML in bad.toml: "),
        (
            "[project]\nname = 'x'",
            "bad.toml has none of the tables by which files are known; those read here are prime",
        ),
        (
            RUN + "[orchestrator.sampling]\nmax_tokens = 3",
            "bad.toml: orchestrator.sampling.max_tokens (in bad.toml, line",
        ),
        (
            "max_steps = 1\n[model]\npath = 'm'\n[[orchestrator.train.env]]\nid = 'e'",
            "bad.toml: every key is primerl's",
        ),
        (
            "[[endpoint]]\nendpoint_id = 'x'",
            "bad.toml is a list of endpoints, which `primerl eval run -e bad.toml` reads",
        ),
        (None, "Config file not found: bad.toml"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        write("bad.toml", text)
    assert main(["convert", "bad.toml", "--output", "ours.toml"]) == 2
    printed = capsys.readouterr()
    title, sentence = printed.err.splitlines()
    assert title == "Nothing was written:"
    assert sentence.strip().startswith(said)
    assert printed.out == ""
    assert not Path("ours.toml").exists()


def test_files_of_two_programs_are_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    write("run.toml", RUN)
    write("eval.toml", "num_tasks = 2\n[env.taskset]\nid = 'e'")
    assert main(["convert", "run.toml", "eval.toml"]) == 2
    assert "run.toml is a file of prime-rl's `rl` and eval.toml is a file of verifiers' `eval`; convert" in (
        capsys.readouterr().err
    )


def test_a_file_that_is_there_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    write("run.toml", RUN)
    write("ours.toml", "mine")
    assert main(["convert", "run.toml", "--output", "ours.toml"]) == 2
    assert "ours.toml is there already" in capsys.readouterr().err
    assert Path("ours.toml").read_text("utf-8") == "mine"
