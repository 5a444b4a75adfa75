"""Which ranks are alive, heard by heartbeats that are given here one by one."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
from primerl.train.distributed.rank_barrier import RankBarrier
from primerl.train.distributed.ranks import INTERVAL_S, SILENT_S, Heartbeats, RankError, Ranks


@pytest.fixture
def store() -> Any:
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def ranks(store: Any) -> list[Heartbeats]:
    return [Heartbeats(store, rank, 3) for rank in range(3)]


def test_a_silent_rank_is_named_once_and_when_it_goes_on(
    store: Any, ranks: list[Heartbeats], caplog: pytest.LogCaptureFixture
) -> None:
    leading, alive, stopped = ranks
    store.set("at/2", "0.0 step 7: optimizer")
    for each in (alive, stopped, leading):
        each.beat()
    with caplog.at_level(logging.WARNING):
        for _ in range(int(SILENT_S / INTERVAL_S) + 3):
            alive.beat()
            leading.beat()
    (said,) = caplog.messages
    assert said.startswith("no heartbeat for 20 s: rank 2 is gone or hangs, for ")
    assert said.endswith(" s at: step 7: optimizer")
    assert leading.silent_s(1) == 0
    assert leading.silent_s(2) == SILENT_S + 3 * INTERVAL_S
    assert alive.silent_s(2) == 0, "only the leading rank is watched by the others"
    stopped.beat()
    leading.beat()
    assert caplog.messages[1:] == ["rank 2 is alive again"]
    assert leading.silent_s(2) == 0


def test_a_rank_that_has_not_begun_is_not_silent(ranks: list[Heartbeats]) -> None:
    for _ in range(100):
        ranks[0].beat()
    assert ranks[0].silent_s(1) == 0


@pytest.mark.parametrize(("rank", "silent"), [(0, 1), (1, 0)])
def test_who_waits_for_a_silent_rank_gives_up_after_the_ranks_own_time(store: Any, rank: int, silent: int) -> None:
    """Not after what a slow disk is given."""
    own, other = Heartbeats(store, rank, 2), Heartbeats(store, silent, 2)
    other.beat()
    for _ in range(10):
        own.beat()
    device, limit = torch.device("cpu"), timedelta(seconds=8 * INTERVAL_S)
    barrier = RankBarrier(Ranks(rank, 2, device, store=store, timeout=limit, heartbeats=own), "saving")
    with pytest.raises(RankError, match=f"^rank {silent} is gone or hangs; it did not .* within 0 s"):
        barrier.each(lambda: None, "write")


def test_a_thread_beats_until_it_is_stopped(store: Any) -> None:
    heartbeats = Heartbeats(store, 0, 2)
    heartbeats.start()
    store.wait(["alive/0"], timedelta(seconds=20))
    heartbeats.stop()
    assert not heartbeats._thread.is_alive()
