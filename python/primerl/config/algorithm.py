"""How rewards become advantages. The formulas and their papers are in `rust/primerl-core/src/signal/algorithm.rs`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from primerl.config.base import Seconds, Section


class Algorithm(Section):
    """How rewards become advantages."""

    type: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "custom"] = "grpo"
    """`grpo`: reward minus the mean of its group (arXiv:2402.03300). `dr_grpo`: the same, normalised by a constant
    length (arXiv:2503.20783). `rloo`: minus the mean of the others (arXiv:2402.14740). `maxrl`: (reward - mean) / mean,
    for rewards of at least 0 (arXiv:2602.02710). `reinforce_plus_plus`: normalised over the whole batch
    (arXiv:2501.03262). `custom`: the function that `path` names."""
    normalize_std: bool = False
    """`grpo` only: also divide by the standard deviation of the group."""
    length_normalization: Literal["token", "sequence", "constant"] | None = None
    """What weighs the same in a step's loss: every `token`, every `sequence` (GRPO's 1/|o|), or every token by a weight
    that does not depend on the batch's lengths (`constant`: 1 / `seq_len` a token, the mean over sequences). Where it
    is left out: `constant` for `dr_grpo`, `token` for the others."""
    shuffle_advantages: bool = False
    """Negative control: permute the advantages over the whole batch, so that nothing can be learnt."""
    path: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """`custom` only: the function, as `module:function`; see `primerl.advantages`."""
    timeout_s: Seconds = 60.0
    """`custom` only: a group is dropped when the function has not answered for this long."""

    @model_validator(mode="after")
    def _fits_the_type(self) -> Self:
        if self.normalize_std and self.type != "grpo":
            raise ValueError("normalize_std divides GRPO's advantages and no other type's; leave it false")
        if (self.type == "custom") != (self.path is not None):
            raise ValueError('path names the function of type = "custom"; set both or neither')
        if self.type == "custom" and self.shuffle_advantages:
            raise ValueError(
                "shuffle_advantages cannot exchange advantages of single tokens; shuffle them in your function"
            )
        return self

    @property
    def is_relative(self) -> bool:
        """An advantage compares a rollout with the others of its group."""
        return self.type not in ("reinforce_plus_plus", "custom")
