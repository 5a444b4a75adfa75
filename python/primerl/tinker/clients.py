"""Training clients: adapters over one base model, whose weights they share.

Each client has modules of its own around the base model's tensors, with an adapter, gradients that add up from call to
call until its optimizer steps, and moments. All are used by one thread.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from primerl.tinker.losses import LossInputError, check
from primerl.tinker.sampling import SampleRequest
from primerl.tinker.scoring import Scores, scored
from primerl.tinker.untied import UntiedPublisher, publish_apart, tied_head
from primerl.tinker.wire import Datum, Request, datums_of, output_of
from primerl.train.adapters.files import folder_digest
from primerl.train.adapters.lora import Adapter, add_adapter
from primerl.train.adapters.targets import choose
from primerl.train.checkpoint.step_folders import saving
from primerl.train.data.trees import LEAST_SHARED, packed_groups, packed_trees
from primerl.train.distributed.ranks import Ranks
from primerl.train.model.loading import make_ready
from primerl.train.model.packed_model import (
    PackedSequences,
    dtype_on,
    load_model,
    output_head,
    predicted_hidden,
    predicted_logits,
)
from primerl.train.model.prefixes import shared_with_previous
from primerl.train.objective.logprobs import token_logprobs
from primerl.train.settings import ALL_LINEAR, ComputationConfig, Dtype, LoraConfig

log = logging.getLogger("primerl.tinker")

ATTENTION = ("attn", "attention", "mixer")
"""Parts of the names of layers that `train_attn` is about; the others are `train_mlp`'s."""

DIST_TIMEOUT_S = 600.0
FROM_STATE = "service_client.create_training_client_from_state_with_optimizer(path)"
"""What a script calls for a training client that continues from a state."""
BROKEN = (
    "its weights give log-probabilities that are not finite, as after steps with too large a learning rate. Continue "
    f"from an earlier state ({FROM_STATE}), and step with a smaller one"
)


@dataclass(frozen=True)
class LoraOptions:
    """What a client asks for."""

    rank: int
    seed: int
    train_mlp: bool
    train_attn: bool
    train_unembed: bool = False
    """The output layer, whose adapter leaves an embedding that it is tied to as it is. False: as of states that were
    saved before there was such an adapter."""

    def targets(self, model: Any) -> list[str]:
        """But for the output layer. Raises LossInputError if there is nothing to train."""
        if self.train_mlp and self.train_attn:
            return [ALL_LINEAR]
        if not (self.train_mlp or self.train_attn):
            if self.train_unembed:
                return []
            raise LossInputError(
                "lora_config: train_mlp, train_attn and train_unembed are all false; there is nothing to train"
            )
        config = LoraConfig(rank=self.rank, alpha=1.0, dropout=0.0, target_modules=[ALL_LINEAR], adapter_path=None)
        names = choose(model, config).linear
        wanted = [name for name in names if any(part in name for part in ATTENTION) == self.train_attn]
        if not wanted:
            raise LossInputError("lora_config: the model has no layers of the kind that is to be trained")
        return wanted


def on_one_device(
    *,
    dtype: Dtype | None,
    activation_checkpointing: Literal["none", "full", "selective"] = "none",
    shared_prefixes: Literal["auto", "off"] = "auto",
    threads: int,
) -> ComputationConfig:
    """How a base model computes: by one rank, as it is written."""
    return ComputationConfig(
        dtype=dtype,
        activation_checkpointing=activation_checkpointing,
        compile=False,
        shared_prefixes=shared_prefixes,
        threads=threads,
        ranks=1,
        dp_replicate=1,
        context_parallel=1,
        dist_timeout_s=DIST_TIMEOUT_S,
        peak_tflops=None,
    )


class BaseModel:
    """The model that all clients train adapters of. Not thread-safe."""

    def __init__(self, folder: Path, computation: ComputationConfig, alpha: float, *, trusted: bool) -> None:
        """Raises ModelError: it cannot be trained, or packed it does not compute what it computes alone."""
        self.folder, self.alpha = folder, alpha
        self.is_stopping = False
        """Set by another thread: what is computed ends after its micro-batch."""
        ranks = Ranks.join(1, 1, computation.dist_timeout_s)
        self.device = ranks.device
        self.model = load_model(
            folder, dtype_on(self.device, computation.dtype), self.device, trust_remote_code=trusted
        )
        _, _, self.shares = make_ready(self.model, computation, None, folder, 0, ranks, frozen=True)
        self.model.requires_grad_(False)
        head = tied_head(self.model)
        if head is not None:
            publish_apart(self.model, head)
        self.digest = folder_digest(folder)
        self.vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        self.longest: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        """Tokens that the model can attend to, where its config says it."""

    def adapted(self, options: LoraOptions) -> tuple[Any, Adapter]:
        """A model with the base model's own tensors, and a new adapter. Raises LossInputError."""
        own = [*self.model.parameters(), *self.model.buffers()]
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in own})
        config = LoraConfig(
            rank=options.rank,
            alpha=self.alpha,
            dropout=0.0,
            target_modules=options.targets(model),
            adapter_path=None,
        )
        adapter = add_adapter(model, config, self.folder, options.seed, self.digest, output_layer=options.train_unembed)
        return model, adapter


SavedAdapter = tuple[LoraOptions, Mapping[str, Tensor]]
"""Its tensors by peft's names."""


class Published:
    """Writes whole weights for engines: the base model's, or those with an adapter merged in. And computes with the
    same what engines do not give."""

    def __init__(self, base: BaseModel, folder: Path) -> None:
        self._base = base
        self._folder = folder
        self._adapted: dict[tuple[int, bool, bool, bool], tuple[Any, Adapter]] = {}
        """By what decides the adapter's shape."""

    def scored(self, adapter: SavedAdapter | None, request: SampleRequest) -> Scores:
        """What the request asks of the prompt and engines do not give."""
        model = self._base.model if adapter is None else self._with(*adapter)
        temperature = float(request.sampling["temperature"])
        return scored(model, request.prompt, request.targets, request.alternatives, temperature, request.seed)

    @torch.no_grad()
    def is_finite(self, adapter: SavedAdapter | None, prompt: Sequence[int]) -> bool:
        """Whether the model gives every token a probability after this prompt."""
        model = self._base.model if adapter is None else self._with(*adapter)
        token_ids = torch.tensor(prompt, device=self._base.device)
        packed = PackedSequences.from_lengths([len(prompt)], self._base.device)
        last = torch.tensor([len(prompt)], device=self._base.device)
        return bool(predicted_logits(model, token_ids, packed, last).isfinite().all())

    def write(self, version: int, adapter: SavedAdapter | None) -> Path:
        """The folder that an engine loads. Raises SavingError."""
        with saving(self._folder / "broadcasts" / f"step_{version}"):
            publisher = UntiedPublisher(self._folder, keep_last=1, keep_all=True)
            model = self._base.model if adapter is None else self._with(*adapter)
            return publisher.publish(model, version).parent

    def _with(self, options: LoraOptions, tensors: Mapping[str, Tensor]) -> Any:
        """The model with this adapter, until another one is asked for."""
        key = (options.rank, options.train_mlp, options.train_attn, options.train_unembed)
        if key not in self._adapted:
            self._adapted[key] = self._base.adapted(options)
        model, adapter = self._adapted[key]
        set_tensors(adapter, tensors)
        return model


def set_tensors(adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    """Raises LossInputError where they are of another adapter."""
    if adapter.misfits(tensors):
        raise LossInputError("the saved adapter has other layers or another rank than this model gives it")
    adapter.assign(tensors)


class TrainingClient:
    def __init__(self, base: BaseModel, options: LoraOptions, micro_batch_tokens: int) -> None:
        self.options = options
        self.name = "this client"
        """For messages."""
        self.steps = 0
        self._base = base
        self._micro_batch_tokens = micro_batch_tokens
        self.model, self.adapter = base.adapted(options)
        self._parameters = list(self.adapter.parameters().values())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0)
        self.stepped_loss: float | None = None
        """Loss of the data of the last step, for each token with a weight or an advantage."""
        self._since_step = (0.0, 0)
        """Sum of the losses since the last step, and the tokens that they are of."""
        self._failed: str | None = None
        """Why gradients are missing, after a call that failed."""

    # Training ---------------------------------------------------------------------------------------------------------

    def forward_backward(self, request: Request) -> Any:
        """The answer, as a message. Raises LossInputError; gradients are then dropped at the next `optim_step`."""
        try:
            return self._forward_backward(request)
        except BaseException as error:
            said = _out_of_memory(self._base.device) if isinstance(error, torch.OutOfMemoryError) else str(error)
            if not request.forward_only:
                self._failed = said or type(error).__name__
            if isinstance(error, torch.OutOfMemoryError):
                raise LossInputError(said) from error
            raise

    def _forward_backward(self, request: Request) -> Any:
        loss, names = check(request.loss, request.config)
        longest = min(self._micro_batch_tokens, self._base.longest or self._micro_batch_tokens)
        datums = datums_of(request, names, self._base.vocabulary, longest)
        outputs: list[dict[str, Tensor]] = [{} for _ in datums]
        total = 0.0
        with torch.set_grad_enabled(not request.forward_only):
            for places in packed(datums, self._micro_batch_tokens, shares=self._base.shares):
                if self._base.is_stopping:
                    raise InterruptedError("the server is stopping")
                logprobs = self._logprobs([datums[place] for place in places])
                losses = [
                    loss(own, {name: one.to(own.device) for name, one in datums[place].columns.items()}, request.config)
                    for place, own in zip(places, logprobs, strict=True)
                ]
                whole = torch.stack([one.sum() for one in losses]).sum()
                value = whole.item()
                if not math.isfinite(value):
                    raise LossInputError(self._not_finite(places, logprobs, value))
                if not request.forward_only and whole.requires_grad:
                    whole.backward()  # type: ignore[no-untyped-call]
                total += value
                for place, own, elements in zip(places, logprobs, losses, strict=True):
                    outputs[place] = {"logprobs": own, "elementwise_loss": elements}
        if not request.forward_only:
            tokens = sum(datum.weighted() for datum in datums)
            self._since_step = (self._since_step[0] + total, self._since_step[1] + tokens)
        return output_of(outputs, {"loss:sum": total})

    def _logprobs(self, datums: Sequence[Datum]) -> list[Tensor]:
        """Log-probabilities of each datum's targets, at temperature 1, of their shape; differentiable."""
        device = self._base.device
        token_ids = torch.cat([datum.token_ids for datum in datums]).to(device)
        lengths = [len(datum) for datum in datums]
        # What neighbours begin with alike is computed once; targets and losses stay each datum's own.
        ids = [datum.token_ids.numpy() for datum in datums] if self._base.shares else []
        sequences = PackedSequences.sharing(lengths, shared_with_previous(ids, LEAST_SHARED), device)
        # The state at each position predicts its target, which need not be the next token of the input.
        hidden = predicted_hidden(self.model, token_ids, sequences, torch.arange(1, len(token_ids) + 1, device=device))
        widths = [1 if datum.targets.ndim == 1 else datum.targets.shape[1] for datum in datums]
        if max(widths) > 1:
            repeats = torch.cat([torch.full((n,), k) for n, k in zip(lengths, widths, strict=True)]).to(device)
            hidden = hidden.repeat_interleave(repeats, dim=0)
        targets = torch.cat([datum.targets.flatten() for datum in datums]).to(device)
        logprobs, _ = token_logprobs(hidden, output_head(self.model), targets, entropy=False)
        parts = torch.split(logprobs, [datum.targets.numel() for datum in datums])
        return [part.view(datum.targets.shape) for part, datum in zip(parts, datums, strict=True)]

    def _not_finite(self, places: list[int], logprobs: list[Tensor], value: float) -> str:
        if all(bool(one.isfinite().all()) for one in logprobs):
            return f"the loss of data {places} is {value}, by what loss_fn_inputs has for them (logprobs, advantages)"
        rate = self._optimizer.param_groups[0]["lr"]
        return f"{self.name} after its optim_step {self.steps} (learning_rate {rate:g}): {BROKEN}"

    def lose(self, why: str, *, drop: bool) -> None:
        """A call of this client never ran: gradients are missing. `drop`: it was to step by what is there, which no
        later step may do."""
        self._failed = None if drop else why
        if drop:
            self._drop()

    def _drop(self) -> None:
        """The gradients, and what is remembered of the data that they are of."""
        self._optimizer.zero_grad()
        self._since_step = (0.0, 0)

    def optim_step(self, given: Mapping[str, Any]) -> dict[str, float]:
        """One step of AdamW by all gradients since the last one. Raises LossInputError; nothing has changed then."""
        if self._failed is not None:
            why, self._failed = self._failed, None
            self._drop()
            raise LossInputError(
                f"a forward_backward since the last optim_step has failed ({why}), so the gradients are not those of "
                "all its data; they were dropped: call forward_backward again"
            )
        values = adam_options(given)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm([one.grad for one in self._parameters if one.grad is not None])
        if not math.isfinite(norm.item()):
            self._drop()
            raise LossInputError(f"the norm of the gradient is {norm.item()}; the gradients were dropped")
        if 0.0 < values.clip < norm.item():
            torch.nn.utils.clip_grads_with_norm_(self._parameters, values.clip, norm)
        for group in self._optimizer.param_groups:
            group |= values.group
        self._optimizer.step()
        self.steps += 1
        total, tokens = self._since_step
        self.stepped_loss = total / tokens if tokens else None
        self._drop()
        return {"grad_norm:mean": norm.item(), "learning_rate:mean": values.group["lr"]}

    # State ------------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's, copied, by peft's names."""
        return {name: tensor.clone() for name, tensor in self.adapter.tensors().items()}

    def state(self) -> dict[str, Any]:
        """The optimizer's state, for `load`."""
        return {"optimizer": self._optimizer.state_dict(), "steps": self.steps}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> None:
        """`state`: None for moments that begin at zero."""
        set_tensors(self.adapter, tensors)
        if state is not None:
            self._optimizer.load_state_dict(dict(state["optimizer"]))
            self.steps = int(state["steps"])


def _out_of_memory(device: torch.device) -> str:
    return (
        f"the data need more memory than {device} has free on the server; lower its trainer.max_tokens (the longest "
        "datum has to fit), or set its trainer.activation_checkpointing"
    )


@dataclass(frozen=True)
class AdamOptions:
    group: dict[str, Any]
    clip: float


def adam_options(given: Mapping[str, Any]) -> AdamOptions:
    """`AdamParams` of the SDK, as a group of torch's AdamW. Raises LossInputError."""
    known = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    unknown = sorted(given.keys() - known.keys() - {"type"})
    if unknown or given.get("type", "adamw") not in ("adam", "adamw"):
        raise LossInputError(f"adam_params: {unknown or given['type']} is not known; this server steps by AdamW only")
    values = {}
    for name, default in known.items():
        value = given.get(name, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise LossInputError(f"adam_params.{name} is {value!r}; it has to be a finite number of at least 0")
        values[name] = float(value)
    if max(values["beta1"], values["beta2"]) >= 1:
        raise LossInputError("adam_params: beta1 and beta2 have to be below 1")
    group = {"lr": values["learning_rate"], "betas": (values["beta1"], values["beta2"])}
    return AdamOptions(group | {name: values[name] for name in ("eps", "weight_decay")}, values["grad_clip_norm"])


def packed(datums: Sequence[Datum], most_tokens: int, *, shares: bool) -> list[list[int]]:
    """Places of the datums of each micro-batch, of at most so many tokens: first fit, the longest first. `shares`:
    those that begin alike come together, and only their unique tokens count."""
    places = {id(datum): place for place, datum in enumerate(datums)}
    groups = packed_trees(datums, most_tokens) if shares else packed_groups(datums, most_tokens)
    return [[places[id(datum)] for datum in group] for group in groups]
