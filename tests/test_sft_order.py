"""The order of rows, their mixture, and the packing of steps."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from primerl.train.data.mixture import Mixture, steps
from primerl.train.data.packing import Ahead, packed_groups, step_batches
from primerl.train.data.rows import Row, Rows

CPU = torch.device("cpu")


def rows_of(*lengths_by_subset: list[int]) -> Rows:
    """Row i is its own number, repeated."""
    lengths = [length for lengths in lengths_by_subset for length in lengths]
    ids = [index for index, length in enumerate(lengths) for _ in range(length)]
    ends, firsts = array("q"), [0]
    for length in lengths:
        ends.append((ends[-1] if ends else 0) + length)
    for subset in lengths_by_subset:
        firsts.append(firsts[-1] + len(subset))
    titles = [f"s{index}" for index in range(len(lengths_by_subset))]
    ids_column = torch.tensor(ids, dtype=torch.int32)
    loss_mask = torch.ones(len(ids), dtype=torch.uint8)
    return Rows(titles, ids_column, loss_mask, ends, firsts, ["row"] * len(titles), array("q", range(firsts[-1])))


def drawn(mixture: Mixture, count: int) -> list[int]:
    order = []
    for _ in range(count):
        pool, row = mixture.peek()
        pool.given += 1
        order.append(row)
    return order


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    rows = rows_of([3] * 4, [3] * 3)
    order = drawn(Mixture(rows, None, shuffle=True, seed=1), 21)
    epochs = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert order == drawn(Mixture(rows, None, shuffle=True, seed=1), 21)
    assert order != drawn(Mixture(rows, None, shuffle=True, seed=2), 21)
    assert drawn(Mixture(rows, None, shuffle=False, seed=1), 9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_ratios_hold_at_every_row() -> None:
    rows = rows_of([1] * 50, [1] * 7, [1] * 20)
    ratios = [0.5, 0.3, 0.2]
    order = drawn(Mixture(rows, [5.0, 3.0, 2.0], shuffle=True, seed=0), 400)
    subset_of = [0] * 50 + [1] * 7 + [2] * 20
    counts: Counter[int] = Counter()
    for number, row in enumerate(order, start=1):
        counts[subset_of[row]] += 1
        assert all(abs(counts[subset] - ratio * number) <= 1 for subset, ratio in enumerate(ratios))
    # A small dataset begins anew, each time with all of its rows.
    small = [row for row in order if subset_of[row] == 1]
    assert len(small) == 120
    assert all(sorted(small[start : start + 7]) == list(range(50, 57)) for start in range(0, 119 - 7, 7))


@pytest.mark.parametrize("ratios", [None, [3.0, 1.0]])
def test_it_goes_on_at_any_row(ratios: list[float] | None) -> None:
    rows = rows_of([1] * 11, [1] * 5)
    whole = drawn(Mixture(rows, ratios, shuffle=True, seed=4), 60)
    for place in (0, 1, 15, 16, 33, 59):
        before = Mixture(rows, ratios, shuffle=True, seed=4)
        drawn(before, place)
        after = Mixture(rows, ratios, shuffle=True, seed=4)
        after.go_to(before.position())
        assert drawn(after, 60 - place) == whole[place:]
        assert after.epoch == pytest.approx(60 / 16)


def test_a_position_of_other_datasets_is_refused() -> None:
    mixture = Mixture(rows_of([1], [1]), [1.0, 1.0], shuffle=True, seed=0)
    with pytest.raises(ValueError, match="counts rows of"):
        mixture.go_to({"s0": 1, "other": 1})


def test_a_step_takes_whole_rows_up_to_its_tokens() -> None:
    rows = rows_of([5, 4, 3, 9, 2, 10, 1])
    taken = list(steps(Mixture(rows, None, shuffle=False, seed=0), rows, 10, epochs=1))
    assert taken == [[0, 1], [2], [3], [4], [5], [6]]
    assert list(chain(*taken)) == list(range(7))
    endless = steps(Mixture(rows, None, shuffle=False, seed=0), rows, 10, epochs=None)
    # An epoch ends within a step, which goes on with the next one's rows.
    assert list(islice(endless, 7))[5:] == [[6, 0, 1], [2]]
    two = list(steps(Mixture(rows, None, shuffle=True, seed=0), rows, 10, epochs=2))
    assert sorted(chain(*two)) == sorted([*range(7), *range(7)])


def test_groups_hold_every_row_and_keep_the_limit() -> None:
    rows = [Row(torch.zeros(length, dtype=torch.int32), torch.ones(length)) for length in (5, 9, 2, 7, 3, 1, 9)]
    groups = packed_groups(rows, 10)
    assert sorted(len(row) for group in groups for row in group) == [1, 2, 3, 5, 7, 9, 9]
    assert all(sum(map(len, group)) <= 10 for group in groups)
    assert len(groups) == 4


@dataclass(eq=False)
class Long:
    """All of a row that packing looks at."""

    length: int

    def __len__(self) -> int:
        return self.length


def first_fit(rows: list[Any], seq_len: int) -> list[list[Any]]:
    """By the definition: every row into the first group that has room for it."""
    groups: list[list[Any]] = []
    for row in sorted(rows, key=len, reverse=True):
        group = next((group for group in groups if sum(map(len, group)) + len(row) <= seq_len), None)
        if group is None:
            groups.append(group := [])
        group.append(row)
    return groups


def test_groups_are_those_of_first_fit() -> None:
    random = Random(1)
    for _ in range(500):
        seq_len = random.randint(1, 50)
        rows: list[Any] = [Long(random.randint(1, seq_len)) for _ in range(random.randint(0, 60))]
        assert packed_groups(rows, seq_len) == first_fit(rows, seq_len)


def test_a_hundred_thousand_rows_take_few_operations() -> None:
    """Lines that are run, of the packing and of all it calls."""
    random = Random(2)
    rows: list[Any] = [Long(random.randint(100, 1500)) for _ in range(100_000)]
    count = 0

    def traced(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        assert count < 150 * len(rows), "more than n log n"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        groups = packed_groups(rows, 2048)
    finally:
        sys.settrace(before)
    assert sum(map(len, groups)) == len(rows)


def test_batches_are_their_rows_without_padding() -> None:
    rows = rows_of([5, 4, 3], [9, 2])
    mixture = Mixture(rows, None, shuffle=True, seed=3)
    expected = list(steps(Mixture(rows, None, shuffle=True, seed=3), rows, 14, 3))
    batches = list(step_batches(mixture, rows, 14, 10, 3, CPU))
    assert len(batches) == len(expected)
    for batch, indices in zip(batches, expected, strict=True):
        ids = torch.cat([micro.token_ids for micro in batch.micro_batches])
        assert sorted(ids.tolist()) == sorted(i for index in indices for i in [index] * rows.length(index))
        assert all(micro.token_ids.shape[0] <= 10 for micro in batch.micro_batches)
        assert sum(batch.tokens) == ids.shape[0] == sum(rows.length(index) for index in indices)
        assert batch.samples == [sum(index < 3 for index in indices), sum(index >= 3 for index in indices)]
        # Every token but the first of each row.
        assert batch.trained_tokens == sum(batch.tokens) - len(indices)
        for micro in batch.micro_batches:
            assert not set(micro.targets.tolist()) & set(micro.packed.boundaries.tolist())
    assert batches[-1].epoch == 3.0
    assert batches[-1].position == {"all": 15}


def test_reading_ahead_keeps_the_order_and_passes_errors_on() -> None:
    def numbers() -> Iterator[int]:
        yield from range(20)
        raise ValueError("the twenty-first")

    ahead = Ahead(numbers(), depth=3)
    assert list(islice(ahead, 20)) == list(range(20))
    for _ in range(2):
        with pytest.raises(ValueError, match="twenty-first"):
            next(ahead)
    ahead.close()
    assert list(Ahead(iter(range(5)))) == list(range(5))


def test_reading_ahead_is_bounded_and_ends_when_closed() -> None:
    given = []
    room = threading.Event()

    def endless() -> Iterator[int]:
        number = 0
        while True:
            given.append(number)
            if len(given) == 4:
                room.set()
            yield number
            number += 1

    ahead = Ahead(endless(), depth=3)
    assert room.wait(60)  # three are ready, the fourth waits for room
    ahead.close()
    assert len(given) == 4
    assert "packing" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]
