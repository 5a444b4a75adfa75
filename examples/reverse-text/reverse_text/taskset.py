"""The taskset: knobs, examples, reward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

from reverse_text.strings import Alphabet, answer_of, gold, prompt, similarity, strings


class ReverseConfig(vf.TasksetConfig):
    split: Literal["train", "eval"] = "train"
    """The splits share no string, whatever their seeds."""
    num_examples: int = Field(1024, ge=1)
    """Strings drawn."""
    seed: int = 0
    """Seed of the draw."""
    letters: str = "a-z"
    """Range of letters."""
    min_length: int = Field(4, ge=1)
    """Fewest letters of a string."""
    max_length: int = Field(8, ge=1)
    """Most letters of a string."""

    @property
    def alphabet(self) -> Alphabet:
        return Alphabet(self.letters, self.min_length, self.max_length)

    @model_validator(mode="after")
    def _alphabet_is_sound(self) -> ReverseConfig:
        _ = self.alphabet
        return self


class ReverseData(vf.TaskData):
    text: str
    """What is to be reversed."""

    @property
    def answer(self) -> str:
        """What an expert answers."""
        return gold(self.text)


class ReverseTask(vf.Task[ReverseData]):
    @property
    def key(self) -> str:
        return self.data.text

    def _answer(self, trace: vf.Trace) -> str | None:
        replies = trace.assistant_messages
        return answer_of(replies[-1].content or "") if replies else None

    @vf.reward
    async def answer_similarity(self, trace: vf.Trace) -> float:
        """How much of the answer is right; 0 without the tags."""
        answer = self._answer(trace)
        return 0.0 if answer is None else similarity(answer, self.data.text[::-1])

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(self._answer(trace) == self.data.text[::-1])


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self) -> Iterator[ReverseTask]:
        config = self.config
        drawn = itertools.islice(strings(config.alphabet, config.split, config.seed), config.num_examples)
        for text in drawn:
            yield ReverseTask(ReverseData(prompt=prompt(text), text=text), config.task)
