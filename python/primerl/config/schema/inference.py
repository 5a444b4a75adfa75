"""Inference engines."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from primerl.config.errors.foreign_keys import INFERENCE, Names
from primerl.config.schema.base import BadKeysError, Log, Name, Port, Seconds, Section, Seed, Settings, Threads
from primerl.config.schema.trainer import EngineLora
from primerl.inference import backends
from primerl.process.setting_checks import MOST_COUNT, MOST_LARGE_COUNT

Backend = Annotated[str, AfterValidator(backends.check_name)]
DEVICE_PATTERN = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"
# More than any engine decodes at a time, and than the orchestrator takes connections.
MOST_NUM_SEQS = 65_536


class InferenceSettings(Section):
    """The inference engine."""

    backend: Backend = "auto"
    """`vllm`: vLLM's server; `torch`: the embedded engine (Llama, Qwen 2 and 3), for laptops and tests; `transformers`:
    the embedded engine over `transformers`, slower, for every other model that can be trained; `auto`: vLLM where there
    is a CUDA GPU and vLLM is installed, else `torch` where it serves the model, else `transformers`. Any other: a
    backend of your own, by its entry point's name or as `module:Class`."""
    python: str | None = None
    """Interpreter of the environment that vLLM is installed in, where it is not the one that runs primerl."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    max_model_len: Annotated[int, Field(ge=2, le=MOST_COUNT)] | None = None
    """Longest prompt and completion together, in tokens; default in `primerl rl`: the run's seq_len."""
    max_num_seqs: Annotated[int, Field(gt=0, le=MOST_NUM_SEQS)] = 128
    """Requests that are decoded at the same time."""
    kv_cache_tokens: Annotated[int, Field(ge=2, le=MOST_LARGE_COUNT)] | None = None
    """Tokens the KV cache holds; default: enough for max_num_seqs, or what vLLM chooses on a GPU."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of weights and activations; default: float32, or bfloat16 for vLLM on a GPU."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "cpu"
    """Where the embedded engine computes: `cpu`; `cuda`, the first GPU that it sees, or `cuda:<n>`, counted from 0;
    `auto`, the first GPU where there is one. The default is `cpu` on any machine, since the trainer takes GPUs from the
    first one on, and a GPU that both use has to have memory for both. vLLM chooses its device itself."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Log-probabilities before or after temperature and the other sampling settings; default: what the run needs: after
    them if it samples at a temperature other than 1 or may truncate, else before."""
    threads: Annotated[Threads, Field(ge=1)] = 1
    """CPU threads of the model."""
    vllm: Settings = {}
    """vLLM's own options, by their long names without dashes (docs/vllm.md); those that are primerl's are refused."""
    options: Settings = {}
    """Options of a backend of your own, which checks them."""
    log: Log = Log()

    @model_validator(mode="after")
    def _are_the_backends_options(self) -> Self:
        backends.check_options(self.backend, self.options, {"vllm": self.vllm})
        return self


class EngineModel(Section):
    """The model, as the engine needs it."""

    path: str
    """Model folder."""
    name: str | None = None
    """Name under which it is served; default: the folder's name."""


class InferenceConfig(InferenceSettings):
    """One inference process (`primerl inference @ file`)."""

    foreign_keys: ClassVar[Names] = INFERENCE

    model: EngineModel
    gpu_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of its GPUs' memory that it may take; in `primerl rl`, by deployment.engine_share. If unset, all of it (or
    what vLLM's gpu-memory-utilization says)."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Log-probabilities before or after temperature and the other sampling settings."""
    seed: Seed = 0
    """Seed of sampling."""
    enable_return_routed_experts: bool = False
    """Report with each answer which experts of a mixture were chosen for its tokens, for a trainer that replays them
    (`trainer.enable_router_replay`)."""
    lora: EngineLora | None = None
    start_s: Seconds = 300.0
    """Time until the engine has generated a token, in seconds; in `primerl rl` the run's timeouts.start_s."""
    join: str | None = None
    """URL of an orchestrator to join once the engine is ready."""
    pull_to: str | None = Field(default=None, min_length=1)
    """Folder of this machine into which the engine pulls each version of the weights from the orchestrator (`join`), by
    HTTP: for machines that do not share the run's output folder. If unset, weights are read from that."""
    join_as: Name | None = None
    """Name to join by: when the engine is started again, by the same name and at whatever port, it takes its old place
    in the run."""

    @model_validator(mode="after")
    def _can_pull(self) -> Self:
        if self.pull_to is not None and self.join is None:
            raise BadKeysError("pull_to needs join, the orchestrator that the weights are pulled from", "pull_to")
        return self
