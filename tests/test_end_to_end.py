"""Whole runs of the short recipe: what is learnt, what is exact, and what happens when something dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_pages import shown
from end_to_end import REPOSITORY, Started, arguments_of, column, has_learnt, launch, mean, primerl, read_lines, until
from metrics_page import rows, without_row

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
# Long enough that the test, not the run, decides when it ends.
ENDLESS = (
    "--max-steps",
    "100000",
    "--restarts",
    "0",
    "--orchestrator.eval.env",
    "[]",
    "--orchestrator.timeouts.no-engine-s",
    "10",
)
NAMED_WITHIN_S = 30
PROCESSES = ["orchestrator", "trainer", "inference", "env_reverse-text_0"]


@pytest.fixture(scope="module")
def model(imitator: Path) -> Path:
    return imitator


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "trained"
    primerl("rl", *arguments_of(model, output, "--keep-broadcasts", "--ckpt.interval", "10"))
    return output


@pytest.fixture
def endless(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    """A run that has trained two steps and continues; a parameter is more of its arguments."""
    run = launch(model, tmp_path / "run", *ENDLESS, *getattr(request, "param", ()))
    try:
        run.note_mark()
        until(lambda: run.steps() >= 2 or run.launcher.poll() is not None, 180, "two steps")
        assert run.launcher.poll() is None, run.ended(5)
        yield run
    finally:
        run.kill()


def test_reward_rises(trained: Path) -> None:
    has_learnt(trained)


def test_staleness_is_bounded_and_generation_ran_ahead(trained: Path) -> None:
    assert max(column(trained, "staleness/max")) <= 8
    assert max(column(trained, "staleness/max")) >= 1


# Those of mixtures (max_vio, routing_confidence) and of GPUs (perf/mfu) are in test_train_metrics.py.
METRICS = (
    "loss/mean reward/all/mean reward/reverse-text/mean seq_len/all/mean seq_len/all/max seq_len/all/min "
    "seq_len/reverse-text/mean seq_len/reverse-text/max seq_len/reverse-text/min is_truncated/all/mean "
    "is_truncated/reverse-text/mean num_turns/all/mean num_turns/all/max num_turns/all/min num_turns/reverse-text/mean "
    "num_turns/reverse-text/max num_turns/reverse-text/min empty_rollouts/all/count empty_rollouts/all/mean "
    "empty_rollouts/reverse-text/count errored_rollouts/all/count errored_rollouts/all/mean "
    "errored_rollouts/reverse-text/count errors/model errors/engine errors/tool errors/environment errors/timeout "
    "errors/infrastructure mismatch_kl/all/mean mismatch_kl/all/std mismatch_kl/all/max "
    "mismatch_kl/reverse-text/mean mismatch_kl/reverse-text/std mismatch_kl/reverse-text/max entropy/all/mean "
    "entropy/reverse-text/mean masked_advantage_positive/mean masked_advantage_negative/mean optim/lr optim/grad_norm "
    "optim/zero_grad_ratio progress/epoch progress/num_samples progress/num_tokens progress/reverse-text/ratio_samples "
    "progress/reverse-text/ratio_tokens perf/throughput perf/throughput_per_gpu perf/peak_memory time/step "
    "time/forward_backward time/optimizer time/wait_for_batch time/broadcast time/wait_for_broadcast time/save_ckpt "
    "time/wait_for_ckpt masked_share/positive/mean masked_share/negative/mean"
)


def test_every_metric_is_recorded(trained: Path) -> None:
    lines = read_lines(trained / "metrics.jsonl")
    for line in lines:
        for name in METRICS.split():
            assert isinstance(line[name], float | int), name
        assert line["seq_len/all/min"] <= line["seq_len/all/mean"] <= line["seq_len/all/max"]
        assert line["progress/reverse-text/ratio_tokens"] == 1.0
    epochs = [line["progress/epoch"] for line in lines]
    assert epochs == sorted(epochs)
    assert epochs[0] > 0.0
    # The first batch is of rollouts that ended before it.
    assert {"empty_rollouts/reverse-text/mean", "errored_rollouts/reverse-text/mean"} <= set(lines[0])
    for name in ("time/save_ckpt", "time/wait_for_ckpt"):
        assert [line["step"] for line in lines if line[name]] == [10, 20, 25]
    # The previous broadcast.
    assert ["time/broadcast_thread" in line for line in lines] == [False, *[True] * 24]


def test_every_recorded_metric_has_a_row(trained: Path, repository: Path) -> None:
    names = {name for line in read_lines(trained / "metrics.jsonl") for name in line} - {"step", "timestamp"}
    assert without_row(names, rows(repository)) == []


def test_metrics_that_the_pages_name_are_recorded(trained: Path, repository: Path) -> None:
    page = (repository / "docs" / "concepts.md").read_text()
    rows = re.findall(r"^.*metrics\.jsonl.*$", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+/[\w/]+)`", row)}
    assert len(named) >= 6
    assert named <= set(read_lines(trained / "metrics.jsonl")[-1])


def test_every_trained_token_is_exact(trained: Path) -> None:
    assert "token-exact" in primerl("verify", str(trained))


def test_report_of_a_whole_run(trained: Path) -> None:
    text = primerl("report", str(trained))
    for name in ("reward, last 5 steps", "exact", "wall time", "staleness", "trainer idle", "engine idle"):
        assert name in text
    assert (trained / "reward.png").stat().st_size > 1000


def test_finished_run_leaves_model_configs_logs_and_no_process(trained: Path) -> None:
    assert (trained / "weights" / "step_25" / "model.safetensors").is_file()
    logs = ["orchestrator.log", "trainer.log", "inference.log", "envs/train/reverse-text/env_worker_0.log"]
    assert all((trained / "logs" / log).stat().st_size for log in logs)
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(trained) not in processes


def test_shuffled_advantages_teach_nothing(model: Path, trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "control"
    primerl("rl", *arguments_of(model, output, "--orchestrator.algorithm.shuffle-advantages"))
    control = mean(column(output, "reward/all/mean")[-10:])
    assert control <= 0.75
    assert mean(column(trained, "reward/all/mean")[-10:]) - control >= 0.15


def test_engines_that_render_are_trained_exactly(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "rendered"
    short = ["--max-steps", "5", "--orchestrator.eval.env", "[]", "--keep-broadcasts"]
    renders = ["--orchestrator.client-type", "openai_chat_completions_token"]
    primerl("rl", *arguments_of(model, output, *short, *renders))
    assert len(column(output, "reward/all/mean")) == 5
    assert max(column(output, "staleness/max")) >= 1
    assert "token-exact" in primerl("verify", str(output))


@pytest.mark.parametrize("name", PROCESSES)
def test_killed_process_is_named_and_all_are_stopped(endless: Started, name: str) -> None:
    pid = endless.pid_of(name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    code, output = endless.ended(NAMED_WITHIN_S)
    assert code == 1, output
    assert f"the run has failed: {name} was killed by SIGKILL" in output
    assert "\nthe end of " in output
    assert endless.left() == []


def test_killed_guard_is_named_and_all_are_stopped(endless: Started) -> None:
    guard = endless.guard()
    assert guard is not None
    os.kill(guard, signal.SIGKILL)
    code, output = endless.ended(NAMED_WITHIN_S)
    assert code == 1, output
    assert "the guard of the processes was killed" in output
    assert endless.left() == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("orchestrator", "orchestrator has not answered"),
        ("trainer", "the trainer has been silent for"),
        ("env_reverse-text_0", "env_reverse-text_0 hangs"),
        ("inference", "no engine could be reached for"),
    ],
)
def test_hung_process_is_named(endless: Started, name: str, words: str) -> None:
    pid = endless.pid_of(name)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # Named, then ended: SIGTERM does not reach a stopped process, which takes its whole grace period.
    code, output = endless.ended(NAMED_WITHIN_S + 30)
    assert code == 1, output
    assert words in output
    assert endless.left() == []


def test_killed_launcher_leaves_nothing(endless: Started) -> None:
    endless.launcher.kill()
    until(lambda: endless.left() == [], 60, "all processes to end")


def test_ctrl_c_stops_everything(endless: Started) -> None:
    endless.launcher.send_signal(signal.SIGINT)
    code, output = endless.ended(NAMED_WITHIN_S)
    assert code == 130, output
    assert endless.left() == []
    assert "Traceback" not in output


@pytest.mark.parametrize("endless", [("--timeouts.stop-s", "300")], indirect=True)
def test_second_ctrl_c_kills(endless: Started) -> None:
    # A stopped process cannot end in order, so the first Ctrl-C alone would take its whole grace period.
    pid = endless.pid_of("trainer")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    endless.launcher.send_signal(signal.SIGINT)
    assert endless.launcher.stdout is not None
    for line in endless.launcher.stdout:
        if "Ctrl-C again kills" in line:
            break
    endless.launcher.send_signal(signal.SIGINT)
    code, output = endless.ended(60)
    assert code == 130, output
    assert "killed" in output
    assert endless.left() == []


def test_ctrl_c_while_starting(model: Path, tmp_path: Path) -> None:
    run = launch(model, tmp_path / "run", *ENDLESS)
    try:
        run.note_mark()
        run.launcher.send_signal(signal.SIGINT)
        code, output = run.ended(NAMED_WITHIN_S)
        assert code == 130, output
        assert run.left() == []
    finally:
        run.kill()


def test_own_training_loop(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "own"
    script = REPOSITORY / "examples" / "bring-your-own-trainer" / "train.py"
    assert len(script.read_text().splitlines()) < 40
    file, *overrides = arguments_of(model, output, "--max-steps", "4")[1:]
    meant = {
        "python": sys.executable,
        "examples/bring-your-own-trainer/train.py": str(script),
        "examples/reverse-text/rl.toml": file,
        "outputs/reverse-text/own-loop": str(output),
    }
    [command] = shown(__file__, "docs/recipes/own-trainer.md", meant)
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1", "2", "3", "4"]
    assert [evaluation["version"] for evaluation in read_lines(output / "evals.jsonl")] == [0, 4]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(output) not in processes


def test_own_training_loop_names_a_killed_engine(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "own"
    script = REPOSITORY / "examples" / "bring-your-own-trainer" / "train.py"
    arguments = arguments_of(model, output, *ENDLESS)[1:]
    with subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as own:
        run = Started(own, output)
        try:
            until(lambda: run.steps() >= 2 or own.poll() is not None, 180, "two steps")
            engine = run.pid_of("inference")
            assert engine is not None, run.ended(5)
            os.kill(engine, signal.SIGKILL)
            code, text = run.ended(NAMED_WITHIN_S)
        finally:
            own.kill()
    assert code == 1, text
    assert "RunFailedError: inference was killed by SIGKILL\nthe end of " in text
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(output) not in processes


def test_own_training_loop_goes_on_after_kill_9(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "own"
    script = str(REPOSITORY / "examples" / "bring-your-own-trainer" / "train.py")
    arguments = arguments_of(model, output)[1:]
    with subprocess.Popen([sys.executable, script, *arguments, *ENDLESS], stdout=subprocess.DEVNULL) as own:
        run = Started(own, output)
        try:
            until(lambda: run.steps() >= 2 or own.poll() is not None, 180, "two steps")
        finally:
            own.kill()
    last = run.steps() + 2
    resumed = [sys.executable, script, *arguments, *(str(last) if one == ENDLESS[1] else one for one in ENDLESS)]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {last} " in done.stdout
    # It does not wait for the env workers of the script that was killed, whether they had rollouts or not.
    log = (output / "logs" / "orchestrator.log").read_text()
    assert "worker left worker=0" in log
    assert "sent nothing for" not in log
