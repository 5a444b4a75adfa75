"""Whether a score of one run is another than that of a second run.

Two evaluations of the same examples are compared example by example: how hard each one is affects both, and cancels.

- Scores that are 0 or 1 in both: McNemar's test, exact (Psychometrika 12:153, 1947), and Newcombe's interval of paired
  shares (Statistics in Medicine 17:2635, 1998, method 10), which is narrower: the test decides.
- Other scores: Student's test and interval of the differences, as Miller recommends (arXiv:2411.00640).
- All differ by the same: the sign test, and no interval, since there is no spread to estimate it from.

Evaluations of other examples are compared by their intervals (`by_intervals`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

NORMAL_95 = 1.959963984540054
LEVEL = 0.05
TINY = 1e-300
ROUNDING = 1e-9
Test = Literal["mcnemar", "paired_t", "sign", "intervals"]


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over examples, with the ends of its interval of 95 %; None where there is none (a single example)."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """`after - before`, with its interval; `p` and `pairs` where it was tested by pairs of examples."""

    by: float
    low: float | None
    high: float | None
    test: Test = "intervals"
    p: float | None = None
    pairs: int | None = None

    @property
    def is_significant(self) -> bool | None:
        """At 5 %, by the test; without pairs, whether 0 is outside of the interval. None where there is neither."""
        if self.p is not None:
            return self.p < LEVEL
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def by_intervals(before: Score, after: Score) -> Difference:
    """`after - before` with its interval of 95 %, made of the intervals of both.

    With means a and b, and their intervals (la, ua) and (lb, ub), it is
    `b - a - sqrt((b - lb)**2 + (ua - a)**2)` to `b - a + sqrt((ub - b)**2 + (a - la)**2)`: Newcombe's hybrid score
    interval (Statistics in Medicine 17:873, 1998, method 10), which Zou and Donner (Statistics in Medicine 27:1693,
    2008) extend to any two independent estimates.
    """
    by = after.mean - before.mean
    ends = (before.low, before.high, after.low, after.high)
    if any(end is None or not math.isfinite(end) for end in ends):
        return Difference(by, None, None)
    la, ua, lb, ub = (float(end) for end in ends if end is not None)
    down = math.hypot(after.mean - lb, ua - before.mean)
    up = math.hypot(ub - after.mean, before.mean - la)
    return Difference(by, by - down, by + up)


def by_pairs(before: Sequence[float], after: Sequence[float]) -> Difference:
    """The mean difference of at least two examples, by a score of each in both."""
    if all(score in (0.0, 1.0) for score in (*before, *after)):
        return _of_passes(before, after)
    count = len(before)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    by = math.fsum(differences) / count
    variance = math.fsum((one - by) ** 2 for one in differences) / (count - 1)
    if math.sqrt(variance) <= ROUNDING:
        p = 1.0 if abs(by) <= ROUNDING else sign_test(count, 0)
        return Difference(by, None, None, "sign", p, count)
    error = math.sqrt(variance / count)
    half = student_quantile(count - 1) * error
    return Difference(by, by - half, by + half, "paired_t", student_beyond(by / error, count - 1), count)


def _of_passes(before: Sequence[float], after: Sequence[float]) -> Difference:
    pairs = list(zip(before, after, strict=True))
    both, lost, won, neither = (pairs.count(one) for one in ((1, 1), (1, 0), (0, 1), (0, 0)))
    low, high = paired_shares(both, won, lost, neither)
    return Difference((won - lost) / len(pairs), low, high, "mcnemar", sign_test(won, lost), len(pairs))


def sign_test(more: int, fewer: int) -> float:
    """Two-sided probability of a split as uneven as this, of fair coins."""
    count, least = more + fewer, min(more, fewer)
    ways = term = 1
    for drawn in range(least):
        term = term * (count - drawn) // (drawn + 1)
        ways += term
    return min(1.0, float(2 * ways / 2**count))


def paired_shares(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """Interval of the first share less the second one, of pairs in which both passed, one of them alone, or neither."""
    count = both + first + second + neither
    one, other = (both + first) / count, (both + second) / count
    (low_one, high_one), (low_other, high_other) = wilson(one, count), wilson(other, count)
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    cross = float(both * neither - first * second)
    if cross > 0:
        cross = max(cross - count / 2, 0.0)
    related = cross / math.sqrt(product) if product else 0.0

    def end(own: float, others: float) -> float:
        return math.sqrt(max(0.0, own**2 - 2 * related * own * others + others**2))

    by = one - other
    return by - end(one - low_one, high_other - other), by + end(high_one - one, other - low_other)


def wilson(share: float, count: int) -> tuple[float, float]:
    spread = NORMAL_95**2 / count
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return (share + spread / 2 - half) / (1 + spread), (share + spread / 2 + half) / (1 + spread)


def student_beyond(value: float, freedom: int) -> float:
    """Two-sided probability of Student's distribution beyond ±value."""
    return _incomplete_beta(freedom / (freedom + value**2), freedom / 2, 0.5)


@lru_cache(maxsize=256)
def student_quantile(freedom: int) -> float:
    """Beyond which, and beyond whose negative, 5 % lie."""
    low, high = 0.0, 13.0  # of one degree of freedom: 12.7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_beyond(middle, freedom) > LEVEL else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized one, by its continued fraction (DLMF 8.17.22) with Lentz's method."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    fraction, c, d = 1.0, 1.0, 0.0
    for term in range(400):
        m = term // 2
        if term == 0:
            factor = 1.0
        elif term % 2:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (_away(1 + factor * d))
        c = _away(1 + factor / c)
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front / a * (fraction - 1)


def _away(value: float) -> float:
    return value if abs(value) > TINY else TINY
