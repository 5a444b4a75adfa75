"""The files of a new environment package: a small one that works, to be changed into your own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from primerl.workspace.names import class_prefix, module_of

Files = dict[PurePosixPath, str]
"""Texts by their paths within a folder."""

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "@NAME@"
version = "0.1.0"
description = "A verifiers environment: sums of two numbers."
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5"]

[tool.hatch.build.targets.wheel]
packages = ["@MODULE@"]
"""
README = """\
# @NAME@

Sums of two numbers, answered between tags. It is a complete environment to start from: change the examples, the prompt
and the rewards in `@MODULE@/taskset.py`, and the test with them.

```sh
primerl env install @NAME@                        # from the folder that holds environments/
python -m pytest environments/@MODULE@
primerl eval run @NAME@ -m path/to/model -n 8 -r 2
```

| setting (`taskset`) | default | |
|---|---|---|
| `split` | `"train"` | or `"eval"`: they share no example |
| `num_examples` | 256 | examples drawn |
| `seed` | 0 | seed of the draw |
| `largest` | 99 | largest number |

Reward: 1 for the right number between `<answer>` and `</answer>`, 0.1 for another number there. Metric: `tagged`.
"""
INIT = '''\
"""Sums of two numbers, answered between tags."""

from @MODULE@.taskset import @CLASS@Taskset

# It is found as the only taskset that the package exports.
__all__ = ["@CLASS@Taskset"]
'''
TASKSET = '''\
"""Examples, prompt and rewards."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

SYSTEM_PROMPT = "Answer with the number alone, between <answer> and </answer>."
ANSWER = re.compile(r"<answer>\\s*(-?\\d+)\\s*</answer>")
# One pair in 8 is of the evaluation split: a property of the pair itself, so that no seed can mix the splits.
EVALUATION_SHARE = 8


class @CLASS@Config(vf.TasksetConfig):
    """What a config may set under `taskset`."""

    split: Literal["train", "eval"] = "train"
    num_examples: int = Field(256, ge=1)
    """Examples drawn."""
    seed: int = 0
    """Seed of the draw."""
    largest: int = Field(99, ge=7)
    """Largest number."""


class @CLASS@Data(vf.TaskData):
    """One example; the base class has `prompt` and `system_prompt`."""

    answer: int


def answer_of(reply: str) -> int | None:
    """The number between the tags; None without exactly one."""
    found = ANSWER.findall(reply)
    return int(found[0]) if len(found) == 1 else None


def score(reply: str, answer: int) -> float:
    """The reward of a reply, from 0 to 1."""
    found = answer_of(reply)
    if found is None:
        return 0.0
    return 1.0 if found == answer else 0.1


def pairs(split: str, seed: int, largest: int) -> Iterator[tuple[int, int]]:
    """Endless pairs of one split, the same for the same seed."""
    generator = random.Random(f"{split}/{seed}")
    while True:
        first, second = generator.randint(0, largest), generator.randint(0, largest)
        if ((first + 3 * second) % EVALUATION_SHARE == 0) == (split == "eval"):
            yield first, second


class @CLASS@Task(vf.Task[@CLASS@Data]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return score(trace.last_reply or "", self.data.answer)

    @vf.metric  # reported with the reward, never trained
    async def tagged(self, trace: vf.Trace) -> float:
        return float(answer_of(trace.last_reply or "") is not None)


class @CLASS@Taskset(vf.Taskset[@CLASS@Task, @CLASS@Config]):
    def load(self) -> Iterator[@CLASS@Task]:
        config = self.config
        for first, second in itertools.islice(pairs(config.split, config.seed, config.largest), config.num_examples):
            data = @CLASS@Data(
                prompt=f"What is {first} + {second}?", system_prompt=SYSTEM_PROMPT, answer=first + second
            )
            yield @CLASS@Task(data, config.task)
'''
TEST = '''\
"""The environment's examples and rewards; no model is needed."""

from __future__ import annotations

import itertools

import pytest
import verifiers.v1 as vf
from @MODULE@ import @CLASS@Taskset
from @MODULE@.taskset import @CLASS@Config, @CLASS@Task, pairs, score


def examples(**settings: object) -> list[@CLASS@Task]:
    return list(@CLASS@Taskset(@CLASS@Config.model_validate(settings)).load())


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>7</answer>", 1.0),
        ("It is <answer> 7 </answer>.", 1.0),
        ("<answer>8</answer>", 0.1),
        ("7", 0.0),
        ("", 0.0),
        ("<answer>6</answer><answer>7</answer>", 0.0),
    ],
)
def test_the_reward_of_a_reply(reply: str, reward: float) -> None:
    assert score(reply, 7) == reward


def test_examples_are_the_same_each_time_and_have_their_answers() -> None:
    first, again = examples(num_examples=16), examples(num_examples=16)
    assert [task.data for task in first] == [task.data for task in again]
    assert len(first) == 16
    for task in first:
        left, right = str(task.data.prompt).removeprefix("What is ").removesuffix("?").split(" + ")
        assert task.data.answer == int(left) + int(right)
        assert isinstance(task, vf.Task)
    assert [task.data for task in examples(num_examples=16, seed=1)] != [task.data for task in first]


def test_splits_share_no_example() -> None:
    trained = set(itertools.islice(pairs("train", 0, 20), 2000))
    measured = set(itertools.islice(pairs("eval", 1, 20), 500))
    assert not trained & measured
'''


def files(package: str) -> Files:
    """The package's files, by paths within its folder (`environments/<module>`)."""
    module = module_of(package)
    texts = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{module}/__init__.py": INIT,
        f"{module}/taskset.py": TASKSET,
        f"tests/test_{module}.py": TEST,
    }
    values = {"@NAME@": package, "@MODULE@": module, "@CLASS@": class_prefix(package)}
    return {PurePosixPath(path): filled(text, values) for path, text in texts.items()}


def filled(text: str, values: Mapping[str, object]) -> str:
    """With values in place of their marks."""
    for mark, value in values.items():
        text = text.replace(mark, str(value))
    return text
