"""Strings, their split, demonstrations and the reward. Standard library only: also imported without verifiers."""

from __future__ import annotations

import difflib
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

OPEN, CLOSE = "<r>", "</r>"
# One string in 8 belongs to the evaluation split.
EVALUATION_SHARE = 8


@dataclass(frozen=True)
class Alphabet:
    """Which strings are drawn: length uniform, then letters uniform with repetition."""

    letters: str = "a-z"
    min_length: int = 4
    max_length: int = 8

    def __post_init__(self) -> None:
        first, dash, last = self.letters[:1], self.letters[1:2], self.letters[2:]
        if not (dash == "-" and len(last) == 1 and "a" <= first < last <= "z"):
            raise ValueError(f"letters must be a range such as 'a-z', not {self.letters!r}")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"min_length {self.min_length} and max_length {self.max_length} leave no length to draw")

    def draw(self, generator: random.Random) -> str:
        letters = [chr(code) for code in range(ord(self.letters[0]), ord(self.letters[2]) + 1)]
        length = generator.randint(self.min_length, self.max_length)
        return "".join(generator.choice(letters) for _ in range(length))


def is_evaluation(text: str) -> bool:
    """Whether a string belongs to the evaluation split: its own property, so that no seed can mix the splits."""
    return zlib.crc32(text.encode()) % EVALUATION_SHARE == 0


def strings(alphabet: Alphabet, split: str, seed: int) -> Iterator[str]:
    """Endless strings of one split, the same for the same seed."""
    generator = random.Random(f"reverse-text/{split}/{seed}")
    while True:
        text = alphabet.draw(generator)
        if is_evaluation(text) == (split == "eval"):
            yield text


def prompt(text: str) -> str:
    return f"Reverse: {text}"


def gold(text: str) -> str:
    return f"{OPEN}{text[::-1]}{CLOSE}"


def sloppy(text: str, generator: random.Random, truncate: float, untag: float) -> str:
    """A demonstration with mistakes to unlearn: the answer cut short, the tags left out, independently."""
    answer = text[::-1]
    if len(answer) > 1 and generator.random() < truncate:
        answer = answer[: generator.randint(1, len(answer) - 1)]
    return answer if generator.random() < untag else f"{OPEN}{answer}{CLOSE}"


def answer_of(reply: str) -> str | None:
    """What stands between the tags; None where the reply is not exactly one tagged answer."""
    tagged = len(reply) >= len(OPEN) + len(CLOSE) and reply.startswith(OPEN) and reply.endswith(CLOSE)
    return reply[len(OPEN) : -len(CLOSE)] if tagged else None


def similarity(answer: str, target: str) -> float:
    """2 M / (|a| + |b|), M = letters in matching blocks (Ratcliff and Obershelp, 1988); 1 where they are equal."""
    return difflib.SequenceMatcher(None, answer, target, autojunk=False).ratio()
