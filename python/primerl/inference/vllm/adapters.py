"""Adapters that vLLM loads itself: checked before it does, and compared with what it holds of them afterwards.

    POST /v1/load_lora_adapter {"lora_name", "lora_path": "broadcasts/step_<k>"}
      manifest ──> files, names, shapes, hashes, digest ──> the base model's digest ──> adapter_config.json ──> vLLM
    POST /collective_rpc {"method": "primerl_adapter_digest", "args": [lora_name]}
      what this worker holds is what was checked ──> the manifest's digest

The base model's weights are never touched: each version is an adapter of its own, under a name of its own, and a
request is answered by the one that it names from its first token to its last.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker import lora_model_runner_mixin

from primerl.inference.vllm.checkpoint import Checkpoint, CheckpointError, read, shapes_of
from primerl.inference.vllm.serve import LORA
from primerl.train.adapters.files import (
    BASE_DIGEST,
    LORA_ALPHA,
    PREFIX,
    adapter_shapes,
    folder_digest,
    published_scale,
)
from primerl.train.adapters.merging import digest_tensor
from primerl.train.settings import ConfigError
from primerl.train.weights.digest import DIGEST_BYTES
from primerl.train.weights.tensors import DTYPES

PUBLISHED = {name: DTYPES[name] for name in ("F32", "U8")}
"""Dtypes of an adapter's broadcast."""

log = logging.getLogger("vllm.primerl")


class NotHeldError(RuntimeError):
    """This worker does not compute with the adapter that it was given: the message names the layers."""


@dataclass(frozen=True)
class Expected:
    """What the adapters of a run are like."""

    rank: int
    base_digest: str
    """Digest of the tensors in the folder that the engine was started from."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all tensors of a broadcast, by name."""

    @classmethod
    def read(cls, folder: Path, *, tied: bool) -> Expected:
        """From the model's folder, and the run's settings of adapters. Raises ValueError."""
        said = json.loads(os.environ[LORA])
        adapter = adapter_shapes(shapes_of(folder, tied=tied), said["rank"], said["target_modules"])
        facts = {LORA_ALPHA: (1,), BASE_DIGEST: (DIGEST_BYTES,)}
        return cls(said["rank"], folder_digest(folder), {**adapter, **facts})

    @property
    def tensors(self) -> list[str]:
        """Names of those that are the adapter's."""
        return [name for name in self.shapes if name.startswith(PREFIX)]


@dataclass(frozen=True)
class Checked:
    """An adapter as it was read."""

    checkpoint: Checkpoint
    scale: float
    """What vLLM multiplies B by: of its `adapter_config.json`."""


def read_adapter(folder: Path, expected: Expected) -> Checked:
    """Reads and checks a published adapter. Raises CheckpointError, which names the file or the tensors."""
    found = read(folder, expected.shapes, dtypes=PUBLISHED, model=f"an adapter of rank {expected.rank} of the model")
    tensors = dict(found.tensors)
    if not torch.equal(tensors[BASE_DIGEST], digest_tensor(expected.base_digest)):
        other = bytes(tensors[BASE_DIGEST].tolist()).hex()
        raise CheckpointError(
            f"{folder} is an adapter of another base model: of one with digest {other}, and this engine was started "
            f"from one with digest {expected.base_digest}"
        )
    try:
        return Checked(found, published_scale(folder, expected.rank, float(tensors[LORA_ALPHA])))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


class CheckedAdapters(LRUCacheWorkerLoRAManager):
    """vLLM's own manager of a worker's adapters, which loads what was checked and nothing else."""

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> Any:
        made = super().create_lora_manager(model, vllm_config)
        tied = bool(getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))
        self.expected = Expected.read(Path(vllm_config.model_config.model), tied=tied)
        self.checked: dict[str, tuple[int, Checked]] = {}
        """By name: vLLM's number of it, and what was read."""
        layers = {self._place(name)[0] for name in self.expected.tensors}
        missing = sorted(layer for layer in layers if layer not in self._adapter_manager.modules)
        if missing:
            raise ValueError(
                f"trainer.model.lora.target_modules: vLLM cannot adapt {missing[0]} of {type(model).__name__} (nor "
                f"{len(missing) - 1} others); name layers that it can, or send merged weights "
                '(trainer.model.lora.broadcast = "merged")'
            )
        return made

    @property
    def most(self) -> int:
        """How many adapters requests may name at the same time without waiting for each other."""
        return int(self.lora_config.max_loras)

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        name, found = lora_request.lora_name, read_adapter(Path(lora_request.lora_path), self.expected)
        _, before = self.checked.get(name, (0, found))
        if found.checkpoint.digest != before.checkpoint.digest:
            # vLLM reads a folder again where it had no room for it; what was proved is what was read first.
            raise CheckpointError(
                f"{lora_request.lora_path} has digest {found.checkpoint.digest}, and adapter {name!r} was loaded with "
                f"digest {before.checkpoint.digest}"
            )
        loaded = super()._load_adapter(lora_request)
        self.checked[name] = (loaded.id, found)
        return loaded

    def keep(self, names: list[str]) -> list[str]:
        """Removes all others from memory, which vLLM does not do when they are unloaded; returns their names."""
        gone = sorted(self.checked.keys() - set(names))
        for name in gone:
            self.remove_adapter(self.checked.pop(name)[0])
        return gone

    def digest(self, name: str) -> tuple[str, int]:
        """The digest of what was read, once this worker was seen to hold it, and how many of its tensors were compared
        with what it computes with, too. Raises NotHeldError."""
        number, found = self.checked.get(name, (0, None))
        if found is None or number not in self.list_adapters():
            raise NotHeldError(f"no adapter {name!r} is held; there are {sorted(self.checked)}")
        held = self._adapter_manager.get_adapter(number)
        slots = self._adapter_manager.lora_index_to_id
        slot = slots.index(number) if number in slots else None
        tensors = dict(found.checkpoint.tensors)
        wrong, compared = [], 0
        for tensor_name in self.expected.tensors:
            source = tensors[tensor_name].to(self.lora_config.lora_dtype, copy=True)
            layer, part, kind = self._place(tensor_name)
            if kind == "b" and found.scale != 1:
                source *= found.scale  # as vLLM does, so that every bit is the same
            copy = getattr(held.loras[layer], f"lora_{kind}") if layer in held.loras else None
            copy = copy[part] if isinstance(copy, list) else copy
            computes = None if slot is None else self._computes_with(layer, part, kind, slot, source)
            compared += computes is True
            if copy is None or not torch.equal(copy, source) or computes is False:
                wrong.append(tensor_name)
        if wrong:
            raise NotHeldError(
                f"adapter {name!r}: {len(wrong)} tensors in vLLM differ from the checkpoint, e.g. {wrong[:3]}"
            )
        return found.checkpoint.digest, compared

    def _place(self, tensor_name: str) -> tuple[str, int, str]:
        """vLLM's layer, which may stand for several of the model's; which of them; `a` or `b`."""
        mapper = getattr(self._adapter_manager.model, "hf_to_vllm_mapper", None)
        layer, is_a = parse_fine_tuned_lora_name(tensor_name, mapper and mapper.get_rename_mapper())
        kind = "a" if is_a else "b"
        for packed, parts in self._adapter_manager.packed_modules.items():
            if layer in parts:
                return packed, parts.index(layer), kind
        return layer, 0, kind

    def _computes_with(self, layer: str, part: int, kind: str, slot: int, source: Tensor) -> bool | None:
        """None if it cannot be known: layers that are divided among workers, or kept in another form."""
        module = self._adapter_manager.modules[layer]
        stacked = getattr(module, f"lora_{kind}_stacked", None)
        if getattr(module, "tp_size", 1) != 1 or stacked is None or part >= len(stacked):
            return None
        rows, columns = source.shape
        place = stacked[part][slot, 0]
        if place.shape[0] < rows or place.shape[1] < columns:
            return None
        # What is beyond it is added to every answer, too.
        padded = torch.zeros_like(place)
        padded[:rows, :columns] = source
        return torch.equal(place, padded)


def install() -> None:
    """vLLM's workers use the manager of above. To be called before a model is loaded."""
    if lora_model_runner_mixin.LRUCacheWorkerLoRAManager not in (LRUCacheWorkerLoRAManager, CheckedAdapters):
        raise ImportError("vLLM's adapter manager is not the known class, so adapters cannot be checked")
    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = CheckedAdapters
