"""The model that a script publishes: taken out of its wrappers, and compared with the run's before anything is written.

Engines load exactly the tensors of the run's model. Others would be refused by all of them, after they were written,
and end the run.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from primerl.train.adapters.merging import NAME, is_adapter, lora_layers, plain_name
from primerl.train.model.packed_model import ModelError, model_shape
from primerl.train.weights.frozen import frozen_of
from primerl.train.weights.names import published
from primerl.train.weights.shards import own_tensors
from primerl.train.weights.tensors import LOADABLE

COMPILED = "_orig_mod"
"""Where torch.compile keeps the module that it was given."""
NAMED = 3
"""Tensors that a message names."""
Shape = tuple[int, ...]


class Policies:
    """What can be published in a run."""

    def __init__(self, folder: str, *, trusted: bool, casts: bool) -> None:
        """`folder`: of the run's model. `trusted`: its own code may be run. `casts`: tensors are published in a number
        format of the config's, whatever the model's is."""
        self._folder, self._trusted, self._casts = folder, trusted, casts
        self._expected: Expected | None = None
        self._accepted: dict[str, tuple[Shape, torch.dtype]] = {}
        """Tensors of the model that was published last: the same need no second comparison."""

    def checked(self, given: Any) -> Any:
        """The `transformers` model to publish, which may have a LoRA adapter of peft.

        Raises:
            TypeError: it is no such model.
            ValueError: no engine of the run can load its weights, or they are divided among ranks.
        """
        model = unwrapped(given)
        check_kind(model)
        _check_adapter(model)
        tensors = {name: (tuple(one.shape), one.dtype) for name, one in own_tensors(model).items()}
        if tensors != self._accepted:
            self._check_dtypes(tensors)
            self._expected = self._expected or Expected.of(self._folder, self._trusted)
            self._expected.check(model)
            self._accepted = tensors
        return model

    def _check_dtypes(self, tensors: dict[str, tuple[Shape, torch.dtype]]) -> None:
        for name, (_, dtype) in tensors.items():
            if not self._casts and dtype.is_floating_point and dtype not in LOADABLE.values():
                raise ValueError(
                    f"{name} is {dtype}, which engines do not load: convert the model, as by model.to(torch.bfloat16), "
                    "or set trainer.weights.dtype"
                )


def unwrapped(given: Any) -> Any:
    """The model within the wrappers of DDP, DataParallel, torch.compile and peft. Raises ValueError if its weights are
    divided among ranks."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    model = given
    while isinstance(model, torch.nn.Module):
        if isinstance(model, wrappers):
            model = model.module
        elif COMPILED in model._modules:
            model = model._modules[COMPILED]
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            # Prompts that peft learns are outside of the model within.
            _check_adapter(model)
            wrapped: Any = model
            model = wrapped.get_base_model()
        else:
            _check_whole(model)
            break
    return model


def _check_whole(model: torch.nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    divided = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if divided or any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise ValueError(
            f"{divided[0] if divided else 'the model'} is divided among the ranks, and a policy is published whole: "
            "load torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) into a model on rank 0's CPU, and publish that"
        )


def check_kind(model: Any) -> None:
    """Raises TypeError for what is no model of `transformers`."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return
    got = "None" if model is None else f"an instance of {type(model).__name__}"
    if isinstance(model, dict):
        got += "; load a state_dict into such a model, and publish that"
    elif isinstance(model, torch.nn.Module):
        got += "; publish the one within it"
    raise TypeError(
        "publish takes the transformers model that is trained, as "
        f"AutoModelForCausalLM.from_pretrained(run.model_path) makes it, and got {got}"
    )


def _check_adapter(model: Any) -> None:
    """Raises ValueError for an adapter of peft that is not W + B A, which is what is merged for publishing."""
    configs = getattr(model, "peft_config", None) or {}
    if not configs:
        return
    kinds = {str(getattr(one.peft_type, "value", one.peft_type)) for one in configs.values()}
    if list(configs) != [NAME]:
        problem = f"its adapters are {', '.join(configs)}"
    elif kinds != {"LORA"}:
        problem = f"its adapter is of the kind {', '.join(kinds)}"
    elif any(getattr(one, "modules_to_save", None) for one in configs.values()):
        problem = "whole modules are trained with it (modules_to_save)"
    elif not all(map(_is_plain, lora_layers(model).values())):
        problem = "its layers are merged, switched off, or compute more than W + B A (DoRA, biases, embeddings)"
    else:
        return
    raise ValueError(
        f"of peft, a model with one LoRA adapter named {NAME!r} is published, merged, and {problem}: publish "
        "copy.deepcopy(model).merge_and_unload()"
    )


def _is_plain(layer: Any) -> bool:
    return not (
        layer.merged
        or layer.disable_adapters
        or layer.lora_variant
        or any(layer.lora_bias.values())
        or layer.lora_embedding_A
        or getattr(layer, "fan_in_fan_out", False)
    )


class Expected:
    """Names and shapes of the tensors that engines of the run load."""

    def __init__(self, folder: str, shapes: dict[str, Shape], others: frozenset[str], prefix: str) -> None:
        """`others`: names that the folder has and the trainer does not need. `prefix`: of the model's inner part. No
        shapes: nothing is known."""
        self._folder, self._shapes, self._others, self._prefix = folder, shapes, others, prefix

    @classmethod
    def of(cls, folder: str, trusted: bool) -> Expected:
        """What the model in this folder has, which is not loaded for it."""
        # What primerl cannot make itself is left to the engines.
        with contextlib.suppress(ModelError):
            model = model_shape(folder, trust_remote_code=trusted)
            frozen = frozen_of(model)
            others = frozenset(() if frozen is None else frozen.names)
            return cls(folder, shapes_of(model), others, model.base_model_prefix)
        return cls(folder, {}, frozenset(), "")

    def check(self, model: Any) -> None:
        """Raises ValueError: its tensors are other ones."""
        if not self._shapes:
            return
        given, expected = shapes_of(model), self._shapes
        shared = sorted(given.keys() & expected.keys())
        found = [
            f"{name} has shape {list(given[name])}, not {list(expected[name])}"
            for name in shared
            if given[name] != expected[name]
        ]
        found += [f"{name} {list(expected[name])} is missing" for name in sorted(expected.keys() - given.keys())]
        extra = sorted(given.keys() - expected.keys() - self._others)
        found += [f"{name} {list(given[name])} is not in the run's model" for name in extra]
        if found:
            more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
            count = "1 tensor" if len(found) == 1 else f"{len(found)} tensors"
            raise ValueError(
                f"no engine can load these weights: they are not those of the run's model, {self._folder}, in "
                f"{count}: {'; '.join(found[:NAMED])}{more}. {self._hint(given)}"
            )

    def _hint(self, given: dict[str, Shape]) -> str:
        if any(f"{self._prefix}.{name}" in self._shapes for name in given):
            return f"This is the inner part of such a model: publish the whole model, not its .{self._prefix}"
        if any(f"{COMPILED}." in name for name in given):
            return "Parts of it are compiled, which renames their weights: compile them by part.compile()"
        return "Publish a model as AutoModelForCausalLM.from_pretrained(run.model_path) makes it"


def shapes_of(model: Any) -> dict[str, Shape]:
    """Shapes of what is published of the model, by name; an adapter is merged."""
    state: dict[str, Tensor] = {
        plain_name(name): tensor.to("meta") for name, tensor in own_tensors(model).items() if not is_adapter(name)
    }
    return {name: tuple(tensor.shape) for name, tensor in published(model, state).items()}
