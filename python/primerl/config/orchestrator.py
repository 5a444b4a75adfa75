"""The orchestrator's part. The same keys are read by the native binary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from primerl.config.algorithm import Algorithm
from primerl.config.base import Log, Name, Port, Seconds, Section
from primerl.config.environment import (
    Environment,
    EvaluationEnvironments,
    EvaluationSources,
    TrainEnvironments,
    TrainSource,
    TrainSources,
)


class Sampling(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature; the trainer divides its logits by the same number."""
    max_tokens: PositiveInt = 512
    """Longest completion of one turn, in tokens."""
    top_p: float = 1.0
    """Must stay 1: the trainer assumes the model's own distribution."""
    top_k: int = 0
    """Must stay 0: the trainer assumes the model's own distribution."""
    min_p: float = 0.0
    """Must stay 0: the trainer assumes the model's own distribution."""

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        for name, neutral in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
            value = getattr(self, name)
            if value != neutral:
                raise ValueError(
                    f"{name} ({value}) changes the distribution the trainer assumes; leave it at {neutral}"
                )
        return self


class OrchestratorTimeouts(Section):
    """How long the orchestrator waits, in seconds."""

    rollout_s: Seconds = 600.0
    """A rollout that has not ended after this long is cancelled and counts as failed."""
    worker_s: Seconds = 15.0
    """A worker that was not heard of for this long has lost its leases."""
    long_poll_s: Seconds = 10.0
    """Longest time a request for leases or a batch waits before it is answered with a reason."""
    evaluation_s: Seconds = 600.0
    """An evaluation that has not ended by then is closed with what it has."""
    engine_request_s: Seconds = 300.0
    """Longest time one generation may take."""
    engine_update_s: Seconds = 120.0
    """Longest time an engine may take to load new weights."""
    weights_s: Seconds = 600.0
    """A trainer that holds a batch and has not published its weights for this long is warned about."""
    trainer_s: Seconds = 25.0
    """The run fails when a trainer that sends heartbeats has been silent for this long."""
    no_engine_s: Seconds = 60.0
    """The run fails when no engine was reachable for this long."""


class Orchestration(Section):
    """Rollouts, batches and their order."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    batch_size: PositiveInt = 128
    """Rollouts per step, a multiple of `group_size`."""
    group_size: PositiveInt = 8
    """Rollouts of one example, compared with each other."""
    max_async_level: NonNegativeInt = 2
    """How many steps generation may run ahead of the trainer; 0 is synchronous."""
    max_off_policy_steps: NonNegativeInt = 8
    """Oldest policy that may be trained on, in steps; older samples are dropped and counted."""
    oversampling_factor: float = Field(default=1.0, ge=1)
    """Rollouts in flight, as a multiple of `batch_size`."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """`interleaved`: turns that extend each other are one sample. `branching`: each turn is a sample, with all before
    it as context."""
    truncated_rollouts: Literal["train", "mask", "drop"] = "train"
    """Rollouts that the environment cut short: trained as all others, counted in their group's baseline only, or tried
    again as failed."""
    long_samples: Literal["drop", "truncate"] = "drop"
    """Samples longer than `seq_len`: left out, or cut to it at their ends."""
    engines: list[str] = []
    """URLs of inference engines that already run."""
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    timeouts: OrchestratorTimeouts = OrchestratorTimeouts()
    log: Log = Log()

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            lower = self.batch_size - self.batch_size % self.group_size
            nearest = " or ".join(str(size) for size in (lower, lower + self.group_size) if size)
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of group_size ({self.group_size}); "
                f"set batch_size to {nearest}"
            )
        return self


def check_distinct(environments: Sequence[Environment]) -> None:
    seen: set[str] = set()
    for environment in environments:
        if environment.label in seen:
            raise ValueError(
                f"two environments are called {environment.label!r}; "
                "give one of them another `name` (it names metrics, logs and files)"
            )
        seen.add(environment.label)


def check_groups(orchestration: Orchestration, environments: Sequence[TrainSource]) -> None:
    """A group of one has nothing to compare with."""
    algorithms = [environment.algorithm or orchestration.algorithm for environment in environments]
    if orchestration.group_size == 1 and any(algorithm.is_relative for algorithm in algorithms):
        raise ValueError(
            "group_size is 1: an advantage compares a rollout with the others of its group, and alone it is "
            "always 0; set group_size to at least 2"
        )


class OrchestratorSettings(Orchestration):
    """Rollouts, batches and their order."""

    train: TrainEnvironments
    eval: EvaluationEnvironments = EvaluationEnvironments()

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        check_distinct([*self.train.env, *self.eval.env])
        check_groups(self, self.train.env)
        return self


class ServedModel(Section):
    """The model, as the orchestrator needs it."""

    path: str
    """Folder with the tokenizer, the chat template and config.json."""
    name: Name | None = None
    """Name under which environments see the model; the folder's name where it is left out."""


class OrchestratorConfig(Orchestration):
    """One orchestrator process (`primerl orchestrator @ file`)."""

    output_dir: str
    """Folder of the run."""
    seed: NonNegativeInt = 0
    """Seed of every random choice."""
    max_steps: PositiveInt
    """The run ends after so many steps."""
    seq_len: PositiveInt = 2048
    """Longest micro-batch, in tokens; a longer sample is dropped or cut, and counted."""
    data_ranks: PositiveInt = 1
    """Trainer processes among which a batch is divided."""
    model: ServedModel
    train: TrainSources
    eval: EvaluationSources = EvaluationSources()

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        check_distinct([*self.train.env, *self.eval.env])
        check_groups(self, self.train.env)
        return self
