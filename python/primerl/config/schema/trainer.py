"""The trainer of a run, what supervised fine-tuning shares with it (`sft.py`), and low-rank adapters."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from primerl.config.schema.base import (
    BadKeysError,
    Count,
    LargeCount,
    LargeCountOrZero,
    Port,
    Processes,
    Seconds,
    Section,
    Seed,
    Settings,
    Threads,
)
from primerl.process.setting_checks import MOST_LARGE_COUNT
from primerl.train import losses, optimizers
from primerl.train.registry import Registry

Target = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Targets = Annotated[list[Target], Field(min_length=1)]


class Lora(Section):
    """Train a low-rank adapter (LoRA) and freeze the model's own weights (docs/lora.md)."""

    rank: Count = 16
    """Rank of the adapter's matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter's inputs in training; 0 in `primerl rl`."""
    target_modules: Targets = ["all-linear"]
    """Names (or ends of dotted names) of the linear layers that get one, such as `q_proj`, and `experts` of a mixture;
    `all-linear`: all of them within the decoder's layers."""
    adapter_path: str | None = None
    """Folder of an adapter in peft's layout to begin with, of the same rank, alpha and layers."""

    @model_validator(mode="after")
    def _all_or_names(self) -> Self:
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            raise BadKeysError(
                "target_modules: all-linear means every linear layer; omit the other names", "target_modules"
            )
        return self


class TrainerLora(Lora):
    """Train a low-rank adapter (LoRA) and freeze the model's own weights (docs/lora.md)."""

    broadcast: Literal["adapter", "merged"] | None = None
    """What engines are sent: the adapter, or merged weights, which any engine can load. If unset, the adapter where all
    engines are the run's own and take one of this model (docs/lora.md), and `weights.dtype` is unset too."""

    @model_validator(mode="after")
    def _samples_and_trains_one_policy(self) -> Self:
        if self.dropout:
            raise BadKeysError(
                f"dropout is {self.dropout}, but in reinforcement learning the trainer's probabilities have to be the "
                "engine's, which has no dropout; set it to 0",
                "dropout",
            )
        return self


class EngineLora(Section):
    """The adapters that the engine is sent in place of whole weights."""

    rank: Count
    """Their rank."""
    target_modules: Targets
    """The linear layers they are for, as in `trainer.model.lora`."""
    max_adapters: Count = 4
    """Those that vLLM answers requests by at the same time: of the versions that requests in flight began with."""


class AdaptedModel(Section):
    """How the model is trained."""

    lora: TrainerLora | None = None


class CheckpointWeights(Section):
    """The model folders `weights/step_<N>`."""

    only_last: bool = False
    """Save the last one only, and not one with every checkpoint."""
    save_adapter_separately: bool = False
    """With LoRA, save the adapter in peft's layout too, in `weights/step_<N>/lora_adapters`."""


Decay = Annotated[float, Field(ge=0, lt=1)]


def pair(given: Any) -> Any:
    """Reads a pair given on the command line, where the config library takes only lists."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(f"[{given.strip().removeprefix('[').removesuffix(']')}]")
    except ValueError:
        raise ValueError("expected two numbers, as in '[0.9, 0.95]'") from None


Decays = Annotated[tuple[Decay, Decay], BeforeValidator(pair)]


Finite = Annotated[float, Field(ge=0)]


def described(registry: Registry) -> str:
    """The built-in names are those of the files: no list of them is kept elsewhere."""
    names, folder = ", ".join(f"`{name}`" for name in registry.built_in()), registry.package.replace(".", "/")
    return (
        f"{names} (files of `{folder}`, each with its formula and papers), the name of an entry point in "
        f"`{registry.group}`, or your own as `module:name`."
    )


Recomputed = Literal["none", "full", "selective"]


class Optimizer(Section):
    """The optimizer and its learning-rate schedule."""

    type: str = Field(default="adamw", description=described(optimizers.REGISTRY))
    args: Settings = {}
    """What that file's `Options` list, such as `momentum`."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: Decays = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment; on the command line `'[0.9, 0.95]'`."""
    eps: float = Field(default=1e-8, gt=0)
    """Term added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of all parameters but norms and biases."""
    weight_decay_by_name: dict[str, Finite] = {}
    """Weight decay by pattern of the parameter's name, as in `{"*embed_tokens*" = 0.0}`; the first match counts."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """`linear` and `cosine` fall to `final_lr_ratio` of the peak at the last step, `wsd` (warm-up, stable, decay) over
    the last `decay_steps`."""
    warmup_steps: LargeCountOrZero = 0
    """Steps over which the learning rate rises from zero."""
    decay_steps: LargeCount | None = None
    """Steps over which `wsd` decays; default: a tenth of all."""
    final_lr_ratio: float = Field(default=0.1, ge=0)
    """Share of `lr` that a schedule ends at."""

    @model_validator(mode="after")
    def _type_is_known(self) -> Self:
        # Here, as the trainer's own check comes when everything else was started. Imports no torch.
        optimizers.REGISTRY.options(self.type, self.args, "")
        return self


class Loss(Section):
    """The loss: a sum of components, each divided by the number of its own tokens."""

    type: str = Field(default="dppo", description=described(losses.REGISTRY))
    args: Settings = {}
    """What that file's `Options` list, such as `clip_low`; of `custom`, its keyword arguments."""
    custom: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """`module:function`, a policy loss of your own in place of `type` (docs/custom-losses.md)."""
    rl_weight: Finite = 1.0
    """Weight of the policy loss."""
    ce_weight: Finite = 0.0
    """Weight of the cross-entropy."""
    ref_kl_weight: Finite = 0.0
    """Weight of the reverse KL divergence to a teacher, of batches with the teacher's log-probabilities."""
    ref_kl_max_ratio: float = Field(default=2.0, gt=0)
    """In that divergence, ratios of trainer to engine above this count as this one."""
    entropy_weight: Finite = 0.0
    """Weight of the entropy bonus."""

    @model_validator(mode="after")
    def _type_is_known(self) -> Self:
        if self.entropy_weight and not self.rl_weight:
            raise BadKeysError(
                "entropy_weight is set, but rl_weight is 0; the bonus is over the rl tokens", "entropy_weight"
            )
        if self.custom is None:
            losses.REGISTRY.options(self.type, self.args, "")
        elif self.type != "dppo":
            raise BadKeysError("custom and type are both set; omit one of the two", "custom")
        return self


def check_loss(loss: Loss, prefix: str = "") -> None:
    """Raises ValueError: nothing is trained."""
    if not (loss.rl_weight or loss.ce_weight or loss.ref_kl_weight):
        raise BadKeysError(
            f"{prefix}loss.rl_weight, ce_weight and ref_kl_weight are all 0; nothing is trained",
            f"{prefix}loss.rl_weight",
        )


class Weights(Section):
    """How weights are broadcast, and which stay on disk."""

    keep_last: int = Field(default=4, ge=2, le=MOST_LARGE_COUNT)
    """Newest versions that are kept; `primerl rl` raises the default to max_async_level + 2."""
    keep_all: bool = False
    """Keep every version; `primerl verify` needs them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the weights that engines load; default: the trainer's. Adapters are always float32."""
    max_shard_bytes: LargeCount = 5_000_000_000
    """Size of a file of weights above which another one is begun; also of `weights/step_<N>`."""
    transport: Literal["files", "collective"] = "files"
    """`collective`: the trainer's ranks also send what is in the files to engines that ask for it, over a process group
    of torch (NCCL on GPUs, gloo on CPUs)."""
    probe: bool = True
    """Publish the trainer's log-probabilities of a few tokens with the weights; an engine that has loaded them has to
    agree (`orchestrator.probe_tolerance`). `primerl rl` omits them if all engines are the embedded one, which proves by
    hash the very memory that it computes with."""


def check_resume(step: int | None, *, weights_only: bool) -> None:
    """Raises ValueError."""
    if step == 0:
        raise BadKeysError("ckpt.resume_step is 0; give a step, or -1 for the newest checkpoint", "ckpt.resume_step")
    if step is not None and weights_only:
        raise BadKeysError(
            "ckpt.weights_only saves nothing to resume from; omit it, or ckpt.resume_step", "ckpt.weights_only"
        )


class Checkpoints(Section):
    """What a stopped run resumes from: `<output_dir>/checkpoints`."""

    interval: LargeCount | None = None
    """Steps between checkpoints (and model folders `weights/step_<N>`), and one at the end; without it, at the end
    only, so that a run that was stopped trains again from step 1, on the same batches."""
    keep_last: LargeCount = 1
    """Newest checkpoints that are kept, with their model folders."""
    keep_interval: LargeCount | None = None
    """Checkpoints and model folders at multiples of this step are kept in addition to the newest."""
    weights_only: bool = False
    """Save model folders (`weights/step_<N>`) instead of checkpoints: there is nothing to resume from, so a run that
    was stopped trains again from step 1, on the same batches. `keep_last` and `keep_interval` are of these folders."""
    resume_step: int | None = Field(default=None, ge=-1, le=MOST_LARGE_COUNT)
    """Go back to the checkpoint of this step: the whole run becomes what it was then, and what came later is set aside
    (`replaced_step_<N>`, `replaced_journal`). -1, or unset: resume from the newest one."""
    weights: CheckpointWeights = CheckpointWeights()

    @property
    def goes_back_to(self) -> int | None:
        """The step that is named; None for the newest."""
        return None if self.resume_step == -1 else self.resume_step

    @model_validator(mode="after")
    def _can_be_resumed(self) -> Self:
        check_resume(self.resume_step, weights_only=self.weights_only)
        return self


class TrainerLog(Section):
    """What is written to the trainer's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""


NO_CONTEXT_PARALLEL = (
    "only 1 is supported: torch's context parallelism divides each sequence evenly and attends over all of its row, "
    "while rows here are packed with sequences of any length that may not see each other; raise `ranks` (each has "
    "its own sequences) or set activation_checkpointing"
)


class Computation(Section):
    """How a model is trained, whatever it is trained on."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the model's computations; default: bfloat16 on a GPU (where attention has its fast kernels in it
    only), float32 on a CPU. Weights are updated in fp32."""
    activation_checkpointing: Recomputed = "none"
    """What the backward pass computes again: nothing, whole layers, or all of a layer but its matrix products."""
    compile: bool = False
    """Compile each layer with `torch.compile`."""
    shared_prefixes: Literal["auto", "off"] = "auto"
    """Compute tokens that sequences begin with alike once, where that saves a tenth of them or more
    (docs/shared-prefixes.md)."""
    threads: Threads = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    ranks: Processes = 1
    """Processes that train, a GPU each (on a CPU, `threads` each), with the model divided among them (FSDP)."""
    dp_replicate: Count = 1
    """Groups of ranks that each hold the whole model between them (HSDP); it divides `ranks`."""
    context_parallel: Count = 1
    """Ranks that share a sequence; only 1 is supported, since sequences are packed."""
    # Shorter than torch can count, or longer than it can hold, is none.
    dist_timeout_s: Annotated[float, Field(ge=1, le=365 * 24 * 3600)] = 600.0
    """Give up when another rank has not come this long to where all meet."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What the device can do in `dtype`, dense, in TFLOP/s, for `perf/mfu`; default: by the device's name."""

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        if self.ranks % self.dp_replicate:
            raise BadKeysError(
                f"dp_replicate is {self.dp_replicate}; it must divide ranks ({self.ranks})", "dp_replicate", "ranks"
            )
        if self.context_parallel != 1:
            raise BadKeysError(
                f"context_parallel is {self.context_parallel}; {NO_CONTEXT_PARALLEL}", "context_parallel"
            )
        return self


class TrainerSettings(Computation):
    """The trainer."""

    orchestrator_timeout_s: Seconds = 60.0
    """Give up when the orchestrator has not answered for this long."""
    batch_timeout_s: Seconds = 1800.0
    """Give up when the orchestrator answers, but one batch takes longer than this."""
    model: AdaptedModel = AdaptedModel()
    optim: Optimizer = Optimizer()
    loss: Loss = Loss()
    enable_router_replay: bool = False
    """Send each token of a mixture to the experts that the engine chose for it (docs/models.md, "Router replay").
    Engines report them with their answers; those that cannot are refused."""
    weights: Weights = Weights()
    ckpt: Checkpoints | None = None
    log: TrainerLog = TrainerLog()
    metrics_port: Port | None = None
    """Serve Prometheus's `/metrics` on this port of the trainer's machine; 0: any free one, which its log and
    `run/trainer_metrics.json` show. Off if unset."""

    @property
    def can_go_on(self) -> bool:
        """Whether a trainer that was stopped in the middle will have something to resume from."""
        return self.ckpt is not None and self.ckpt.interval is not None and not self.ckpt.weights_only

    @model_validator(mode="after")
    def _there_is_an_adapter_to_save(self) -> Self:
        self.check_adapter()
        return self

    @model_validator(mode="after")
    def _adapters_have_one_dtype(self) -> Self:
        lora = self.model.lora
        if self.weights.dtype is not None and lora is not None and lora.broadcast == "adapter":
            raise BadKeysError(
                "weights.dtype: adapters are published in float32 (model.lora.broadcast); omit it", "weights.dtype"
            )
        return self

    def check_adapter(self) -> None:
        """Raises ValueError."""
        if self.ckpt is not None and self.ckpt.weights.save_adapter_separately and self.model.lora is None:
            raise BadKeysError(
                "ckpt.weights.save_adapter_separately: there is no `model.lora`, so no adapter to save",
                "ckpt.weights.save_adapter_separately",
            )


class TrainedModel(AdaptedModel):
    """The model to train."""

    path: str
    """Model folder."""
    trust_remote_code: bool = False
    """Run code that comes with the model (`model.trust_remote_code`)."""


class TrainerConfig(TrainerSettings):
    """One trainer process (`primerl trainer @ file`)."""

    output_dir: str
    """Folder of the run."""
    orchestrator_url: str
    """URL of the run's orchestrator."""
    max_steps: LargeCount
    """The run ends after so many steps."""
    seed: Seed = 0
    """Seed of every random choice."""
    environments: list[str] = []
    """Names of the orchestrator's environments, in its order, for the metrics."""
    distributions_interval: LargeCount | None = None
    """Steps between histograms of the tokens' entropy and log-ratio (`distributions.jsonl`); none if unset."""
    stored_adapters_interval: LargeCount | None = None
    """Steps between adapters that are stored; none, or only the last one, if unset."""
    gpu_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of its GPUs' memory that torch may allocate; in `primerl rl`, by deployment.engine_share. If unset, all."""
    model: TrainedModel

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        check_loss(self.loss)
        return self
