"""Functions of layers with a state, by device and dtype of their tensors.

`transformers` takes those of packages (flash-linear-attention, causal-conv1d, mamba-ssm) wherever they can be imported,
which is also where the trainer has a GPU and this engine has none. On CPU tensors they fail, and of fp32 they compute
products as TF32, with a mantissa of 10 bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from primerl.train.model.packed import PackedSequences
from primerl.train.model.recurrent import TOLD, on_gpu

MARK = "primerl_by_device"
"""Attribute of functions that replace `transformers`' own."""
OF_ONE_TOKEN = (
    *("causal_conv1d_update", "mamba2_selective_state_update"),
    *("recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule"),
)


def choose_by_device(model: torch.nn.Module) -> None:
    """The layers of this model compute by `transformers`' torch code where their tensors are on a CPU, or in fp32."""
    for home in {sys.modules.get(type(module).__module__) for module in model.modules()}:
        for name in (*TOLD, *OF_ONE_TOKEN):
            own = getattr(home, name, None)
            if own is not None and not hasattr(own, MARK):
                chosen = _by_device(own)
                setattr(chosen, MARK, True)
                setattr(home, name, chosen)


def _by_device(own: Callable[..., Any]) -> Callable[..., Any]:
    in_torch = inspect.unwrap(own)
    known = inspect.signature(in_torch).parameters

    @wraps(own)
    def chosen(*args: Any, **given: Any) -> Any:
        first = args[0] if args else next(iter(given.values()))
        # What the trainer packs is its own affair.
        if (on_gpu(first) and first.dtype != torch.float32) or any(
            isinstance(value, PackedSequences) for value in given.values()
        ):
            return own(*args, **given)
        # They are called with all that a package may take.
        return in_torch(*args, **{name: value for name, value in given.items() if name in known})

    return chosen
