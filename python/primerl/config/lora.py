"""Low-rank adapters: what the trainer of a run and supervised fine-tuning share, and what an engine has to know."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from primerl.config.base import Count, Section

Target = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Targets = Annotated[list[Target], Field(min_length=1)]


class Lora(Section):
    """Train a low-rank adapter (LoRA) and leave the model's own weights as they are (docs/lora.md)."""

    rank: Count = 16
    """Rank of the adapter's matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is left out at random while training; 0 in `primerl rl`."""
    target_modules: Targets = ["all-linear"]
    """Names (or ends of dotted names) of the linear layers that get one, such as `q_proj`; `all-linear`: all of them
    within the decoder's layers."""
    adapter_path: str | None = None
    """Folder of an adapter in peft's layout to begin with, of the same rank, alpha and layers."""

    @model_validator(mode="after")
    def _all_or_names(self) -> Self:
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            raise ValueError("target_modules: all-linear means every linear layer; leave the other names out")
        return self


class TrainerLora(Lora):
    """Train a low-rank adapter (LoRA) and leave the model's own weights as they are (docs/lora.md)."""

    broadcast: Literal["adapter", "merged"] | None = None
    """What engines are sent: the adapter, or merged weights, which any engine can load. Where it is left out, the
    adapter if all engines are the run's own and `weights.dtype` is left out too."""

    @model_validator(mode="after")
    def _samples_and_trains_one_policy(self) -> Self:
        if self.dropout:
            raise ValueError(
                f"dropout is {self.dropout}, but in reinforcement learning the trainer's probabilities have to be the "
                "engine's, which has no dropout; set it to 0"
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
