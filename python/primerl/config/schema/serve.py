"""`primerl serve --tinker`: the Tinker API over one base model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from primerl.config.schema.base import (
    BadKeysError,
    Count,
    Log,
    Port,
    ProcessesOrZero,
    Seconds,
    Section,
    Threads,
    check_dry_run,
)
from primerl.config.schema.deployment import Deployment, Ray, Slurm, check_places
from primerl.config.schema.inference import InferenceSettings


class ServedBase(Section):
    """The model that clients train adapters of, and sample from."""

    path: str
    """Model folder, or a name of the hub, as `model.path` of `primerl rl`."""
    names: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w./:-]*$", max_length=200)]] = []
    """Names by which clients may call it, as `Qwen/Qwen3-8B`: the SDK loads its tokenizer from the hub by this name,
    and cookbooks know models by theirs. Default: the folder's name, or the hub's. Its folder's path is one too."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


class ServedTraining(Section):
    """How adapters are trained."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the model's computations; default: bfloat16 on a GPU, float32 on a CPU."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """What the backward pass computes again: nothing, whole layers, or all of a layer but its matrix products."""
    shared_prefixes: Literal["auto", "off"] = "auto"
    """Compute tokens that the datums of a call begin with alike once, where that saves a tenth of them or more
    (docs/shared-prefixes.md)."""
    threads: Threads = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    max_tokens: Annotated[int, Field(ge=2, le=2**31 - 1)] = 8192
    """Tokens of a micro-batch, into which the datums of a call are packed; none may be longer."""
    max_rank: Count = 128
    """Largest rank of an adapter."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters are scaled by alpha / rank; clients cannot choose it."""
    max_clients: Count = 16
    """Training clients at the same time, each with an adapter, gradients and moments in memory."""


class ServedInference(InferenceSettings):
    """The engines that sample. Each holds the weights of one sampler at a time, merged."""

    replicas: Annotated[ProcessesOrZero, Field(ge=1)] = 2
    """Engines: samplers that can be answered at the same time. With fewer than are in use, engines load weights to and
    fro."""


class ServeTimeouts(Section):
    """In seconds."""

    start_s: Seconds = 300.0
    """Until the engines are ready."""
    gap_s: Seconds = 60.0
    """A call fails when one that has to run before it has not arrived for this long."""
    session_s: Seconds = 600.0
    """A session without heartbeats ends after this time, and its training clients are let go; what they saved stays."""


class ServeConfig(Section):
    """The Tinker API, served."""

    output_dir: str = Field(default="outputs/tinker", min_length=1)
    """Folder of saved states (`states`), logs and configs. A server that is started again in it has them all."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; on a cluster, if unset, that of the server's node. For any but loopback, TINKER_API_KEY has
    to be set, to a value that begins with `tml-`."""
    port: Port = 8080
    """Port to listen on; 0 takes a free one."""
    restarts: int = Field(default=5, ge=0)
    """How often an engine that ended is started again within ten minutes."""
    model: ServedBase
    trainer: ServedTraining = ServedTraining()
    inference: ServedInference = ServedInference()
    timeouts: ServeTimeouts = ServeTimeouts()
    deployment: Deployment = Deployment()
    slurm: Slurm | None = None
    ray: Ray | None = None
    log: Log = Log()
    clean_output_dir: bool = False
    """Delete what earlier servers left in output_dir: their saved states, too."""
    dry_run: bool = False
    """Check everything, and start nothing."""
    _chosen: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _has_its_nodes(self) -> Self:
        check_places(self.deployment, self.slurm, self.ray)
        check_dry_run(dry_run=self.dry_run, clean_output_dir=self.clean_output_dir)
        if self.deployment.num_train_nodes > 1:
            raise BadKeysError(
                f"deployment.num_train_nodes is {self.deployment.num_train_nodes}, and the trainer of a server is one "
                "process; omit it (deployment.num_infer_nodes gives engines nodes of their own)",
                "deployment.num_train_nodes",
            )
        return self

    @model_validator(mode="after")
    def _logprobs_are_the_models(self) -> Self:
        if self.inference.logprobs_mode == "processed_logprobs":
            raise BadKeysError(
                "inference.logprobs_mode: log-probabilities are the model's own here, which training losses compare "
                "with; omit it",
                "inference.logprobs_mode",
            )
        if self.inference.port:
            raise BadKeysError("inference.port: each engine takes a free port; omit it", "inference.port")
        return self
