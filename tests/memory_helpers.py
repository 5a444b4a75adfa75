"""Peak of torch's CPU memory in a training step: what the allocator reports to torch's profiler."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def live() -> int:
    """Bytes of all tensors that Python knows, and of their gradients."""
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            add(one, storages)
            if one.is_leaf and one.grad is not None:
                add(one.grad, storages)
    return sum(storages.values())


def add(tensor: torch.Tensor, storages: dict[int, int]) -> None:
    own = getattr(tensor, "_local_tensor", tensor)
    if own.device.type == "cpu" and type(own) in (torch.Tensor, torch.nn.Parameter):
        storage = own.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()


def peak(action: Callable[[], Any]) -> int:
    """Most bytes that are allocated at a time in it."""
    gc.collect()
    before = live()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(one["ts"], one["args"]["Bytes"]) for one in events if one.get("name") == "[memory]"]
    most = held = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    return before + most


def measured(case: dict[str, Any]) -> int:
    """The second of two steps of one row: gradients and moments are there."""
    from primerl.train.distributed.fsdp import packed_logprobs, sum_gradients_after
    from primerl.train.distributed.ranks import Ranks
    from primerl.train.model.loading import load, make_ready
    from primerl.train.model.packed_model import PackedSequences
    from primerl.train.optim import Optimizer
    from primerl.train.settings import ComputationConfig, LoraConfig, OptimConfig
    from settings_helpers import filled

    torch.set_num_threads(1)
    ranks = Ranks.join(case["ranks"], 1, 120.0)
    folder, tokens, dtype = Path(case["folder"]), case["tokens"], "bfloat16" if case["half"] else "float32"
    computation = filled(
        ComputationConfig, ranks=ranks.size, dtype=dtype, activation_checkpointing=case["checkpointing"]
    )
    lora = filled(LoraConfig) if case["adapter"] else None
    model = load(folder, dtype, ranks)
    make_ready(model, computation, lora, folder, 0, ranks)
    optimizer = Optimizer(model.named_parameters(), filled(OptimConfig), 10, ranks)
    token_ids = torch.randint(3, 200, (tokens,), generator=torch.Generator().manual_seed(ranks.rank))

    def step(number: int) -> None:
        for index in range(2):
            sum_gradients_after(model, last=index == 1)
            packed = PackedSequences.from_lengths([tokens])
            logprobs, *_ = packed_logprobs(model, token_ids, packed, torch.arange(1, tokens))
            logprobs.sum().backward()
        optimizer.step(number)

    step(1)
    found = peak(lambda: step(2))
    ranks.leave()
    return found
