"""Letters of each turn, their split, and the reward. Standard library only: also imported without verifiers."""

from __future__ import annotations

import difflib
import random
import string
import zlib
from collections.abc import Iterator

# One example in 8 belongs to the evaluation split.
EVALUATION_SHARE = 8
MIN_NEW, MAX_NEW = 2, 4


def is_evaluation(turns: tuple[str, ...]) -> bool:
    """Whether an example belongs to the evaluation split: its own property, so that no seed can mix the splits."""
    return zlib.crc32("/".join(turns).encode()) % EVALUATION_SHARE == 0


def examples(split: str, seed: int, min_turns: int = 2, max_turns: int = 3) -> Iterator[tuple[str, ...]]:
    """Endless examples of one split: the new letters of each turn, all distinct."""
    generator = random.Random(f"sort-letters/{split}/{seed}")
    while True:
        lengths = [generator.randint(MIN_NEW, MAX_NEW) for _ in range(generator.randint(min_turns, max_turns))]
        drawn = generator.sample(string.ascii_lowercase, sum(lengths))
        starts = [sum(lengths[:turn]) for turn in range(len(lengths))]
        turns = tuple("".join(drawn[start : start + length]) for start, length in zip(starts, lengths, strict=True))
        if is_evaluation(turns) == (split == "eval"):
            yield turns


def message(turns: tuple[str, ...] | list[str], turn: int) -> str:
    return f"{'Add' if turn else 'Sort'}: {turns[turn]}"


def gold(turns: tuple[str, ...] | list[str], turn: int) -> str:
    """All letters up to and with this turn, sorted."""
    return "".join(sorted("".join(turns[: turn + 1])))


def score(reply: str, target: str) -> float:
    """Fourth power of 2 M / (|a| + |b|), M = letters in matching blocks: nearly right earns little."""
    return float(difflib.SequenceMatcher(None, reply, target, autojunk=False).ratio() ** 4)
