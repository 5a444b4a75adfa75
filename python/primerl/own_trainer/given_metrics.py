"""Metrics that a script gives with a step's weights, as numbers for the line of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

OF_A_LINE = ("step", "timestamp")


def as_numbers(metrics: Any, taken: Collection[str]) -> dict[str, float]:
    """A tensor or an array of one element counts as its number. `taken`: names that the step's line has already.

    Raises TypeError for what is no number, and ValueError for a name that is taken, by the metric's name.
    """
    if metrics is None:
        return {}
    try:
        given = dict(metrics)
    except (TypeError, ValueError):
        raise TypeError(
            f"metrics is a {type(metrics).__name__}, and has to be a dict of names and numbers, such as "
            '{"loss/mean": loss.item()}'
        ) from None
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"metrics: the name {name!r} is no string; give one such as 'loss/mean'")
        if name in OF_A_LINE or name in taken:
            raise ValueError(f"metrics: {name!r} is in the step's line already; give yours another name")
    return {name: _number(name, value) for name, value in given.items()}


def _number(name: str, value: Any) -> float:
    number = value
    if hasattr(value, "item"):
        try:
            number = value.item()
        except (RuntimeError, ValueError, TypeError):  # of several elements
            shape = list(getattr(value, "shape", ()))
            raise TypeError(
                f"metrics: {name!r} has shape {shape}, and has to be one number, such as its mean"
            ) from None
    if not isinstance(number, int | float):
        raise TypeError(f"metrics: {name!r} is a {type(value).__name__}, and has to be a number")
    try:
        return float(number)
    except OverflowError:
        raise TypeError(f"metrics: {name!r} is larger than any float") from None
