"""The orchestrator inside a Python process, and as the wheel's command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import torch
from engine_helpers import Engine, mock_command, running, write_checkpoint
from primerl._core import Orchestrator, PrimerlError, orchestrate
from primerl.cli import main
from primerl.run_key import learn, run_key_header
from primerl.train.data.batch import decode_batch

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def engine(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with running("mock", mock_command(mock_binary), None, log) as engine:
        yield engine


def settings(model: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "max_steps": 2,
        "seq_len": 512,
        "batch_size": 4,
        "group_size": 2,
        "model": {"path": str(model), "name": "m"},
        "sampling": {"max_tokens": 8},
        "train": {"env": [{"id": "task"}]},
        "timeouts": {"long_poll_s": 1.0},
        **changes,
    }


class GoneError(Exception):
    """The run is over, or the worker is unknown."""


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"content-type": "application/msgpack", **run_key_header(url)}
    answer = httpx.post(url, content=msgpack.packb(body), headers=headers, timeout=PATIENCE_S)
    if answer.status_code == 410:
        raise GoneError(answer.text)
    assert answer.status_code == 200, answer.text
    return dict(msgpack.unpackb(answer.content))


def work(url: str, question: str = "example") -> None:
    """An env worker: one question a rollout, the reward is the answer's length."""
    registration = {"environment": "task", "role": "train", "name": "w", "pid": os.getpid(), "examples": 10}
    worker = post(f"{url}/envs/register", registration)["worker"]
    while True:
        answer = post(f"{url}/envs/lease", {"worker": worker, "max": 4})
        if answer["finished"]:
            break
        for lease in answer["rollouts"]:
            body = {"model": "m", "messages": [{"role": "user", "content": f"{question} {lease['example']}"}]}
            headers = {"authorization": f"Bearer {lease['api_key']}"}
            reply = httpx.post(f"{lease['base_url']}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
            if reply.status_code == 410:
                continue
            text = reply.json()["choices"][0]["message"]["content"]
            trace = {"session": "", "trainable": True, "ok": True, "reward": float(len(text)), "metrics": {}}
            outcome = {"ok": True, "traces": [{**trace, "stop_condition": None, "truncated": False}], "error": None}
            post(f"{url}/envs/result", {"worker": worker, "rollout": lease["rollout"], "outcome": outcome})
    post(f"{url}/envs/leave", {"worker": worker})


def work_until_it_is_gone(url: str) -> None:
    with contextlib.suppress(httpx.TransportError, GoneError):
        work(url)


def begin(orchestrator: Orchestrator, output: Path) -> None:
    """Starts it; requests of this process show the run's key from then on."""
    orchestrator.start()
    learn(orchestrator.url, output)


def publish(orchestrator: Orchestrator, output: Path, version: int) -> None:
    folder = output / f"broadcasts/step_{version}"
    write_checkpoint(folder, {"w": torch.full((3,), float(version))}, version)
    orchestrator.publish_weights(version, folder / "manifest.json")


def test_a_run_with_a_loop_of_ones_own(model: Path, engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with Orchestrator(settings(model, output, engines=[engine.url])) as orchestrator:
        begin(orchestrator, output)
        assert json.loads((output / "run/orchestrator.json").read_text())["url"] == orchestrator.url
        worker = threading.Thread(target=work, args=(orchestrator.url,))
        worker.start()
        publish(orchestrator, output, 0)
        steps: list[int] = []
        while (body := orchestrator.next_batch(len(steps) + 1, 0)) is not None:
            batch = decode_batch(body)
            steps.append(batch.step)
            assert body == (output / f"spool/step_{batch.step}/rank_0.msgpack").read_bytes()
            assert sum(len(micro_batch.token_ids) for micro_batch in batch.micro_batches) > 0
            publish(orchestrator, output, batch.step)
        assert steps == [1, 2]
        worker.join(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not orchestrator.status()["run"]["finished"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert orchestrator.status()["rollouts"]["trained"] == 8
    assert orchestrator.status()["run"]["finished"], "also after the end"


def test_batches_share_what_samples_of_a_group_begin_with(
    model: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    question = "which word of these is the longest one " * 8
    given = settings(model, output, engines=[engine.url], seq_len=1024, max_steps=1)
    with Orchestrator({**given, "shared_prefixes": True}) as orchestrator:
        begin(orchestrator, output)
        worker = threading.Thread(target=work, args=(orchestrator.url, question))
        worker.start()
        publish(orchestrator, output, 0)
        body = orchestrator.next_batch(1, 0)
        assert body is not None
        batch = decode_batch(body)
        publish(orchestrator, output, 1)
        worker.join(PATIENCE_S)
    # Two groups of two, of which all four begin with the same words.
    (micro_batch,) = batch.micro_batches
    assert micro_batch.shared[0] == 0
    assert min(micro_batch.shared[1:]) >= 32
    tokens = len(micro_batch.token_ids)
    computed = tokens - sum(micro_batch.shared)
    # Shared context is not written again.
    assert len(body) < 21 * tokens
    assert batch.metrics["perf/shared_tokens"] == pytest.approx(computed / tokens)
    assert main(["trace", str(output), "step", "1"]) == 0
    told = capsys.readouterr().out
    assert f"tokens that samples share are computed once: {computed} ({computed / tokens:.0%})" in told
    assert re.search(rf"rank 0 +micro-batch 0 +4 samples in 1 tree +{computed} of {tokens} tokens", told)
    # Packing without trees is another setting of the same run.
    with Orchestrator(given) as orchestrator:
        begin(orchestrator, output)
        assert orchestrator.status()["run"]["finished"]


def test_a_script_that_is_started_again_goes_on_from_its_checkpoint(
    model: Path, engine: Engine, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    config = settings(model, output, engines=[engine.url], max_steps=3)
    with Orchestrator(config) as orchestrator:
        begin(orchestrator, output)
        first_url = orchestrator.url
        worker = threading.Thread(target=work_until_it_is_gone, args=(first_url,))
        worker.start()
        publish(orchestrator, output, 0)
        bodies = []
        for step in (1, 2):
            bodies.append(orchestrator.next_batch(step, 0))
            with pytest.raises(PrimerlError, match=f"a checkpoint of step {step} was reported"):
                orchestrator.checkpoint_saved(step)
            publish(orchestrator, output, step)
        orchestrator.checkpoint_saved(1)
    worker.join(PATIENCE_S)
    with Orchestrator(config) as orchestrator:
        begin(orchestrator, output)
        assert orchestrator.url == first_url
        with pytest.raises(PrimerlError, match="batches before step 2 are gone"):
            orchestrator.resume_after(0)
        with pytest.raises(PrimerlError, match=r"only \d steps were cut"):
            orchestrator.resume_after(7)
        orchestrator.resume_after(1)
        publish(orchestrator, output, 1)
        assert orchestrator.next_batch(2, 0) == bodies[1]
        assert not (output / "spool/step_1").exists()
        publish(orchestrator, output, 2)
        worker = threading.Thread(target=work, args=(orchestrator.url,))
        worker.start()
        assert orchestrator.next_batch(3, 0) is not None
        publish(orchestrator, output, 3)
        worker.join(PATIENCE_S)
    orchestrator.checkpoint_saved(3)  # The run is over: nobody will ask for a batch.


def test_a_key_that_is_none_is_not_given(model: Path, tmp_path: Path) -> None:
    given = settings(model, tmp_path / "out", teacher=None, token_batch_size=None)
    given["sampling"]["rollout_max_tokens"] = None
    given["train"] = {"env": ({"id": "task", "name": None, "ratio": None},)}
    Orchestrator(given)
    assert given["teacher"] is None
    with pytest.raises(PrimerlError, match="max_steps: is missing, and has no default"):
        Orchestrator({**given, "max_steps": None})


def test_what_is_wrong_is_named(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(PrimerlError, match="batch_sise"):
        Orchestrator(settings(model, output, batch_sise=3))
    with pytest.raises(PrimerlError, match="multiple"):
        Orchestrator(settings(model, output, batch_size=3))
    orchestrator = Orchestrator(settings(tmp_path / "nowhere", output))
    with pytest.raises(PrimerlError, match="nowhere"):
        orchestrator.start()
    with pytest.raises(PrimerlError, match="start"):
        _ = orchestrator.url
    assert not output.exists()


def test_refusals_are_errors_and_shutdown_is_harmless_to_repeat(model: Path, tmp_path: Path) -> None:
    orchestrator = Orchestrator(settings(model, tmp_path / "out"))
    orchestrator.shutdown()
    orchestrator.start()
    with pytest.raises(PrimerlError, match="started already"):
        orchestrator.start()
    with pytest.raises(PrimerlError, match="rank 5"):
        orchestrator.next_batch(1, 5)
    with pytest.raises(PrimerlError, match="cannot read"):
        orchestrator.publish_weights(0, tmp_path / "manifest.json")
    orchestrator.shutdown("first")
    orchestrator.shutdown("second")


def test_shutdown_wakes_a_thread_that_waits_for_a_batch(model: Path, tmp_path: Path) -> None:
    orchestrator = Orchestrator(settings(model, tmp_path / "out"))
    orchestrator.start()
    answers: list[bytes | None] = []
    waiter = threading.Thread(target=lambda: answers.append(orchestrator.next_batch(1, 0)))
    waiter.start()
    deadline = time.monotonic() + PATIENCE_S
    while not orchestrator.status()["trainer"]["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    orchestrator.shutdown("the test is over")
    waiter.join(PATIENCE_S)
    assert answers == [None]


@pytest.mark.processes
def test_it_cannot_be_used_after_a_fork(model: Path, tmp_path: Path) -> None:
    script = """
import os, sys
from primerl._core import Orchestrator, PrimerlError
import json
orchestrator = Orchestrator(json.loads(sys.argv[1]))
orchestrator.start()
child = os.fork()
if child == 0:
    try:
        orchestrator.status()
    except PrimerlError as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    arguments = json.dumps(settings(model, tmp_path / "out"))
    # Nobody calls shutdown here: the interpreter's exit does.
    subprocess.run([sys.executable, "-c", script, arguments], check=True, timeout=PATIENCE_S)


@pytest.mark.processes
def test_ctrl_c_interrupts_a_wait_for_a_batch(model: Path, tmp_path: Path) -> None:
    # A test runner in the background may have set SIGINT to be ignored, which children inherit.
    script = """
import json, signal, sys
from primerl._core import Orchestrator
signal.signal(signal.SIGINT, signal.default_int_handler)
with Orchestrator(json.loads(sys.argv[1])) as orchestrator:
    orchestrator.start()
    try:
        print("waiting", flush=True)
        orchestrator.next_batch(1, 0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    arguments = json.dumps(settings(model, tmp_path / "out"))
    with subprocess.Popen([sys.executable, "-c", script, arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(PATIENCE_S) == 0


def write_toml(path: Path, model: Path, output: Path) -> Path:
    path.write_text(
        f'output_dir = "{output}"\nmax_steps = 2\nbatch_size = 4\ngroup_size = 2\n'
        f'[model]\npath = "{model}"\n[[train.env]]\nid = "task"\n'
    )
    return path


def test_the_command_checks_and_refuses(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_toml(tmp_path / "run.toml", model, tmp_path / "out")
    assert orchestrate(["--config", str(config), "--check"]) == 0
    config.write_text(config.read_text().replace("group_size", "groupsize"))
    assert orchestrate(["--config", str(config)]) == 2
    assert "groupsize" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_the_command_ends_in_order_at_ctrl_c(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = write_toml(tmp_path / "run.toml", model, output)
    script = "import sys; from primerl._core import orchestrate; sys.exit(orchestrate(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--config", str(config)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while not (output / "run/orchestrator.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log
    assert "Traceback" not in log
