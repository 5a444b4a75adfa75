"""How engines end: SIGTERM, a model that fails, a step that hangs; and what the mock breaks to order."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    GENERATE,
    KINDS,
    Engine,
    any_tensors,
    mock_command,
    request,
    running,
    start_many,
    torch_command,
    wait_until,
    write_checkpoint,
)


@pytest.fixture(params=KINDS)
def own_engine(request: pytest.FixtureRequest, mock_binary: Path, model: Path, tmp_path: Path) -> Iterator[Engine]:
    is_mock = request.param == "mock"
    # Room for three of four requests of 300 tokens.
    mock = mock_command(mock_binary, "--kv-cache-tokens", "1100", "--fail-forward-at", "2000")
    command = mock if is_mock else torch_command(model, tmp_path, "kv_cache_tokens = 1100")
    with running(request.param, command, None if is_mock else model, tmp_path / "log") as engine:
        yield engine


def test_preemption_changes_no_answer_and_sigterm_answers_all(own_engine: Engine, pool: ThreadPoolExecutor) -> None:
    engine = own_engine
    sampling: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "logprobs": 0}
    crowd = [pool.submit(engine.generate, seed=seed, **sampling) for seed in range(4)]
    crowded = [answer.result()["choices"][0]["token_ids"] for answer in crowd]
    assert engine.metric("vllm:num_preemptions_total") > 0
    assert crowded[3] == engine.tokens(seed=3, **sampling)
    # Not two of them fit: when the signal comes, the last one has still to begin.
    answers = start_many(engine, pool, 3)
    began = time.monotonic()
    engine.process.send_signal(signal.SIGTERM)
    reasons = [answer.result()["choices"][0]["finish_reason"] for answer in answers]
    assert "abort" in reasons
    assert set(reasons) <= {"abort", "length"}
    assert time.monotonic() - began < 10
    # On a busy machine the interpreter takes more than a second to unload torch.
    assert engine.process.wait(10) == 0


def test_dead_backend(own_engine: Engine, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    engine = own_engine
    if engine.model is not None:
        tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in any_tensors(engine, 0).items()}
        write_checkpoint(tmp_path / "nan", tensors, version=1)
        engine.update(tmp_path / "nan", "1")
    # Two of them do not fit whole, so this takes more than 2,000 steps; the mock's 2000th fails.
    flood = [pool.submit(engine.post, GENERATE, request(max_tokens=900, ignore_eos=True)) for _ in range(6)]
    wait_until(lambda: engine.client.get("/health").status_code == 503, "the failure", 60)
    answers = [answer.result() for answer in flood]
    failed = [answer.json()["error"] for answer in answers if answer.status_code == 500]
    assert failed
    assert all(error["type"] == "InternalServerError" for error in failed)
    assert engine.process.wait(20) == 1
    words = "fails as ordered" if engine.model is None else "weights or the KV cache are broken"
    assert words in (tmp_path / "log").read_text()
    assert all(words in error["message"] for error in failed)


def test_hanging_step_is_seen(mock_binary: Path, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    command = mock_command(mock_binary, "--hang-forward-at", "3", "--step-deadline-s", "0.3")
    with running("mock", command, None, tmp_path / "log") as engine:
        pool.submit(engine.post, GENERATE, request(max_tokens=10, ignore_eos=True))
        wait_until(lambda: engine.client.get("/health").status_code == 503, "the stall's report")
        assert "has been running for" in engine.client.get("/health").text
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(20) == 0


def test_mock_faults_of_updates(mock_binary: Path, tmp_path: Path) -> None:
    with running("mock", mock_command(mock_binary, "--wrong-digest"), None, tmp_path / "log") as engine:
        contents = write_checkpoint(tmp_path / "w", any_tensors(engine, 0), version=1)
        engine.update(tmp_path / "w", "1")
        assert engine.digest() != contents["digest"]
    with running("mock", mock_command(mock_binary, "--refuse-update"), None, tmp_path / "log") as engine:
        engine.post("/start_weight_update")
        assert engine.post("/update_weights", {"update_info": {"path": str(tmp_path / "w")}}).status_code == 500
        assert engine.label() == "default"
