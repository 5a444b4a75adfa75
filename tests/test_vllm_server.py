"""`primerl inference` with vLLM's own server: how it ends, however it ends, and what it says of a start that failed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from engine_helpers import (
    GENERATE,
    VLLM_PYTHON,
    Engine,
    need_vllm,
    request,
    running,
    start_together,
    vllm_command,
    wait_until,
)
from primerl.launch.supervise.trees import MARK, marked

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
# vLLM sees its engine process's death at once, and takes its time to end.
ENDS_WITHIN_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    need_vllm()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of all that the test starts."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    return mark


def engine_process(mark: str) -> int:
    """vLLM's process that computes; its server speaks HTTP."""
    (found,) = [pid for pid in marked(mark) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def several_long(engine: Engine, pool: ThreadPoolExecutor) -> None:
    body = {**request(max_tokens=900, ignore_eos=True), "stream": True}
    start_together(engine, pool, [partial(engine.post, GENERATE, body)] * 4)


def test_sigterm_ends_all_of_it_with_requests_in_flight(
    model: Path, tmp_path: Path, pool: ThreadPoolExecutor, mark: str
) -> None:
    with running("vllm", vllm_command(model, tmp_path), model, tmp_path / "log") as engine:
        several_long(engine, pool)
        assert len(marked(mark)) >= 3
        began = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(20) == 0
        assert time.monotonic() - began < 12
        assert marked(mark) == []
    assert "primerl.inference: stopped" in (tmp_path / "log").read_text()


def test_sigkill_leaves_nothing(model: Path, tmp_path: Path, mark: str) -> None:
    with running("vllm", vllm_command(model, tmp_path), model, tmp_path / "log") as engine:
        assert len(marked(mark)) >= 3
        engine.process.kill()
        wait_until(lambda: marked(mark) == [], "the end of vLLM's processes", 10)


def test_killed_engine_process_is_named_and_may_be_started_again(
    model: Path, tmp_path: Path, pool: ThreadPoolExecutor, mark: str
) -> None:
    with running("vllm", vllm_command(model, tmp_path), model, tmp_path / "log") as engine:
        several_long(engine, pool)
        os.kill(engine_process(mark), signal.SIGKILL)
        # By a signal, which tells the launcher that another start may help.
        assert engine.process.wait(ENDS_WITHIN_S) == -signal.SIGABRT
        assert marked(mark) == []
    assert "vLLM's server exited with code" in (tmp_path / "log").read_text()


def refused(command: list[str]) -> tuple[int, str]:
    """Exit code, and what was said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_model_that_vllm_would_die_of_is_refused(model: Path, tmp_path: Path) -> None:
    shape = json.loads((model / "config.json").read_text()) | {"head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    code, said = refused(vllm_command(tmp_path, tmp_path))
    assert code == 2
    assert "attention heads of 16" in said


def test_failed_start_says_why(model: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    code, said = refused(vllm_command(model, tmp_path, "vllm = { made-up-option = 1 }"))
    assert code == 1
    assert "vLLM's server exited with code 2: error: unrecognized arguments: --made-up-option" in said
    assert time.monotonic() - began < 100, "it does not wait for a server that has ended"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = refused(vllm_command(model, tmp_path, f"port = {taken.getsockname()[1]}"))
    assert code == 1
    assert "vLLM's server exited with code 1: OSError: [Errno 98] Address already in use" in said


TIED_HEAD = """
import torch
from torch import nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from primerl.inference.vllm.computed import NotLoadedError, compare, refresh_packed_heads

generator = torch.Generator().manual_seed(0)
old, new = torch.randn(2, 64, 32, generator=generator)
model = nn.Module()
model.lm_head = nn.Module()
model.lm_head.quant_method = UnquantizedEmbeddingMethod()
model.lm_head.weight = nn.Parameter(old.clone(), requires_grad=False)
dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
known = compare(model, {"model.embed_tokens.weight": old})
assert known.check(known) == 1
# What vLLM's reload does: the weight is new, the packed copy is not.
model.lm_head.weight.copy_(new)
tensors = {"model.embed_tokens.weight": new}
try:
    compare(model, tensors).check(known)
except NotLoadedError as error:
    assert "['lm_head.weight']" in str(error), error
else:
    raise SystemExit("a stale packed copy was not seen")
assert refresh_packed_heads(model) == 1
assert compare(model, tensors).check(known) == 1
model.lm_head.weight[3, 3] += 1e-6
try:
    compare(model, tensors).check(known)
except NotLoadedError:
    print("seen")
"""


def test_weights_that_the_model_does_not_compute_with_are_seen(repository: Path) -> None:
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", TIED_HEAD],
        env={**os.environ, "PYTHONPATH": str(repository / "python")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["seen"]), done.stderr
