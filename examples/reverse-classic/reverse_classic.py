"""A classic environment (verifiers < 0.4): reverse a short string and put the answer between tags.

`Reverse: abcd` -> `<r>dcba</r>`, the task of examples/reverse-text. With `rewards = "rank"` the answers of a group are
ranked against each other.
"""

from __future__ import annotations

import difflib
import random
from typing import Any

import verifiers as vf
from datasets import Dataset

OPEN, CLOSE = "<r>", "</r>"
# Seeds of the splits; a string of both is taken out of the evaluation.
TRAIN_SEED, EVALUATION_SEED = 0, 1


def load_environment(
    num_examples: int = 1024,
    num_eval_examples: int = 128,
    letters: str = "a-z",
    min_length: int = 4,
    max_length: int = 8,
    rewards: str = "similarity",
) -> vf.Environment:
    """
    Args:
        num_examples: Strings to train on.
        num_eval_examples: Strings to measure on; 0 for no split of their own.
        letters: Range of letters.
        min_length: Fewest letters of a string.
        max_length: Most letters of a string.
        rewards: `similarity`: how much of an answer is right; `rank`: its place among the answers of its group.
    """
    alphabet = [chr(code) for code in range(ord(letters[0]), ord(letters[-1]) + 1)]

    def draw(count: int, seed: int) -> list[str]:
        generator = random.Random(seed)
        lengths = [generator.randint(min_length, max_length) for _ in range(count)]
        return ["".join(generator.choices(alphabet, k=length)) for length in lengths]

    train = draw(num_examples, TRAIN_SEED)
    evaluation = [text for text in draw(num_eval_examples, EVALUATION_SEED) if text not in set(train)]
    if rewards not in ("similarity", "rank"):
        raise ValueError(f"rewards must be 'similarity' or 'rank', not {rewards!r}")
    scored = answer_rank if rewards == "rank" else answer_similarity
    return vf.SingleTurnEnv(
        dataset=rows(train),
        eval_dataset=rows(evaluation) if evaluation else None,
        rubric=vf.Rubric(funcs=[scored, exact], weights=[1.0, 0.0]),
    )


def rows(texts: list[str]) -> Dataset:
    return Dataset.from_list([{"question": f"Reverse: {text}", "answer": text[::-1]} for text in texts])


def answer_of(completion: Any) -> str | None:
    """What stands between the tags; None where the reply is not exactly one tagged answer."""
    last = completion[-1]
    reply = (last["content"] if isinstance(last, dict) else last.content) or ""
    tagged = len(reply) >= len(OPEN) + len(CLOSE) and reply.startswith(OPEN) and reply.endswith(CLOSE)
    return reply[len(OPEN) : -len(CLOSE)] if tagged else None


def answer_similarity(completion: Any, answer: str) -> float:
    """How much of the answer is right; 0 without the tags."""
    given = answer_of(completion)
    return 0.0 if given is None else difflib.SequenceMatcher(None, given, answer, autojunk=False).ratio()


def answer_rank(completions: list[Any], answers: list[str]) -> list[float]:
    """The share of the group's other answers that are worse; half of those that are as good."""
    scores = [answer_similarity(completion, answer) for completion, answer in zip(completions, answers, strict=True)]
    others = max(1, len(scores) - 1)
    worse = [sum((one > other) + (one == other) / 2 for other in scores) - 0.5 for one in scores]
    return [count / others for count in worse]


def exact(completion: Any, answer: str) -> float:
    return float(answer_of(completion) == answer)
