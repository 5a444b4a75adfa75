"""Custom advantages: what your function is given, and what it answers.

The config names it, for the whole run or for one environment:

    [orchestrator.algorithm]
    type = "custom"
    path = "my_project.rewards:advantages"  # or a name in the entry points `primerl.advantages` of a package
    timeout_s = 10

and it gives one advantage for each sample, or for each token of each sample:

    def advantages(group: Group) -> list[float | Sequence[float]]:
        mean = sum(trace.reward for trace in group.traces) / len(group.traces)
        return [group.traces[sample.trace].reward - mean for sample in group.samples]

It is called once a group, when all of the group's rollouts have ended, on one thread of the orchestrator's process. An
exception, a wrong number of values, one that is not finite, or no answer within `timeout_s` (which runs from the moment
the group is complete) drops the group; when nothing else comes of an environment, the run ends and says why. The answer
is part of the run's journal. `length_normalization` applies to it as to any other algorithm's.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from primerl.process import plugins


@dataclass(frozen=True, slots=True)
class Trace:
    """One seat of one rollout."""

    rollout: int
    """Number of the rollout; the traces of one rollout have the same."""
    reward: float
    metrics: dict[str, float]
    """What else the environment reported."""
    truncated: bool
    """The environment cut the rollout short."""
    turns: int
    seat: str = ""
    """Which part of the episode it played; empty where the environment has no names for them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of N tokens that is to be trained. The columns have the buffer protocol: `torch.frombuffer`,
    `numpy.asarray` and indexing take them."""

    trace: int
    """Index in the group's traces."""
    token_ids: memoryview[int]  # [N] int32
    loss_mask: memoryview[int]  # [N] uint8; 1 = sampled by the policy, to be trained
    logprobs: memoryview[float]  # [N] fp32, the engine's, nats; 0 where not trained


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one example."""

    environment: str
    """Name of the environment."""
    example: int
    """Index of the example in the environment's list."""
    traces: tuple[Trace, ...]
    """In order of the rollouts. A trace may have no sample (all of it dropped by the rules) or several."""
    samples: tuple[Sample, ...]


Advantages = Callable[[Group], Sequence[Any]]
"""For each of the group's samples a number, or N numbers of which those with `loss_mask` 0 are not looked at."""


GROUP = "primerl.advantages"
"""Entry points of this group are functions: `name = module:function`."""


def load(path: str) -> Advantages:
    """The function `module:function`, or the one that an installed package registers under this name.

    Raises:
        ValueError: there is none.
        Exception: what importing its module raises.
    """
    if ":" not in path:
        function = plugins.find(GROUP, path, {})
        if not callable(function):
            raise ValueError(f"the entry point {path!r} of {GROUP} is no function")
        return function  # type: ignore[no-any-return]
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"module {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def compute(
    function: Advantages,
    environment: str,
    example: int,
    traces: list[tuple[int, float, dict[str, float], bool, int]],
    samples: list[tuple[int, bytes, bytes, bytes]],
) -> list[bytes]:
    """Call the function; its answer as fp32 columns, one a sample. Called by the orchestrator.

    Raises:
        ValueError, TypeError: the answer is not what [`Advantages`][] says.
    """
    group = Group(
        environment,
        example,
        tuple(Trace(*trace) for trace in traces),
        tuple(
            Sample(trace, memoryview(token_ids).cast("i"), memoryview(loss_mask), memoryview(logprobs).cast("f"))
            for trace, token_ids, loss_mask, logprobs in samples
        ),
    )
    answers = list(function(group))
    if len(answers) != len(samples):
        raise ValueError(f"{len(answers)} answers for {len(samples)} samples")
    return [_column(answer, len(sample.token_ids)) for answer, sample in zip(answers, group.samples, strict=True)]


def _column(answer: Any, tokens: int) -> bytes:
    if hasattr(answer, "tolist"):  # a tensor or an array
        answer = answer.tolist()
    if isinstance(answer, Real):
        return array("f", [float(answer)]).tobytes() * tokens
    column = array("f", answer)
    if len(column) != tokens:
        raise ValueError(f"{len(column)} values for a sample of {tokens} tokens")
    return column.tobytes()
