"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685), by `peft`.

    W x  becomes  W x + (alpha / rank) B A x        A [rank, in] random at first, B [out, rank] zero; only they learn

peft puts its layers into the model itself, so that packing, losses and optimizers see the same model as without, with
few trained parameters. A and B are kept in fp32, and computed with in the dtype of the model. What leaves the trainer
is either whole weights, W + (alpha / rank) B A, or the adapter in peft's own names; both are made from copies, and the
model that is trained is never merged, which would change the bits of W.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from primerl.process.imports import importing
from primerl.train.adapters.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    BASE_DIGEST,
    LORA_ALPHA,
    PREFIX,
    check_base,
    folder_digest,
    read_adapter_config,
)
from primerl.train.adapters.merging import NAME, PARAMETER, adapter_state, digest_tensor, is_adapter, lora_layers
from primerl.train.adapters.targets import KEY, choose
from primerl.train.checkpoint import staging
from primerl.train.checkpoint.files import whole_folder
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.model.experts import ADAPTERS
from primerl.train.model.packed_model import DTYPES, ModelError
from primerl.train.settings import ConfigError, LoraConfig, TrainerConfig
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import Files, Shares, gathered, own_tensors
from primerl.train.weights.transfer import Sender

log = logging.getLogger(__name__)

BROADCAST_FILE = "broadcast.safetensors"
"""What an engine has to know besides the adapter's own tensors."""


def saved_name(name: str) -> str:
    """peft's name, in files, for a tensor of the model."""
    return PREFIX + name.replace(f".{NAME}.", ".")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model that is being trained."""

    model: Any
    config: LoraConfig
    peft_config: Any
    base_digest: str
    """Digest of the weights it is trained on, as they are in their files."""

    def tensors(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The adapter's tensors by peft's names, contiguous on the CPU. `state`: the model's, if already gathered."""
        own = adapter_state(self.model.state_dict() if state is None else state)
        named = {saved_name(name): tensor for name, tensor in own.items()}
        return {name: named[name].detach().float().cpu().contiguous() for name in sorted(named)}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by peft's names."""
        return {saved_name(name): one for name, one in self.model.named_parameters() if is_adapter(name)}

    def misfits(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of tensors that are missing, unknown or of another shape than this adapter's."""
        own = self.parameters()
        other = sorted(tensors.keys() ^ own.keys())
        return other + sorted(name for name in tensors.keys() & own.keys() if tensors[name].shape != own[name].shape)

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the values of all parameters; `tensors` have no misfits."""
        for name, parameter in self.parameters().items():
            parameter.copy_(tensors[name])

    def facts(self) -> dict[str, Any]:
        """What has to be the same wherever the tensors are used."""
        return {
            BASE_DIGEST: self.base_digest,
            LORA_ALPHA: self.config.alpha,
            "rank": self.config.rank,
            "layers": sorted(lora_layers(self.model)),
        }

    def facts_as_tensors(self) -> dict[str, Tensor]:
        """The facts as tensors, so that they are part of a digest."""
        return {
            BASE_DIGEST: digest_tensor(self.base_digest),
            LORA_ALPHA: torch.tensor([self.config.alpha], dtype=torch.float32),
        }

    def save(self, target: Path, state: dict[str, Tensor] | None = None) -> None:
        """Save in peft's own layout, which `peft.PeftModel.from_pretrained` and vLLM load."""
        with whole_folder(target, replace=True) as folder:
            self.write(folder, self.tensors(state))

    def write(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt", BASE_DIGEST: self.base_digest})
        self.peft_config.save_pretrained(str(folder))

    def load(self, path: Path, base: Path) -> None:
        """Start from the weights in `path`. Raises ConfigError if they belong to another model than `base`."""
        file = Path(os.path.expanduser(path)) / ADAPTER_FILE
        key = f"{KEY}adapter_path"
        check_base(file, base, self.base_digest, KEY)
        try:
            with safe_open(file, "pt") as content:
                digest = (content.metadata() or {}).get(BASE_DIGEST)
                found = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise ConfigError.at(key, f"{file} cannot be read: {error}") from None
        other = self.misfits(found)
        if other:
            raise ConfigError.at(
                key,
                f"{file} does not fit: {len(other)} tensors are missing, unknown or of another shape, e.g. "
                f"{other[0]}; it is of another base model, or {KEY}target_modules names other layers than it has",
            )
        for name, tensor in found.items():
            if not bool(tensor.isfinite().all()):
                raise ConfigError.at(key, f"{file}: {name} has values that are not finite; give another adapter")
        self.assign(found)
        if digest is None:
            log.warning("%s does not say which weights it was trained on; its shapes fit", file)


def add_adapter(
    model: Any,
    config: LoraConfig,
    base: Path,
    seed: int,
    base_digest: str | None = None,
    *,
    output_layer: bool = False,
) -> Adapter:
    """Freeze the model's own weights, loaded from the folder `base`, and give it an adapter to train. Where the model
    has its shape only (torch's meta device), so has the adapter. `base_digest`: of the folder, where it is known.
    `output_layer`: it gets an adapter as well, of its own where it is tied to the embedding, which stays as it is.

    Raises:
        ConfigError: layers that are not there or cannot have one; an adapter to begin with that does not fit.
        ModelError: peft is not installed.
    """
    given = read_adapter_config(config, KEY) if config.adapter_path is not None else {}
    with importing():
        try:
            import peft
        except ImportError as error:
            raise ModelError(f"model.lora needs the package peft ({error}); install it with pip") from error
    targets = choose(model, config, output_layer=output_layer)
    saved = targets.for_peft(model, saved=True)
    library: Any = peft  # whose own types differ from what it takes
    peft_config = library.LoraConfig(
        r=config.rank,
        # Other readers expect a whole number there.
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,
        lora_dropout=config.dropout,
        **targets.for_peft(model),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    # The adapter's initial values depend on the seed alone, and change no other random number: peft draws them on the
    # CPU, and `torch.manual_seed` would also seed the GPU's generator, which is not restored here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # Inside a module whose architecture peft does not know: for some mixtures it would mistake a shared expert's
        # matrices for those of the experts, and skip the shared expert.
        library.inject_adapter_in_model(peft_config, torch.nn.ModuleDict({"whole": model}), NAME)
    peft_config.inference_mode = True
    peft_config.target_modules, peft_config.target_parameters = saved["target_modules"], saved["target_parameters"]
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
        parameter.requires_grad_(is_adapter(name))
    _compute_in_their_dtype(model)
    adapter = Adapter(model, config, peft_config, base_digest or folder_digest(base))
    if config.adapter_path is not None and not next(model.parameters()).is_meta:
        adapter.load(Path(config.adapter_path), base)
        said = given.get("base_model_name_or_path")
        log.info("starting from the adapter in %s (of %s)", config.adapter_path, said)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = len(targets.linear) + len(targets.experts)
    log.info("training an adapter of %s parameters for %d layers", f"{count:,}", layers)
    return adapter


def _compute_in_their_dtype(model: Any) -> None:
    """The adapter's matrices are fp32 tensors, but computed with in the dtype of what they are given, as engines do.
    Experts compute their adapters with their own products (`primerl.train.model.experts`), peft's layers around them
    only hold the matrices."""
    for layer in lora_layers(model).values():
        if hasattr(layer, PARAMETER):
            layer._active_adapter = []
            vars(layer.get_base_layer()).setdefault(ADAPTERS, {})[getattr(layer, PARAMETER)] = layer
        else:
            layer.cast_input_dtype_enabled = False
            for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
                part.__class__ = _InDtypeOfInput


class _InDtypeOfInput(torch.nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype))


def check_facts(adapter: Adapter | None, saved: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint with these facts belongs to another adapter, or to none."""
    if adapter is None or not saved:
        if saved:
            raise ValueError("it holds an adapter; set model.lora as it was")
        if adapter is not None:
            raise ValueError("it holds whole weights, and model.lora is set; leave model.lora out, as it was")
        return
    own = adapter.facts()
    differences = {
        BASE_DIGEST: "its base model has other weights",
        LORA_ALPHA: "model.lora.alpha differs",
        "rank": "model.lora.rank differs",
        "layers": "model.lora.target_modules differs",
    }
    for name, difference in differences.items():
        if saved[name] != own[name]:
            raise ValueError(f"{difference}; set the model as it was")


class AdapterPublisher(WeightsPublisher):
    """Publishes the adapter alone, for engines that hold the base model: see docs/architecture.md, "Adapters"."""

    def __init__(
        self,
        adapter: Adapter,
        output_dir: Path,
        keep_last: int,
        keep_all: bool,
        ranks: Ranks = ALONE,
        sender: Sender | None = None,
        *,
        probes: bool = False,
        stored_interval: int | None = None,
    ) -> None:
        """`stored_interval`: versions at its multiples are staged for the store before they can be removed."""
        super().__init__(output_dir, keep_last, keep_all, ranks, sender=sender, probes=probes)
        self._adapter = adapter
        self._output_dir = output_dir
        self._stored_interval = stored_interval

    def _shares(self, model: Any) -> Shares:
        state = gathered(model, adapter_state(own_tensors(model)), keep=self._ranks.leads)
        if self._ranks.leads:
            files = {ADAPTER_FILE: self._adapter.tensors(state), BROADCAST_FILE: self._adapter.facts_as_tensors()}
            yield from ((file, name, tensor) for file, tensors in files.items() for name, tensor in tensors.items())

    def _write(self, folder: Path, files: Files) -> None:
        if files:
            self._adapter.write(folder, files[ADAPTER_FILE])
            save_file(files[BROADCAST_FILE], folder / BROADCAST_FILE)

    def _complete(self, version: int, folder: Path, parts: list[dict[str, Any]]) -> None:
        super()._complete(version, folder, parts)
        if self._stored_interval is not None and version and version % self._stored_interval == 0:
            try:
                staging.link(self._output_dir, "adapter", version, self.folder / f"step_{version}")
            except (OSError, shutil.Error) as error:  # a failure of the store does not end training
                log.warning("the adapter of policy %d is not staged for the store: %s", version, error)

    def _held(self, folder: Path) -> dict[str, Any] | None:
        return super()._held(folder) if (folder / ADAPTER_CONFIG).is_file() else None


class MergedPublisher(WeightsPublisher):
    """Publishes whole weights with the adapter merged into them, and stages the adapter itself for the store."""

    def __init__(self, adapter: Adapter, output_dir: Path, *args: Any, stored_interval: int, **named: Any) -> None:
        """As `WeightsPublisher`. `stored_interval`: adapters of versions at its multiples are staged."""
        super().__init__(output_dir, *args, **named)
        self._adapter, self._output_dir, self._stored_interval = adapter, output_dir, stored_interval
        self._tensors: dict[str, Tensor] = {}

    def _shares(self, model: Any) -> Shares:
        # Copies: the weights may change before the version is complete.
        state = gathered(model, adapter_state(own_tensors(model)), keep=self._ranks.leads)
        self._tensors = {name: tensor.clone() for name, tensor in self._adapter.tensors(state).items()} if state else {}
        yield from super()._shares(model)

    def _complete(self, version: int, folder: Path, parts: list[dict[str, Any]]) -> None:
        super()._complete(version, folder, parts)
        if not version or version % self._stored_interval:
            return
        target = self._output_dir / "run" / f"adapter_{version}"
        try:
            with whole_folder(target, replace=True) as made:
                self._adapter.write(made, self._tensors)
            staging.link(self._output_dir, "adapter", version, target)
        except (OSError, shutil.Error) as error:  # as of an adapter that is published
            log.warning("the adapter of policy %d is not staged for the store: %s", version, error)
        finally:
            shutil.rmtree(target, ignore_errors=True)


def new_publisher(config: TrainerConfig, adapter: Adapter | None, ranks: Ranks) -> WeightsPublisher:
    """The publisher of adapters or of whole weights, by `model.lora.broadcast`."""
    output_dir, given, lora = Path(config.output_dir), config.weights, config.model.lora
    sender = None
    if given.transport == "collective":
        from primerl.net.addresses import address_towards

        sender = Sender(output_dir / "broadcasts", address_towards(config.orchestrator_url), ranks.device)
    if adapter is not None and lora is not None and lora.broadcast == "adapter":
        return AdapterPublisher(
            adapter,
            output_dir,
            given.keep_last,
            given.keep_all,
            ranks,
            sender,
            probes=given.probe,
            stored_interval=config.stored_adapters_interval,
        )
    whole: dict[str, Any] = {
        "dtype": None if given.dtype is None else DTYPES[given.dtype],
        "max_shard_bytes": given.max_shard_bytes,
        "sender": sender,
        "probes": given.probe,
    }
    places = (output_dir, given.keep_last, given.keep_all, ranks)
    if adapter is not None and config.stored_adapters_interval is not None:
        return MergedPublisher(adapter, *places, stored_interval=config.stored_adapters_interval, **whole)
    return WeightsPublisher(*places, **whole)
