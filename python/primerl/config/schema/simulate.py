"""Plans for `primerl simulate`. Names and defaults are a run's where it has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, model_validator

from primerl.config.schema.base import BadKeysError, Fraction, Oversampling, Section, Seed

# The bounds of `primerl_simulate::plan`: more, or longer times, make a plan that would hardly ever end.
LONGEST_S = 86_400.0
PlannedSeconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
EngineStepSeconds = Annotated[float, Field(ge=0, le=60)]
SecondsEach = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, Field(ge=0, le=1_000_000)]
Processes = Annotated[int, Field(ge=1, le=100_000)]
Examples = Annotated[int, Field(ge=1, le=1_000_000_000)]
SequenceLength = Annotated[int, Field(ge=1, le=100_000_000)]


class Constant(Section):
    """Always the same number."""

    type: Literal["constant"] = "constant"
    """`constant`."""
    value: float = Field(ge=0)
    """The number."""


class Uniform(Section):
    """Any number from `min` to `max`, all equally likely."""

    type: Literal["uniform"] = "uniform"
    """`uniform`."""
    min: float = Field(ge=0)
    """Smallest number."""
    max: float = Field(ge=0)
    """Largest number."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise BadKeysError(f"min ({self.min}) is above max ({self.max}); swap them", "min", "max")
        return self


class LogNormal(Section):
    """A long tail: the logarithm is normal. What is drawn above `max` becomes `max`."""

    type: Literal["log_normal"] = "log_normal"
    """`log_normal`."""
    mean: float = Field(gt=0)
    """Mean of what is drawn, before the cut at `max`."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm; 1 is a long tail (1 % is above 6 times the mean)."""
    max: float = Field(gt=0)
    """Largest number."""


Distribution = Annotated[Constant | Uniform | LogNormal, Discriminator("type")]


class PlannedOrchestrator(Section):
    """Rollouts, batches and their order, as in a run's `[orchestrator]`."""

    batch_size: Count = 128
    """Rollouts per step, a multiple of `group_size`."""
    group_size: Count = 8
    """Rollouts of one example, compared with each other."""
    max_async_level: Steps = 2
    """How many steps generation may run ahead of the trainer; 0 is synchronous."""
    max_off_policy_steps: Steps = 8
    """Oldest policy that may be trained on, in steps; older samples are dropped and counted."""
    oversampling_factor: Oversampling = 1.0
    """Rollouts in flight, as a multiple of `batch_size`."""
    rollout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """A rollout that has not ended after this long is cancelled and tried again, as a run's `timeouts.rollout_s`."""


class PlannedInference(Section):
    """The engines. A step takes `step_s` and more for each sequence and each prompt token in it."""

    engines: Processes = 1
    """Number of engines."""
    max_num_seqs: Count = 128
    """Requests that one engine decodes at the same time."""
    kv_cache_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Tokens the KV cache of one engine holds; enough for max_num_seqs of seq_len if unset."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Most tokens computed in one step; default: 2048, or max_num_seqs if that is more."""
    step_s: EngineStepSeconds = 0.02
    """Seconds a step takes however little there is to do: about the time of one token of one request."""
    step_per_sequence_s: SecondsEach = 0.00005
    """Further seconds for each sequence that decodes."""
    step_per_prefill_token_s: SecondsEach = 0.00002
    """Further seconds for each prompt token computed."""
    update_s: PlannedSeconds = 5.0
    """Seconds an engine pauses for each new version of the weights."""
    prefix_cache_hit: Fraction = 0.0
    """Share of a conversation's earlier tokens that a later turn need not compute again."""


class PlannedEnvironment(Section):
    """The env workers and what a rollout is like."""

    num_workers: Processes = 1
    """Worker processes."""
    max_concurrent: Count = 128
    """Rollouts one worker runs at the same time."""
    examples: Examples = 1000
    """Number of examples."""
    turns: Distribution = Constant(value=1)
    """Turns of a rollout, at least 1."""
    cpu_s: PlannedSeconds = 0.002
    """Seconds of the worker process's own CPU for each turn; the rollouts of a worker share one core."""
    setup_s: Distribution = Constant(value=0)
    """Seconds before the first turn."""
    turn_s: Distribution = Constant(value=0)
    """Seconds of the environment after each turn: tools, tests, scoring."""
    prompt_tokens: Distribution = Constant(value=256)
    """Tokens of the first prompt; the same for all rollouts of a group."""
    answer_tokens: Distribution = LogNormal(mean=512, max=2048)
    """Tokens sampled in a turn. `seq_len` ends a conversation whatever is drawn."""
    observation_tokens: Distribution = Constant(value=64)
    """Prompt tokens that each later turn adds."""
    failure_probability: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a rollout fails at its end and is tried again."""


class PlannedTrainer(Section):
    """The trainer."""

    step_s: PlannedSeconds = 1.0
    """Seconds of a step however few tokens it has."""
    step_per_token_s: SecondsEach = 0.00001
    """Further seconds for each token of the fullest data rank."""
    publish_s: PlannedSeconds = 2.0
    """Seconds to write the weights of each version, in which the trainer does nothing else."""


class SimulateConfig(Section):
    """A run in virtual time: throughput, idle shares, staleness, what limits. `--json` prints numbers, not a table."""

    output_dir: str | None = Field(default=None, min_length=1)
    """Folder for `report.json`, `report.txt` and `timeline.svg`; nothing is written if unset."""
    what_if: bool = True
    """Also simulate the plan with one knob turned at a time, and show what each would bring."""
    seed: Seed = 0
    """Seed of every random choice."""
    max_steps: Count = 50
    """Steps that are simulated."""
    seq_len: SequenceLength = 2048
    """Longest conversation and longest micro-batch, in tokens."""
    data_ranks: Processes = 1
    """Trainer processes among which a batch is divided."""
    orchestrator: PlannedOrchestrator = PlannedOrchestrator()
    inference: PlannedInference = PlannedInference()
    environment: PlannedEnvironment = PlannedEnvironment()
    trainer: PlannedTrainer = PlannedTrainer()

    def plan(self) -> dict[str, Any]:
        """What `primerl._core.simulate` takes: every field set."""
        plan: dict[str, Any] = self.model_dump(mode="json", exclude={"output_dir", "what_if"})
        inference = plan["inference"]
        slots = self.inference.max_num_seqs
        inference["kv_cache_tokens"] = self.inference.kv_cache_tokens or slots * self.seq_len
        inference["max_num_batched_tokens"] = self.inference.max_num_batched_tokens or max(2048, slots)
        return plan
