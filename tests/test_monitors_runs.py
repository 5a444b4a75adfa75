"""Monitors of whole runs: they see it all, and a run does not see them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end import launch, read_lines, until
from monitor_servers import PrimeServer, WandbServer
from test_monitors import holding

OWN = """
[[monitors]]
path = "test_monitors:Noting"
args = {{ file = "{file}" }}
log_extras = {{ interval = 2, sample_ratio = 0.2 }}
"""


@pytest.mark.end_to_end
def test_a_run_is_told_to_all_of_them(model: Path, tmp_path: Path) -> None:
    output, noted = tmp_path / "run", tmp_path / "noted"
    (tmp_path / "own.toml").write_text(OWN.format(file=noted))
    prime, wandb = PrimeServer(), WandbServer()
    prime.key, wandb.key = "prime-" + "p" * 40, "w" * 40
    variables = {
        "WANDB_BASE_URL": wandb.url,
        "PRIME_API_KEY": prime.key,
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    given = ["@", str(tmp_path / "own.toml"), "--max-steps", "4", "--wandb.api-key", wandb.key, "--wandb.name", "mine"]
    given += ["--orchestrator.wandb.log-extras.interval", "2", "--trainer.wandb.log-extras.interval", "2"]
    given += ["--orchestrator.prime-monitor.base-url", f"{prime.url}/rft"]
    given += ["--orchestrator.prime-monitor.log-extras.interval", "4"]
    with prime.serving(), wandb.serving():
        run = launch(model, output, *given, variables=variables)
        try:
            run.note_mark()
            until(lambda: run.steps() >= 1 and wandb.runs, 120, "the first step")
            killed = run.pid_of("monitor")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            code, said = run.ended(180)
        finally:
            run.kill()
        assert code == 0, said
        rows, samples = wandb.history(), prime.bodies("/samples/presign")
        (at_wandb,) = wandb.runs.values()
        tables = [call for call in prime.calls if call[1].startswith("/storage/")]
    assert "monitor was killed by SIGKILL; it is started again" in said
    assert f"monitor wandb: {wandb.url}/me/primerl/runs/" in said
    assert "has failed" not in said
    # W&B: metrics of trainer and orchestrator in one run, evaluations, samples, histograms.
    metrics = read_lines(output / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss/mean" in row] == [1, 2, 3, 4]
    assert [row["reward/all/mean"] for row in rows if "loss/mean" in row] == [
        line["reward/all/mean"] for line in metrics
    ]
    assert [row["step"] for row in rows if "eval/reverse-text-eval/mean_reward" in row] == [0, 4]
    assert [row["step"] for row in rows if "samples" in row] == [2, 4]
    (histograms,) = [row for row in rows if row["step"] == 2 and "samples" in row]
    assert sum(histograms["distributions/rewards"]["values"]) == 32
    assert sum(histograms["distributions/entropy"]["values"]) > 32
    assert at_wandb["config"]["orchestrator"]["value"]["batch_size"] == 32
    assert (at_wandb["displayName"], at_wandb["exit_code"]) == ("mine", 0)
    # The platform.
    sent = {
        call[2]["Idempotency-Key"]: json.loads(call[3])["metrics"] for call in prime.calls if call[1] == "/rft/metrics"
    }
    assert [line["step"] for line in sent.values() if "loss/mean" in line] == [1, 2, 3, 4]
    assert [body["step"] for body in samples] == [4]
    assert prime.bodies("/samples/confirm")[0]["s3_key"] == "step-4"
    assert len(prime.bodies("/distributions")[0]["distributions"]["rewards"]) == 32
    assert prime.bodies("/external-runs")[0]["environments"] == [{"id": "reverse-text"}]
    assert [len(call[2].get("Authorization", "")) for call in tables] == [0]
    # One's own.
    lines = [json.loads(line) for line in noted.read_text().splitlines()]
    assert lines[-1] == ["finished", "finished"]
    assert list((output / "monitor" / "extras").iterdir()) == []  # everybody has them
    told = json.loads(Path(f"{noted}.samples").read_text().splitlines()[0])
    prompts = told[1:]
    assert (told[0], len(prompts)) == (2, 7)
    assert all(prompt.startswith("<|im_start|>user\nReverse") for prompt in prompts)
    for key in (prime.key, wandb.key):
        assert not holding(tmp_path, key)
        assert key not in said


@pytest.mark.end_to_end
def test_a_monitor_that_fails_leaves_the_training_alone(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.toml").write_text(OWN.format(file=tmp_path / "missing" / "noted"))
    output = tmp_path / "run"
    command = [sys.executable, "-m", "primerl", "sft", "@", str(tmp_path / "own.toml"), "--output-dir", str(output)]
    command += ["--max-steps", "2", "--data.path", str(tmp_path / "data.jsonl"), "--model.tiny.hidden-size", "32"]
    command += ["--data.batch-size", "64", "--data.seq-len", "64", "--monitor.finish-s", "1"]
    paths = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    again = f"`primerl monitor @ {output / 'configs' / 'monitor.toml'}` sends the rest"
    assert "monitor Noting has failed: 2 of 2 records were not sent (FileNotFoundError" in done.stdout
    assert again in done.stdout
    (tmp_path / "missing").mkdir()
    command = [sys.executable, "-m", "primerl", "monitor", "@", str(output / "configs" / "monitor.toml")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True, timeout=60)
    lines = [json.loads(line) for line in (tmp_path / "missing" / "noted").read_text().splitlines()]
    assert [line[:2] for line in lines] == [[0, 1], [1, 2], ["finished", "exit code 0"]]
