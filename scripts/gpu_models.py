"""Stages of `gpu_check.sh` that go through the architectures of the hosted models, as tiny folders.

families    log-probabilities and gradients in fp32 and bf16 against fp32 on the CPU; shared prefixes; adapters
hosted      `sft`, `rl` of all weights and by an adapter, trainer and engine on the GPU, each verified token by token
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_stages import REHEARSAL, Found, computed, device, off

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import hosted_table
from hub_folders import write_hub_folder

LENGTHS, SHARED = [90, 47, 170, 175, 60], (0, 40, 40, 140, 0)
IN_FP32 = 1e-3
IN_HALF = 0.05
"""Mean difference of log-probabilities, nats: a mixture's routers choose other experts for some tokens."""
AT_ONCE = 2 if REHEARSAL else 6


def kinds() -> list[tuple[str, ...]]:
    """The models by kind: those with a text of `MODELS` in a name, or all; a few where that takes long."""
    wanted = os.environ.get("MODELS", "").split()
    found = [names for names in hosted_table.kinds() if not wanted or any(one in names[0] for one in wanted)]
    return found[:2] if REHEARSAL else found


def families() -> Found:
    found: Found = {"ok": True}
    for name, *_ in kinds():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = dict(family(write_hub_folder(Path(folder) / "model", name)))
            except Exception as error:  # noqa: BLE001 (any, so that the others are measured)
                found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        own = found[name]
        found["ok"] &= "error" not in own and (own["fp32"][1] < IN_FP32 and own["bf16"][0] < IN_HALF)
    return found


def family(folder: Path) -> Iterator[tuple[str, Any]]:
    """By what was computed: the mean difference of log-probabilities and the gradient's, as a share."""
    import torch
    from primerl.train.model.packed_model import load_model
    from primerl.train.model.recurrent import slower_kernels
    from primerl.train.model.tree_proof import tree_refusal

    model = load_model(folder)
    for why in slower_kernels(model, device(), torch.bfloat16):
        yield "slower", why[:200]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    # What sequences share is computed for each.
    exact, gradient = computed(copy.deepcopy(model), LENGTHS, torch.device("cpu"), SHARED, tree=False)
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        own = copy.deepcopy(model).to(device(), dtype)
        refused = tree_refusal(own)
        for tree in (False, True):
            if tree and refused is not None:
                yield f"{kind}_tree_refused", refused[:200]
                continue
            own.zero_grad()
            logprobs, of_own = computed(own, LENGTHS, device(), SHARED, tree)
            apart = float((logprobs - exact).abs().mean())
            yield f"{kind}{'_tree' if tree else ''}", (float(f"{apart:.2g}"), float(f"{off(of_own, gradient):.2g}"))


def hosted(folder: Path) -> Found:
    # `transformers` is imported by one thread.
    write_hub_folder(folder / "first", hosted_table.kinds()[0][0])
    # Several runs at once, each with few threads, so that one is not measured by the others' waiting.
    os.environ["OMP_NUM_THREADS"] = "2"
    columns = [
        hosted_table.Column("dry run", hosted_table.dry_run),
        hosted_table.Column("sft", hosted_table.fine_tuned),
        hosted_table.Column("rl", lambda own, model: hosted_table.trained_whole(own, model, *ON_GPU)),
        hosted_table.Column("adapter", lambda own, model: hosted_table.trained_by_adapter(own, model, *ON_GPU)),
    ]

    def measured(models: tuple[str, ...]) -> hosted_table.Row:
        own = folder / models[0].replace("/", "-")
        own.mkdir(parents=True)
        row = hosted_table.measure(models, own, columns)
        print(row.line, flush=True)
        return row

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(measured, kinds()))
    titles = [column.title for column in columns]
    found: Found = {row.models[0]: dict(zip(titles, row.cells, strict=True)) for row in rows}
    return {"ok": all(row.is_whole for row in rows), **found}


ON_GPU = ["--inference.device", "auto"]
