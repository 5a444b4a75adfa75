"""`primerl rl`: one file for the whole run."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from primerl.config.errors.foreign_keys import PRIME_RL, Names
from primerl.config.schema import learning
from primerl.config.schema.base import (
    BadKeysError,
    Count,
    CountOrZero,
    LargeCount,
    Log,
    Name,
    ProcessesOrZero,
    Seconds,
    Section,
    Seed,
    check_dry_run,
)
from primerl.config.schema.deployment import Deployment, Ray, Slurm, check_places
from primerl.config.schema.inference import InferenceSettings
from primerl.config.schema.monitors import Monitored, OrchestratorWandb, PrimeMonitor, RunWandb, TrainerWandb
from primerl.config.schema.orchestrator import OrchestratorSettings
from primerl.config.schema.services import Store, Tailscale
from primerl.config.schema.trainer import Checkpoints, TrainerSettings, check_loss


class Model(Section):
    """The model that is trained and sampled from."""

    path: str
    """Model folder (config.json, weights, tokenizer.json and a chat template), or a name of the hub (`owner/name`),
    which is looked for in this machine's cache, and downloaded where it is not there."""
    name: Name | None = None
    """Name under which environments see the model; default: the folder's, or the hub's."""
    trust_remote_code: bool = False
    """Run code that comes with the model, where its config.json names some (`auto_map`) and transformers does not know
    its type. Such code can do whatever you can: read it first."""


class RunInference(InferenceSettings):
    """The inference engines of the run."""

    replicas: ProcessesOrZero = 1
    """Engines started on this machine; 0 where all of orchestrator.engines run elsewhere."""


class RunTrainer(TrainerSettings):
    """The trainer of the run."""

    external: bool = False
    """Start everything but the trainer: a script of yours trains, by `primerl.connect(output_dir)`
    (docs/recipes/own-trainer.md). It may come, and come back after it ended, within `timeouts.join_s`."""
    wandb: TrainerWandb = TrainerWandb()


class RunOrchestrator(OrchestratorSettings):
    """Rollouts, batches and their order."""

    wandb: OrchestratorWandb = OrchestratorWandb()
    prime_monitor: PrimeMonitor | None = None
    """Report the run, with its trainer, to the Prime platform."""


class RunTimeouts(Section):
    """How long the launcher waits, in seconds, before it stops the run and reports what is missing."""

    check_s: Seconds = 300.0
    """Until the environments are imported, and the orchestrator has checked its config, before anything is started."""
    install_s: Seconds = 1800.0
    """Until the requirements of an environment (`python.requirements`) are installed, before that."""
    start_s: Seconds = 300.0
    """Until engines are ready, env workers have registered and the trainer has reported; env workers import their
    environments in it, so as long as `check_s`."""
    join_s: Seconds = 600.0
    """Until env workers of each environment with `num_workers = 0` have joined from other machines, and until the
    script of an external trainer has come, or come back."""
    no_progress_s: Seconds = 600.0
    """Longest time in which no rollout ends and no step is trained, or in which no group has a signal while the trainer
    waits."""
    stop_s: Seconds = 10.0
    """Time a process has to end by itself before it is killed."""


def check_external(config: RLConfig) -> None:
    """Keys of what a training script does by itself. Raises ValueError."""
    trainer = config.trainer
    if not trainer.external:
        return
    refused = {
        "trainer.model.lora": (trainer.model.lora is not None, "a training script publishes whole weights"),
        "trainer.weights.transport": (trainer.weights.transport != "files", "a training script publishes files"),
        "checkpoint_id": (config.checkpoint_id is not None, "a training script begins from what it loads"),
        "slurm": (
            config.slurm is not None,
            "a script of yours is no part of the job that primerl submits; start both within a job of your own "
            "(docs/recipes/own-trainer.md)",
        ),
        "ray": (
            config.ray is not None,
            "a script of yours is no process of the Ray cluster; start both within a job of your own "
            "(docs/recipes/own-trainer.md)",
        ),
    }
    for key, (is_given, why) in refused.items():
        if is_given:
            raise BadKeysError(f"{key} and trainer.external are both set: {why}; omit one of the two", key)


class RLConfig(Monitored):
    """Asynchronous reinforcement learning, with all its processes."""

    foreign_keys: ClassVar[Names] = PRIME_RL

    output_dir: str = Field(default="outputs/rl", min_length=1)
    """Folder of the run: logs, metrics, weights. If unset, a new one in outputs/rl, named by time and environment."""
    max_steps: LargeCount
    """Steps to train."""
    seq_len: Count = 2048
    """Longest sequence and micro-batch, in tokens; the default is lowered to what the model can attend to."""
    seed: Seed = 0
    """Seed of the order of examples, of adapters and of sampling by primerl's own engine. Which policy answers a
    request depends on time unless `max_async_level` is 0."""
    clean_output_dir: bool = False
    """Delete what an earlier run left in output_dir."""
    skip_event: LargeCount | None = None
    """Skip this event in the journal of the run in output_dir, from this start on: one that cannot be replayed would be
    refused at every start, with a message that names it. Its content is lost."""
    dry_run: bool = False
    """Check everything and write the resolved configs, but start nothing and delete nothing (refused with
    clean_output_dir); where output_dir holds a run, that run's configs stay and none are written."""
    restarts: CountOrZero = 5
    """How often a process that was killed (by the kernel for lack of memory, say) is started again within ten minutes;
    the trainer only where it saves checkpoints (`ckpt.interval`), an env worker also where it exited by itself once it
    had begun to work."""
    fork_server: bool = True
    """Fork env workers, engine and trainer of this machine from servers that import their libraries once for all of
    them (Linux); without, each process imports them itself."""
    keep_broadcasts: bool = False
    """Keep the weights and the batch of every step, which `primerl verify` needs."""
    env_files: list[str] = []
    """Files of variables (`NAME=value` lines, .env), such as keys of judges, that env workers get in their environment:
    no other process does (but the monitors', WANDB_API_KEY), and no config and no log has them. Of a name that two
    files have, the later one counts. Relative paths are looked up in the folder of the file that names them, then in
    the working directory."""
    tailscale: Tailscale = Tailscale()
    deployment: Deployment = Deployment()
    slurm: Slurm | None = None
    ray: Ray | None = None
    model: Model
    checkpoint_id: str | None = Field(default=None, min_length=1)
    """Begin from the weights or the adapter of another run in the store: `RUN`, `RUN/step_N` or `RUN/KIND/step_N`
    (docs/runs.md); the model has to be the one which that run began with."""
    store: Store | None = None
    """Copies of checkpoints and weights; none are made if unset."""
    ckpt: Checkpoints | None = None
    """The same as `trainer.ckpt`, as `primerl sft` calls it."""
    wandb: RunWandb | None = None
    log: Log = Log()
    """Log of all processes that have no `log.level` of their own."""
    trainer: RunTrainer = RunTrainer()
    orchestrator: RunOrchestrator
    inference: RunInference = RunInference()
    timeouts: RunTimeouts = RunTimeouts()

    @model_validator(mode="after")
    def _has_its_nodes(self) -> Self:
        check_places(self.deployment, self.slurm, self.ray)
        return self

    @model_validator(mode="after")
    def _is_dry_or_cleans(self) -> Self:
        check_dry_run(dry_run=self.dry_run, clean_output_dir=self.clean_output_dir)
        return self

    @model_validator(mode="after")
    def _leaves_room_for_a_script(self) -> Self:
        check_external(self)
        return self

    @model_validator(mode="after")
    def _has_something_to_skip(self) -> Self:
        if self.clean_output_dir and self.skip_event is not None:
            raise BadKeysError(
                "clean_output_dir deletes the journal that skip_event is about; omit one of the two",
                "clean_output_dir",
            )
        return self

    @model_validator(mode="after")
    def _loss_of_the_mode(self) -> Self:
        """Unset weights of the loss follow from the training mode."""
        environments, loss = self.orchestrator.train.env, self.trainer.loss
        modes, own = learning.modes(self.orchestrator, environments), learning.losses(self.orchestrator, environments)
        names = tuple(learning.LOSS_OF_MODE.values())
        usual = {name: 1.0 if name in own else 0.0 for name in names if name not in loss.model_fields_set}
        given, loss = loss, loss.model_copy(update=usual)
        # Where all environments learn alike, a loss of what was sampled may be added; else each token has its own loss.
        of_sampled = {"rl_weight", "ce_weight"}
        added = {"rl": {"ce_weight"}, "opd": of_sampled, "opsd": of_sampled, "sft": set[str]()}
        may = {*own, *(added[next(iter(modes))] if len(modes) == 1 else ())}
        for name in names:
            if getattr(loss, name) and name not in may:
                said = " and ".join(f'"{mode}"' for mode in sorted(modes))
                raise BadKeysError(
                    f"trainer.loss.{name} is set, but orchestrator.training_mode {said} "
                    f"{'uses' if len(modes) == 1 else 'use'} no such loss; omit it",
                    f"trainer.loss.{name}",
                )
        if loss.entropy_weight and not loss.rl_weight:
            raise BadKeysError(
                "trainer.loss.entropy_weight is set, but rl_weight is 0; the bonus is over the rl tokens",
                "trainer.loss.entropy_weight",
            )
        for name, key in own.items():
            if not getattr(loss, name) and (name, modes) != ("rl_weight", {"rl"}):
                raise BadKeysError(
                    f"trainer.loss.{name} is 0, but it is what orchestrator.{key} trains; omit it",
                    f"trainer.loss.{name}",
                )
        check_loss(loss, "trainer.")
        if loss != given:
            self.trainer = self.trainer.model_copy(update={"loss": loss})
        return self

    @model_validator(mode="after")
    def _one_place_for_checkpoints(self) -> Self:
        if self.ckpt is None:
            return self
        if self.trainer.ckpt not in (None, self.ckpt):
            raise BadKeysError(
                "ckpt and trainer.ckpt are the same settings, and both are given; omit one of them", "ckpt"
            )
        self.trainer = self.trainer.model_copy(update={"ckpt": self.ckpt})
        self.trainer.check_adapter()
        return self

    @model_validator(mode="after")
    def _has_something_to_go_back_to(self) -> Self:
        ckpt = self.trainer.ckpt
        if self.clean_output_dir and ckpt is not None and ckpt.resume_step is not None:
            raise BadKeysError(
                "clean_output_dir deletes the checkpoint that ckpt.resume_step names; omit one of the two",
                "clean_output_dir",
            )
        return self

    @model_validator(mode="after")
    def _keeps_what_engines_still_load(self) -> Self:
        """So many newer versions may be published while an engine (or an evaluation) is at an older one."""
        needed, weights = self.orchestrator.max_async_level + 2, self.trainer.weights
        if weights.keep_last >= needed:
            return self
        if "keep_last" in weights.model_fields_set:
            raise BadKeysError(
                f"trainer.weights.keep_last ({weights.keep_last}) must be at least orchestrator.max_async_level + 2 "
                f"({needed}): weights that an engine has yet to load would be deleted; raise it, or omit it",
                "trainer.weights.keep_last",
            )
        weights = weights.model_copy(update={"keep_last": needed})
        weights.model_fields_set.discard("keep_last")  # it was not given
        self.trainer = self.trainer.model_copy(update={"weights": weights})
        return self

    @model_validator(mode="after")
    def _logprobs_are_of_what_is_sampled(self) -> Self:
        raw = self.inference.replicas and self.inference.logprobs_mode == "raw_logprobs"
        for key, sampling in self.orchestrator.samplings():
            if not raw or sampling.is_plain:
                continue
            raise BadKeysError(
                "inference.logprobs_mode is raw_logprobs, but the trainer needs log-probabilities of the distribution "
                f"that rollouts are sampled from, which {key}.temperature {sampling.temperature} and truncated "
                f"{sampling.truncated!r} change; omit inference.logprobs_mode",
                "inference.logprobs_mode",
            )
        return self

    @model_validator(mode="after")
    def _experts_are_read(self) -> Self:
        if self.trainer.enable_router_replay and self.orchestrator.client_type != "renderer":
            raise BadKeysError(
                "trainer.enable_router_replay needs the chosen experts of each token, which "
                f"orchestrator.client_type ({self.orchestrator.client_type}) does not request; omit one of them",
                "trainer.enable_router_replay",
                "orchestrator.client_type",
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        context = self.inference.max_model_len
        for place, sampling in self.orchestrator.samplings():
            key, longest = f"{place}.max_tokens", sampling.max_tokens
            if longest >= self.seq_len:
                raise BadKeysError(
                    f"{key} ({longest}) must be below seq_len ({self.seq_len}), "
                    "which holds the prompt too; lower one or raise the other",
                    key,
                    "seq_len",
                )
            if context is not None and longest >= context:
                raise BadKeysError(
                    f"{key} ({longest}) must be below inference.max_model_len ({context}), "
                    "which holds the prompt too; lower one or raise the other",
                    key,
                    "inference.max_model_len",
                )
        cache, context = self.inference.kv_cache_tokens, context or self.seq_len
        if cache is not None and cache < context:
            raise BadKeysError(
                f"inference.kv_cache_tokens ({cache}) does not hold one sequence of {context} tokens; "
                "raise it, or lower inference.max_model_len",
                "inference.kv_cache_tokens",
            )
        if self.inference.replicas == 0 and not self.orchestrator.engines:
            raise BadKeysError(
                "inference.replicas is 0 and orchestrator.engines names no engine; set one of them (engines of "
                'other machines are named there, as in ["http://node:8001"])',
                "inference.replicas",
            )
        if self.inference.replicas > 1 and self.inference.port:
            raise BadKeysError(
                f"inference.port ({self.inference.port}) cannot be shared by "
                f"{self.inference.replicas} replicas; set it to 0",
                "inference.port",
            )
        if self.inference.replicas and self.inference.port and self.inference.port == self.orchestrator.port:
            raise BadKeysError(
                f"inference.port and orchestrator.port are both {self.inference.port}; choose another for one of them, "
                "or 0 for any free one",
                "inference.port",
            )
        return self
