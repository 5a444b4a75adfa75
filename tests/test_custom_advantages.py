"""Advantages from a function of one's own: what it is given, what its answer does, how its failures end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import outside
import pytest
import torch
from engine_helpers import Engine, mock_command, running
from primerl._core import Orchestrator, PrimerlError, orchestrate
from primerl.advantages import GROUP, Group, Sample, Trace, compute, load
from primerl.train.data.batch import decode_batch
from test_orchestrator_in_process import PATIENCE_S, GoneError, begin, publish, settings, work, write_toml

SEEN: list[tuple[Group, int]] = []
"""What the functions below were called with, and on which thread."""


def by_token(group: Group) -> list[Any]:
    """A tensor, a list or a number, by turns: the advantage of a token is its position in the sample."""
    SEEN.append((group, threading.get_ident()))
    answers: list[Any] = [torch.arange(len(sample.token_ids), dtype=torch.float32) for sample in group.samples]
    answers[0] = answers[0].tolist()
    return answers


def broken(group: Group) -> list[Any]:
    return [group.traces[99].reward]


RELEASE = threading.Event()


def hanging(group: Group) -> list[Any]:
    RELEASE.wait()
    return []


@pytest.fixture(scope="module")
def engine(mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with running("mock", mock_command(mock_binary), None, log) as engine:
        yield engine


def custom(function: str, **changes: Any) -> dict[str, Any]:
    return {"type": "custom", "path": f"{__name__}:{function}", **changes}


def test_each_token_gets_its_own_advantage(model: Path, engine: Engine, tmp_path: Path) -> None:
    SEEN.clear()
    output = tmp_path / "out"
    config = settings(model, output, engines=[engine.url], algorithm=custom("by_token"), max_steps=1)
    with Orchestrator(config) as orchestrator:
        begin(orchestrator, output)
        worker = threading.Thread(target=work, args=(orchestrator.url,))
        worker.start()
        publish(orchestrator, output, 0)
        body = orchestrator.next_batch(1, 0)
        assert body is not None
        publish(orchestrator, output, 1)
        worker.join(PATIENCE_S)
    trained = 0
    for micro_batch in decode_batch(body).micro_batches:
        columns = (micro_batch.advantages, micro_batch.loss_mask, micro_batch.token_ids)
        for advantages, mask, ids in zip(
            *(column.split(list(micro_batch.sequence_lengths)) for column in columns), strict=True
        ):
            assert torch.equal(advantages, torch.arange(len(ids)) * mask)
            trained += int(mask.sum())
    assert trained > 0
    groups = [group for group, _ in SEEN]
    assert len(groups) >= 2
    assert {thread for _, thread in SEEN}.isdisjoint({threading.get_ident()})
    assert len({thread for _, thread in SEEN}) == 1
    for group in groups:
        assert (group.environment, len(group.traces), len(group.samples)) == ("task", 2, 2)
        for sample in group.samples:
            logprobs = torch.frombuffer(bytearray(sample.logprobs), dtype=torch.float32)
            mask = torch.frombuffer(bytearray(sample.loss_mask), dtype=torch.uint8)
            assert 0 < int(mask.sum()) < len(mask) == len(sample.token_ids) == len(logprobs)
            assert torch.equal(logprobs != 0, mask == 1)
            assert group.traces[sample.trace].turns == 1


def work_until_the_run_fails(url: str) -> None:
    # Refusals and cut connections are what a worker sees then.
    with contextlib.suppress(AssertionError, httpx.HTTPError, KeyError, GoneError):
        work(url)


@pytest.mark.parametrize(
    ("function", "timeout_s", "reason"),
    [("broken", PATIENCE_S, "IndexError: tuple index"), ("hanging", 0.05, "no answer within 0.05")],
)
def test_a_function_that_only_fails_ends_the_run(
    model: Path, engine: Engine, tmp_path: Path, function: str, timeout_s: float, reason: str
) -> None:
    RELEASE.clear()
    output = tmp_path / "out"
    config = settings(model, output, engines=[engine.url], algorithm=custom(function, timeout_s=timeout_s))
    with Orchestrator(config) as orchestrator:
        begin(orchestrator, output)
        worker = threading.Thread(target=work_until_the_run_fails, args=(orchestrator.url,))
        worker.start()
        publish(orchestrator, output, 0)
        deadline = time.monotonic() + PATIENCE_S
        while (finished := orchestrator.status()["run"]["finished"]) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "the last 8 groups were dropped and none was completed" in finished
        assert f"custom advantages failed: {reason}" in finished
        worker.join(PATIENCE_S)
    RELEASE.set()  # Nothing hangs on.


def test_what_cannot_be_called_is_refused_before_the_start(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path, reason in {"no_such_module:f": "no_such_module", f"{__name__}:nothing": "has no function"}.items():
        orchestrator = Orchestrator(settings(model, tmp_path / "out", algorithm={"type": "custom", "path": path}))
        with pytest.raises(PrimerlError, match=rf"algorithm\.path: `{path}`: .*{reason}"):
            orchestrator.start()
    with pytest.raises(PrimerlError, match=r"algorithm\.path: must be"):
        Orchestrator(settings(model, tmp_path / "out", algorithm={"type": "custom"}))
    config = write_toml(tmp_path / "run.toml", model, tmp_path / "out")
    config.write_text(config.read_text() + f'[algorithm]\ntype = "custom"\npath = "{__name__}:by_token"\n')
    assert orchestrate(["--config", str(config), "--check"]) == 0, capfd.readouterr().err


TRACES = [(7, 0.5, {"length": 3.0}, False, 1)]
SAMPLES = [(0, b"\x01\0\0\0\x02\0\0\0", b"\0\x01", b"\0\0\0\0\0\0\0\xbf")]


def answered(answer: Any) -> list[bytes]:
    return compute(lambda group: answer, "task", 3, TRACES, SAMPLES)


def test_what_a_function_may_answer() -> None:
    seen: list[Group] = []

    def function(group: Group) -> list[float]:
        seen.append(group)
        return [1.0]

    assert compute(function, "task", 3, TRACES, SAMPLES) == [b"\0\0\x80?" * 2]
    (group,) = seen
    assert (group.environment, group.example) == ("task", 3)
    assert group.traces == (Trace(7, 0.5, {"length": 3.0}, False, 1),)
    (sample,) = group.samples
    assert isinstance(sample, Sample)
    assert [list(column) for column in (sample.token_ids, sample.loss_mask, sample.logprobs)] == [
        [1, 2],
        [0, 1],
        [0.0, -0.5],
    ]
    assert answered([[0, 2]]) == [b"\0\0\0\0\0\0\0@"]
    assert answered(torch.tensor([[0.0, 2.0]])) == [b"\0\0\0\0\0\0\0@"]
    with pytest.raises(ValueError, match="2 answers for 1 samples"):
        answered([1.0, 2.0])
    with pytest.raises(ValueError, match="3 values for a sample of 2 tokens"):
        answered([[1.0, 2.0, 3.0]])
    with pytest.raises(TypeError):
        answered(["high"])


def test_loading() -> None:
    assert load(f"{__name__}:broken") is broken


def test_an_installed_function_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "ranked = outside_ranks:advantages\nnumber = outside_ranks:NUMBER"
    source = """
NUMBER = 1

def advantages(group):
    ranks = sorted(trace.reward for trace in group.traces)
    return [float(ranks.index(group.traces[sample.trace].reward)) for sample in group.samples]
"""
    outside.use(monkeypatch, outside.install(tmp_path, "outside_ranks", source, {GROUP: lines}))
    traces = [(7, 0.5, {}, False, 1), (8, 0.1, {}, False, 1)]
    samples = [(0, *SAMPLES[0][1:]), (1, *SAMPLES[0][1:])]
    assert compute(load("ranked"), "task", 3, traces, samples) == [b"\0\0\x80?" * 2, b"\0\0\0\0" * 2]
    with pytest.raises(ValueError, match=r"'number' of primerl\.advantages is no function"):
        load("number")
    with pytest.raises(ValueError, match=r"there is no 'rank'; known are 'number', 'ranked'"):
        load("rank")


def test_a_run_takes_an_installed_function(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def advantages(group):\n    return [0.0 for _ in group.samples]\n"
    folder = outside.install(tmp_path, "outside_zeros", source, {GROUP: "zeros = outside_zeros:advantages"})
    outside.use(monkeypatch, folder)
    algorithm = {"type": "custom", "path": "zeros"}
    with Orchestrator(settings(model, tmp_path / "out", algorithm=algorithm)) as orchestrator:
        orchestrator.start()
        assert orchestrator.url
    algorithm["path"] = "zeroes"
    with pytest.raises(PrimerlError, match=r"algorithm\.path: `zeroes`: .*known are 'zeros'"):
        Orchestrator(settings(model, tmp_path / "other", algorithm=algorithm)).start()
