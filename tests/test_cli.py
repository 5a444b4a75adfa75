"""The command as a user meets it: help, refusals, exit codes, and that nothing is written before all is checked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import primerl as primerl_package
import pytest
from end_to_end import until
from primerl.cli import COMMANDS, main
from primerl.config.errors.fail import ConfigError
from primerl.launch.preflight.output_folder import check_output_dir
from primerl.launch.supervise.trees import MARK, marked
from primerl.runs import report

pytestmark = pytest.mark.processes

RL = "examples/reverse-text/rl-ci.toml"


def primerl(*arguments: str, cwd: Path, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "primerl", *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout_s
    )


def test_names_of_the_package_are_found_when_used() -> None:
    code = """
import primerl
assert primerl.__version__
assert set(primerl.__all__) <= set(dir(primerl))
for name in primerl.__all__:
    getattr(primerl, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_orchestrator_leaves_although_a_function_of_the_users_spins() -> None:
    code = """
import sys, threading
from primerl.cli.processes import leave
def spin():
    while True:
        pass
assert leave(0) == 0
threading.Thread(target=spin).start()
print("said", end="")
sys.exit(leave(3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "")


@pytest.mark.parametrize(
    "command", ["rl", "sft", "trainer", "inference", "env-worker", "verify", "report", "trace", "buffer"]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        raise SystemExit(main([command, "--help"]))
    assert exit_.value.code == 0
    assert "usage: primerl " + command in capsys.readouterr().out


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traner"]) == 2
    assert "did you mean 'trainer'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trainer", "inference", "env-worker"])
def test_process_names_the_unknown_key(command: str, tmp_path: Path) -> None:
    file = tmp_path / "resolved.toml"
    file.write_text("no_such_key = 1\n")
    done = primerl(command, "@", str(file), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "no_such_key" in done.stderr
    absent = primerl(command, "@", "absent.toml", cwd=tmp_path)
    assert absent.returncode == 2
    assert "absent.toml" in absent.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--orchestrator.batch-sise", "8"], "did you mean 'batch_size'?"),
        (["--orchestrator.batch-size", "10"], "set batch_size to 8 or 16"),
        (["--model.path", "no/such/model"], "model.path (on the command line): there is no folder"),
        (["--seq-len", "20"], "lower one or raise the other"),
        (["--seq-len", "100000", "--inference.max-model-len", "100000"], "is above what the model in"),
    ],
)
def test_bad_input_exits_2_and_writes_nothing(
    arguments: list[str], message: str, model: Path, repository: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    given = [] if "--model.path" in arguments else ["--model.path", str(model)]
    done = primerl("rl", "@", RL, "--output-dir", str(output), *given, *arguments, cwd=repository)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()


def test_port_in_use_exits_2(model: Path, repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        arguments = ["--output-dir", str(output), "--model.path", str(model), "--orchestrator.port", str(port)]
        done = primerl("rl", "@", RL, *arguments, cwd=repository)
    assert done.returncode == 2
    assert f"orchestrator.port (on the command line): port {port} is in use" in done.stderr
    assert not output.exists()


def test_environment_that_cannot_be_imported_exits_2(model: Path, repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    environments = json.dumps([{"id": "no-such-environment"}])
    arguments = ["--output-dir", str(output), "--model.path", str(model), "--orchestrator.train.env", environments]
    done = primerl("rl", "@", RL, *arguments, cwd=repository)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("environment 'no-such-environment' cannot be imported") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()


def test_model_without_chat_template_exits_2(model: Path, repository: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name == "tokenizer_config.json":
            settings = json.loads(file.read_text())
            settings.pop("chat_template", None)
            (bare / file.name).write_text(json.dumps(settings))
        elif file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    done = primerl("rl", "@", RL, "--output-dir", str(tmp_path / "run"), "--model.path", str(bare), cwd=repository)
    assert done.returncode == 2
    assert f"{bare} has no chat template" in done.stderr


def test_model_the_engine_cannot_compute_exits_2(model: Path, repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).symlink_to(file)
    (other / "config.json").unlink()
    config = json.loads((model / "config.json").read_text()) | {"model_type": "hrm_text"}
    (other / "config.json").write_text(json.dumps(config))
    output = tmp_path / "run"
    done = primerl("rl", "@", RL, "--output-dir", str(output), "--model.path", str(other), cwd=repository)
    assert done.returncode == 2, done.stderr
    assert "the embedded engine serves llama, qwen2, qwen3, not 'hrm_text'; serve this model with vLLM" in done.stderr
    assert not output.exists()


def test_non_empty_output_folder_exits_2(model: Path, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    arguments = ["--output-dir", str(tmp_path), "--model.path", str(model)]
    done = primerl("rl", "@", RL, *arguments, cwd=repository)
    assert done.returncode == 2
    assert "--clean-output-dir" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_dry_run_checks_all_and_writes_the_resolved_files(model: Path, repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["--output-dir", str(output), "--model.path", str(model), "--dry-run"]
    done = primerl("rl", "@", RL, *arguments, cwd=repository)
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (output / "configs").iterdir()}
    environments = {"env_reverse-text_0.toml", "env_reverse-text-eval_0.toml"}
    assert written == {"orchestrator.toml", "trainer.toml", "inference.toml", "rl.toml"} | environments
    assert tomllib.loads((output / "configs" / "trainer.toml").read_text())["optim"]["lr"] == 5e-4
    assert not (output / "logs").exists()
    check = primerl(
        "orchestrator", "--config", str(output / "configs" / "orchestrator.toml"), "--check", cwd=repository
    )
    assert check.returncode == 0, check.stderr
    # What it left is no earlier run: the real one may follow in the same folder.
    assert {entry.name for entry in output.iterdir()} == {"configs", "run"}
    check_output_dir(str(output), clean=False, kind="rl")


def test_a_training_script_cannot_dry_run(model: Path, repository: Path, tmp_path: Path) -> None:
    run = primerl_package.Run(repository / RL, "--dry-run", "--output-dir", str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="dry_run"), run:
        pass
    assert not (tmp_path / "run").exists()


def test_a_training_script_publishes_before_it_reports_a_checkpoint(repository: Path, tmp_path: Path) -> None:
    run = primerl_package.Run(repository / RL, "--output-dir", str(tmp_path / "run"))
    with pytest.raises(RuntimeError, match=r"call run\.publish\(model\) first"):
        run.checkpoint_saved()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_ctrl_c_while_checking_leaves_no_process(model: Path, repository: Path, tmp_path: Path) -> None:
    mark = tmp_path.name
    arguments = ["rl", "@", RL, "--output-dir", str(tmp_path / "run"), "--model.path", str(model)]
    checking = subprocess.Popen(
        [sys.executable, "-m", "primerl", *arguments],
        cwd=repository,
        env={**os.environ, MARK: mark},
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(marked(mark)) >= 2, 60, "a check")
    checking.send_signal(signal.SIGINT)
    _, stderr = checking.communicate(timeout=30)
    assert checking.returncode == 130, stderr
    assert stderr == "interrupted\n"
    assert marked(mark) == []
    assert not (tmp_path / "run").exists()


def test_checks_that_take_too_long_name_the_setting(model: Path, repository: Path, tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path / "run"), "--model.path", str(model), "--timeouts.check-s", "0.01"]
    done = primerl("rl", "@", RL, *arguments, cwd=repository)
    assert done.returncode == 2
    for check in ("importing the environments (reverse-text, reverse-text-eval)", "the orchestrator's own check"):
        assert f"{check} did not end within timeouts.check_s = 0.01 s; raise it" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_sft_refuses_absent_data(repository: Path, tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path / "sft"), "--data.path", str(tmp_path / "absent.jsonl")]
    done = primerl("sft", "@", "examples/reverse-text/sft.toml", *arguments, cwd=repository)
    assert done.returncode == 2
    assert "data.path (on the command line): there is no file" in done.stderr
    assert not (tmp_path / "sft").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [(b"\n", "has no rows"), (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "line 2: needs `messages`")],
)
def test_sft_refuses_bad_rows_before_it_writes(rows: bytes, message: str, repository: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(rows)
    arguments = ["--output-dir", str(tmp_path / "sft"), "--data.path", str(data)]
    done = primerl("sft", "@", "examples/reverse-text/sft.toml", *arguments, cwd=repository)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "sft").exists()


def write_run(folder: Path, steps: int) -> None:
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "reward/all/mean": step / steps, "staleness/1": 6, "staleness/2": 2})
        lines[-1] |= {"time/step": 2.0, "time/wait_for_batch": 0.5, "perf/throughput": 1000.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99')
    evaluations = [
        {"environment": "held-out", "version": version, "mean_reward": reward, "metrics": {"exact": reward / 2}}
        for version, reward in ((0, 0.4), (steps, 0.9))
    ]
    evaluations[-1] |= {"avg@2": 0.9, "avg@2/low": 0.8, "avg@2/high": 1.0, "pass@1": 0.7}
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    summary = {
        "wall_s": 20.0,
        "start_s": 4.0,
        "run_s": 16.0,
        "launcher_cpu_s": 1.0,
        "processes": {"orchestrator": {"cpu_s": 1.0}, "trainer": {"cpu_s": 18.0}},
        "status": {"tokens": {"sampled": 32000}, "engines": [{"idle_share": 0.25}]},
    }
    (folder / "run").mkdir()
    (folder / "run" / "summary.json").write_text(json.dumps(summary))


def test_report_shows_how_much_of_the_samples_was_computed(tmp_path: Path) -> None:
    def row(*shares: float) -> str | None:
        steps = [{"step": step, "perf/shared_tokens": share} for step, share in enumerate(shares, 1)]
        rows = dict(report.rows(report.Results(tmp_path, steps, [], {})))
        return rows.get("tokens computed (samples share the others)")

    assert row(0.2, 0.4) == "30%"
    assert row(1.0, 1.0) is None, "nothing was shared"


def test_report_shows_what_a_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 10)
    rows = dict(report.rows(report.load(tmp_path)))
    assert rows["steps"] == "10"
    assert (rows["reward, first 5 steps"], rows["reward, last 5 steps"]) == ("0.300", "0.800")
    assert rows["held-out, exact (version 0 -> 10)"] == "0.200 -> 0.450"
    assert rows["held-out, reward (version 0 -> 10)"] == "0.400 -> 0.900 [0.800, 1.000]"
    assert rows["held-out, pass@1 (version 0 -> 10)"] == "0.700"
    assert rows["sampled tokens/s"] == "2,000"
    assert rows["staleness (share of samples)"] == "1: 75%  2: 25%"
    assert (rows["trainer idle"], rows["engine idle"]) == ("25%", "25%")
    assert rows["orchestrator's share of CPU time"] == "5.0% of 20.0 s"
    assert rows["wall time"] == "20.0 s (start 4.0 s)"
    assert main(["report", os.fspath(tmp_path)]) == 0
    assert "mean reward of each step" in capsys.readouterr().out
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", b'{"step": 1}\n\xff\n', "metrics.jsonl, line 2: not JSON: "),
        ("metrics.jsonl", b'{"step": 1}\n7\n', "metrics.jsonl, line 2: not a JSON object"),
        ("metrics.jsonl", b'{"step": 1\n{"step": 2}\n', "metrics.jsonl, line 1: not JSON: "),
        ("metrics.jsonl", b'{"step": 1, "reward/all/mean": "high"}\n', "metrics.jsonl, line 1: could not convert"),
        ("evals.jsonl", b'{"version": 1}\n', "evals.jsonl, line 1: 'environment' is missing"),
        ("metrics.jsonl", b'{"step": 1}\n{"reward/all/mean": 1}\n', "metrics.jsonl, line 2: 'step' is missing"),
        ("run/summary.json", b"{", "summary.json: not JSON: "),
        ("run/summary.json", b"[]", "summary.json: not a JSON object"),
        ("run/summary.json", b'{"wall_s": 1}', "summary.json: 'start_s' is missing"),
        ("run/summary.json", b'{"status": []}', "summary.json: "),
    ],
)
def test_report_names_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes, said: str
) -> None:
    write_run(tmp_path, 3)
    (tmp_path / file).write_bytes(content)
    assert main(["report", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line
    assert str(tmp_path / file) in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "primerl", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("primerl: the output cannot be written: ")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_null_device(closed: str, tmp_path: Path) -> None:
    """Otherwise a file or socket that is opened later gets its number, and is printed to."""
    script = """
import os, subprocess, sys
from primerl.cli import main
from primerl.process import streams
streams.ensure()
assert main(["--version"]) == 0
with open(sys.argv[1], "w") as opened:
    assert opened.fileno() > 2
    child = "import os; [os.fstat(number) for number in range(3)]"
    opened.write(str(subprocess.run([sys.executable, "-c", child], pass_fds=[]).returncode))
"""
    found = tmp_path / "code"
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", script, os.fspath(found)]
    subprocess.run(command, check=True, timeout=60)
    assert found.read_text() == "0"
    for arguments, code in ((["run", "list"], 0), (["nothing"], 2)):
        command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "primerl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_report_says_where_an_evaluation_is_of_a_part(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    first, last = (json.loads(line) for line in (tmp_path / "evals.jsonl").read_text().splitlines())
    last |= {"rollouts": 32, "expected": 72, "unmeasured": 40, "complete": False}
    (tmp_path / "evals.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    rows = dict(report.rows(report.load(tmp_path)))
    assert rows["held-out, reward (version 0 -> 10, 32 of 72 rollouts)"] == "0.400 -> 0.900 [0.800, 1.000]"


def test_report_of_an_empty_folder_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", os.fspath(tmp_path)]) == 2
    assert "holds no finished step" in capsys.readouterr().err


def test_report_of_a_run_that_trained_nothing_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "journal"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["report", os.fspath(tmp_path)]) == 2
    assert "no step is trained yet, and no launcher has written how the run ended" in words(capsys)
    reason = "env_task_0 exited with code 7\nthe end of /logs/env_worker_0.log:\n  SystemExit: 7"
    for code, how in ((1, "failed after 39 s: env_task_0 exited with code 7;"), (130, "was stopped after 39 s: ")):
        (tmp_path / "run/summary.json").write_text(json.dumps({"exit_code": code, "reason": reason, "wall_s": 39.1}))
        assert main(["report", os.fspath(tmp_path)]) == 2
        said = words(capsys)
        assert f"no step was trained; the run {how}" in said
        assert f"`primerl trace {tmp_path} --dropped`" in said
        assert "SystemExit" not in said


def test_report_of_a_run_that_failed_later_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    assert "the run" not in dict(report.rows(report.load(tmp_path)))
    file = tmp_path / "run/summary.json"
    summary = {**json.loads(file.read_text()), "exit_code": 1, "reason": "trainer exited with code 3\nits log"}
    file.write_text(json.dumps(summary))
    assert dict(report.rows(report.load(tmp_path)))["the run"] == "failed after 20 s: trainer exited with code 3"


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, however its lines were broken."""
    return " ".join(capsys.readouterr().err.split())
