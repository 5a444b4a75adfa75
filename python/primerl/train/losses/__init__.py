"""Policy losses, one file each: `trainer.loss.type` is the name of a file here, `trainer.loss.args` its `Options`.

A file has

    Options                         a frozen dataclass: what may be set, with defaults and, if need be, `check()`
    policy_loss(tokens, options)    the loss of each token, a `PolicyLoss`

and nothing else has to list it. A package of its own offers the same as an entry point in the group `primerl.losses`,
or is named as `module:name` (`primerl.train.registry`); a function without options is `trainer.loss.custom`
(docs/custom-losses.md). The files import no torch of their own, so that a config is checked without it.

The trainer makes one update of each batch, so its policy at the batch is the one the gradient is taken at, and what
the literature calls the old policy is the engine's: rho = trainer's probability / engine's probability, of the
sampled token, both at the temperature it was sampled at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from primerl.train.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N sampled tokens of a micro-batch, its sequences whole and one after another.

    Worked example, two sequences with 2 and 1 sampled tokens: `sequences` [0 0 1], `sequence_count` 2.
    """

    logprobs: Tensor  # [N] fp32, the trainer's, nats, at the sampling temperature; carries the gradient
    engine_logprobs: Tensor  # [N] fp32, the engine's when it sampled the token
    advantages: Tensor  # [N] fp32
    sequences: Tensor  # [N] int64, ascending
    sequence_count: int
    staleness: Tensor  # [N] int64, updates between the policy that sampled the token and the one that is trained
    teacher_logprobs: Tensor | None = None  # [N] fp32, at temperature 1, where the batch has them

    @property
    def log_ratio(self) -> Tensor:
        """log rho, [N]."""
        return self.logprobs - self.engine_logprobs

    def at(self, index: Tensor) -> Tokens:
        """Those at the ascending indices."""
        return Tokens(
            logprobs=self.logprobs[index],
            engine_logprobs=self.engine_logprobs[index],
            advantages=self.advantages[index],
            sequences=self.sequences[index],
            sequence_count=self.sequence_count,
            staleness=self.staleness[index],
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[index],
        )

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the sampled tokens of each token's sequence, [N] -> [N]."""
        sums = values.new_zeros(self.sequence_count).index_add(0, self.sequences, values)
        counts = values.new_zeros(self.sequence_count).index_add(0, self.sequences, values.new_ones(values.shape))
        return (sums / counts.clamp(min=1.0))[self.sequences]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token. The trainer adds it up and divides by the number of tokens of all data ranks."""

    loss: Tensor  # [N]
    masked: Tensor | None = None  # [N] bool: the token's advantage does not reach the gradient
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [N] values; their mean over the step is the metric `<name>/all/mean`."""


LossFunction = Callable[[Tokens], "PolicyLoss | Tensor"]


REGISTRY = Registry(__name__, "primerl.losses", "policy_loss")


def load(kind: str, args: dict[str, Any]) -> LossFunction:
    """Raises ConfigError."""
    policy_loss, given = REGISTRY.load(kind, args, "loss.")
    return lambda tokens: policy_loss(tokens, given)
