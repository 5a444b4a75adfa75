"""How rollouts are drawn, sampled and admitted, and how rewards become advantages.

The formulas and their papers are in `rust/primerl-core/src/advantage/algorithm.rs`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from primerl.config.schema.base import BadKeysError, Count, Fraction, Seconds, Section, Seed, Settings

TrainingMode = Literal["rl", "opd", "sft", "opsd"]


class Demonstration(Section):
    """What the policy is shown to be its own teacher (`training_mode = "opsd"`)."""

    key: str = Field(default="demonstration", min_length=1)
    """Where examples have what an expert answered, as text: a key of a rollout's `info`, else of its task, such as
    `answer`."""
    template: str = "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>"
    """The system message that is shown before the conversation, with the text in place of `{demonstration}`."""

    @model_validator(mode="after")
    def _shows_it(self) -> Self:
        if "{demonstration}" not in self.template:
            raise BadKeysError(
                "template has no {demonstration}, in whose place an example's demonstration stands; add it", "template"
            )
        return self


class LengthPenalty(Section):
    """What a rollout's length takes off its reward, as a share of the mean reward of its group: nothing where the group
    failed. Each weight is paid in full by the longest rollout of the group, by the others in proportion."""

    num_output_tokens_weight: float = Field(default=0.25, ge=0, allow_inf_nan=False)
    """Weight of the tokens that the policy sampled."""
    num_input_tokens_weight: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight of the tokens it was given: prompts and results of tools, each once."""
    num_turns_weight: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight of its turns."""


class Echo(Section):
    """ECHO (arXiv:2605.24517): the policy also learns to foresee what the environment says to what it does.

    Weights of the cross-entropy of these tokens, by who says it. Only the texts of messages that follow an answer
    count, not what the chat template writes around them, nor the first prompt. The loss is `trainer.loss.ce_weight`
    times their weighted sum, by their number."""

    system: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of system messages."""
    user: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of user messages."""
    assistant: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of messages that the environment writes in the assistant's place."""
    tool: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight of results of tools."""

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if not (self.system or self.user or self.assistant or self.tool):
            raise BadKeysError(
                "system, user, assistant and tool are all 0, so nothing is learnt; set one above 0, or omit echo",
                "tool",
            )
        return self


class Algorithm(Section):
    """How rewards become advantages."""

    type: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "rae", "hierarchical_grpo", "custom"] = (
        "grpo"
    )
    """`grpo`: reward minus the mean of its group (arXiv:2402.03300). `dr_grpo`: the same, normalised by a constant
    length (arXiv:2503.20783). `rloo`: minus the mean of the others (arXiv:2402.14740). `maxrl`: (reward - mean) / mean,
    for rewards of at least 0 (arXiv:2602.02710). `reinforce_plus_plus`: normalised over the whole batch
    (arXiv:2501.03262). `rae`: minus what the same seat got before, for self-play (arXiv:2506.24119).
    `hierarchical_grpo`: minus the mean of the same seat, for `episode_agents` within the rollout, for the others in the
    group. `custom`: the function that `path` names."""
    normalize_std: bool = False
    """`grpo` only: also divide by the standard deviation of the group."""
    length_normalization: Literal["token", "sequence", "constant"] | None = None
    """Loss normalisation, what weighs the same in a step's loss: every `token`, every `sequence` (GRPO's 1/|o|), or
    every token by a weight that does not depend on the batch's lengths (`constant`: 1 / `seq_len` a token, the mean
    over sequences). Default: `constant` for `dr_grpo`, `token` for the others."""
    shuffle_advantages: bool = False
    """Negative control: permute the advantages over the whole batch, so that nothing can be learnt."""
    length_penalty: LengthPenalty | None = None
    """`grpo` and `dr_grpo` only: subtract a penalty from each reward before the baseline; `{}` takes its defaults. None
    if unset."""
    echo: Echo | None = None
    """Learn what the environment says, in addition; `{}` takes the defaults: results of tools. None if unset."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """`rae` only: how much of its baseline, a moving average that starts at 0, a seat keeps at each reward."""
    episode_agents: list[Annotated[str, Field(min_length=1)]] = []
    """`hierarchical_grpo` only: the seats whose rewards are compared within one rollout, such as `["solver"]`."""
    path: str | None = Field(default=None, pattern=r"^([\w.]+:\w+|[A-Za-z_][\w.-]*)$")
    """`custom` only: the function, as `module:function`, or the name of an entry point in `primerl.advantages`; see
    docs/custom-advantages.md."""
    timeout_s: Seconds = 60.0
    """`custom` only: a group is dropped when the function has not answered for this long."""

    @model_validator(mode="after")
    def _fits_the_type(self) -> Self:
        if self.normalize_std and self.type != "grpo":
            raise BadKeysError(
                "normalize_std divides GRPO's advantages and no other type's; leave it false", "normalize_std"
            )
        if self.length_penalty is not None and self.type not in ("grpo", "dr_grpo"):
            raise BadKeysError(
                "length_penalty is subtracted before GRPO's baseline; omit it, or set type to grpo or dr_grpo",
                "length_penalty",
            )
        if self.type != "rae" and self.decay != Algorithm.model_fields["decay"].default:
            raise BadKeysError('decay is read for type = "rae" only; omit it, or set the type', "decay")
        if (self.type == "hierarchical_grpo") != bool(self.episode_agents):
            raise BadKeysError(
                'episode_agents names the seats that type = "hierarchical_grpo" compares within a rollout; set both or '
                "neither",
                "episode_agents",
            )
        if (self.type == "custom") != (self.path is not None):
            raise BadKeysError('path names the function of type = "custom"; set both or neither', "path")
        if self.type == "custom" and self.shuffle_advantages:
            raise BadKeysError(
                "shuffle_advantages cannot exchange advantages of single tokens; shuffle them in your function",
                "shuffle_advantages",
            )
        return self

    @property
    def is_relative(self) -> bool:
        """An advantage compares a rollout with the others of its group, and with nothing else."""
        return self.type not in ("reinforce_plus_plus", "rae", "hierarchical_grpo", "custom")


class Sampling(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(default=1.0, ge=0.001, le=10)
    """Sampling temperature; the trainer divides its logits by the same number."""
    max_tokens: Count = 512
    """Longest completion of one turn, in tokens."""
    rollout_max_tokens: Count | None = None
    """Tokens sampled in a whole rollout, over all its turns; no limit if unset. A rollout that has used them up ends as
    at the model's longest context, and is scored."""
    truncated: Literal["refuse", "replay"] = "refuse"
    """Training rollouts that exclude tokens before sampling, by the three keys below or by their own requests: refused,
    or recorded and replayed by the trainer, which excludes the same of its own (see
    `primerl.train.objective.truncation`; a training loop of your own has to do that itself)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the most likely tokens that have this share of the probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    """Keeps so many of the most likely tokens; 0 keeps all."""
    min_p: Fraction = 0.0
    """Keeps tokens at least this likely, as a share of the most likely one's probability; 0 keeps all."""
    chat_template_kwargs: Settings = {}
    """Variables of the chat template in every rollout, also of evaluations, such as `{ enable_thinking = false }`. Of
    one that a request names itself, the request's value counts."""

    @model_validator(mode="after")
    def _truncated_as_told(self) -> Self:
        if self.truncated == "refuse":
            for name, neutral in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
                value = getattr(self, name)
                if value != neutral and not (name == "top_k" and value == -1):
                    raise BadKeysError(
                        f"{name} ({value}) changes the distribution the trainer assumes; leave it at {neutral}, or set "
                        'truncated to "replay", with which the trainer excludes the same tokens',
                        name,
                    )
        return self

    @property
    def is_plain(self) -> bool:
        """Every training rollout is sampled from the model's own distribution."""
        return self.temperature == 1.0 and self.truncated == "refuse"


class Buffer(Section):
    """Which example comes next, by how hard it was. Names and defaults are those of Prime Intellect's hosted form."""

    online_difficulty_filtering: bool = False
    """Draw by difficulty, and do not train groups without signal: all advantages would be 0, mostly as all rewards are
    equal (`custom` and `reinforce_plus_plus`: rewards of each seat are equal). Off: all are drawn and trained."""
    easy_threshold: float = 0.8
    """An example is easy when the mean reward of its last group is at least this."""
    hard_threshold: float = 0.2
    """An example is hard when the mean reward of its last group is at most this."""
    easy_fraction: Fraction = 0.0
    """Weight of an easy example in the draw, where a normal one has 1; 0 is never, as long as there are others."""
    hard_fraction: Fraction = 0.0
    """Weight of a hard example in the draw, where a normal one has 1; 0 is never, as long as there are others."""
    env_ratios: list[Annotated[float, Field(gt=0)]] | None = None
    """One number for each training environment, in order, in place of their `ratio`."""
    seed: Seed | None = None
    """Seed of the order of examples; default: the run's."""

    @model_validator(mode="after")
    def _hard_below_easy(self) -> Self:
        if self.hard_threshold >= self.easy_threshold:
            raise BadKeysError(
                f"hard_threshold ({self.hard_threshold}) must be below easy_threshold ({self.easy_threshold}): an "
                "example would be both; lower the first or raise the second",
                "hard_threshold",
                "easy_threshold",
            )
        return self


class Admission(Section):
    """How many rollouts may be in flight, as far as the engines are concerned."""

    limit: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive`: an engine's limit follows the load it reports; `fixed`: it stays at `start_per_engine`."""
    start_per_engine: Count = 256
    """Rollouts in flight an engine is trusted with before it has reported its load."""
    min_per_engine: Count = 8
    """The adaptive limit never goes below."""
    max_per_engine: Count = 4096
    """The adaptive limit never goes above."""
    kv_cache_target: float = Field(default=0.9, gt=0, le=1)
    """Share of an engine's KV cache above which it counts as full."""
    increase: Count = 16
    """Rollouts added to an engine's limit by a report that finds room while the limit is what holds back."""
    decrease_factor: float = Field(default=0.8, gt=0, lt=1)
    """What the limit of a full engine is multiplied by."""
    evaluation_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the rollouts in flight that evaluations may have, and that is kept free for them, during training; where
    no training may start they may have all."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_per_engine <= self.start_per_engine <= self.max_per_engine:
            raise BadKeysError(
                f"start_per_engine ({self.start_per_engine}) must lie between min_per_engine ({self.min_per_engine}) "
                f"and max_per_engine ({self.max_per_engine}); move one of them",
                "start_per_engine",
                "min_per_engine",
                "max_per_engine",
            )
        return self
