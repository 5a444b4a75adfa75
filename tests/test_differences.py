"""Whether two scores differ: intervals and tests against published values."""

from __future__ import annotations

import math
import random

import pytest
from primerl.runs.differences import (
    Score,
    by_intervals,
    by_pairs,
    paired_shares,
    sign_test,
    student_beyond,
    student_quantile,
    wilson,
)


def share(passed: int, of: int) -> Score:
    return Score(passed / of, *wilson(passed / of, of))


def test_the_interval_of_a_difference_is_newcombes() -> None:
    # Newcombe 1998, Table II, method 10: 56/70 - 48/80, 9/10 - 3/10, 10/10 - 0/10.
    for first, second, low, high in (
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 10), (10, 10), 0.6075, 1.0),
    ):
        found = by_intervals(share(*first), share(*second))
        assert found.low is not None
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
        assert found.is_significant is True
    alike = by_intervals(share(5, 10), share(6, 10))
    assert alike.is_significant is False
    assert by_intervals(Score(0.5, None, None), share(6, 10)).is_significant is None


def test_paired_shares_have_newcombes_interval() -> None:
    # Fagerland, Lydersen and Laake 2014 (Statistics in Medicine 33:2850), of the pairs of Bentur et al.: the
    # square-and-add interval, and the exact test.
    assert paired_shares(1, 1, 7, 12) == pytest.approx((-0.507, -0.026), abs=5e-4)
    assert sign_test(1, 7) == pytest.approx(0.0703, abs=5e-5)
    before = [1.0] * 1 + [1.0] * 1 + [0.0] * 7 + [0.0] * 12
    after = [1.0] * 1 + [0.0] * 1 + [1.0] * 7 + [0.0] * 12
    found = by_pairs(before, after)
    assert (found.test, found.pairs, found.is_significant) == ("mcnemar", 21, False)
    assert (found.by, found.low, found.high) == pytest.approx((6 / 21, 0.026, 0.507), abs=5e-4)
    # Alike in all, none, and one of the two: within the bounds.
    for pairs in ((10, 0, 0, 0), (0, 0, 0, 10), (0, 10, 0, 0), (5, 0, 0, 5)):
        low, high = paired_shares(*pairs)
        assert -1 <= low <= high <= 1


@pytest.mark.parametrize(
    ("more", "fewer", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (0, 6, 0.03125), (9, 1, 0.021484375)]
)
def test_the_sign_test_is_that_of_fair_coins(more: int, fewer: int, p: float) -> None:
    assert sign_test(more, fewer) == sign_test(fewer, more) == p


def test_many_pairs_are_counted_exactly() -> None:
    # The normal distribution with a correction for continuity, which is close for so many.
    assert sign_test(1550, 1450) == pytest.approx(math.erfc(99 / math.sqrt(2 * 3000)), abs=1e-4)


def test_students_distribution_is_that_of_tables() -> None:
    for freedom, quantile in ((1, 12.7062), (2, 4.30265), (10, 2.22814), (30, 2.04227), (100, 1.98397)):
        assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)
        assert student_beyond(quantile, freedom) == pytest.approx(0.05, abs=1e-5)
    # Of one degree of freedom it is Cauchy's: beyond 1 lies half.
    assert student_beyond(1.0, 1) == pytest.approx(0.5)
    assert student_beyond(0.0, 7) == 1.0
    assert student_beyond(-2.0, 7) == student_beyond(2.0, 7)


def test_graded_scores_have_students_test_of_their_differences() -> None:
    # Student 1908, the hours of sleep gained by ten patients: t = 4.0621 with 9 degrees of freedom, p = 0.002833.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = by_pairs(first, second)
    assert (found.test, found.pairs, found.is_significant) == ("paired_t", 10, True)
    assert (found.by, found.low, found.high) == pytest.approx((1.58, 0.7001, 2.4599), abs=1e-4)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    back = by_pairs(second, first)
    assert (back.by, back.p) == pytest.approx((-1.58, found.p))


def test_differences_without_spread_have_the_sign_test() -> None:
    same = by_pairs([0.25, 0.5, 0.75], [0.25, 0.5, 0.75])
    assert (same.by, same.p, same.is_significant, same.low) == (0.0, 1.0, False, None)
    for count, p in ((3, 0.25), (8, 2 / 256)):
        shifted = by_pairs([0.1] * count, [0.3] * count)
        assert (shifted.test, shifted.by, shifted.p) == ("sign", pytest.approx(0.2), p)
        assert shifted.is_significant is (p < 0.05)


def test_one_in_twenty_is_significant_by_chance() -> None:
    generator = random.Random(0)
    rounds, significant = 10_000, 0
    for _ in range(rounds):
        hardness = [generator.random() for _ in range(24)]
        before, after = ([one + generator.gauss(0, 0.1) for one in hardness] for _ in range(2))
        significant += by_pairs(before, after).is_significant is True
    assert 0.045 < significant / rounds < 0.055
