"""Stages of `gpu_check.sh`. Each prints what it has found as one line of JSON, and fails where that is wrong.

features    what this torch, driver and GPU have, found by trying, not by versions
attention   kernels over packed rows, forward and backward, against attention written out in fp64
step        log-probabilities and gradients of a small Qwen3, in fp32 and bf16, against fp32 on the CPU
trees       shared prefixes: the kernel with keys longer than queries, a tree against its sequences, what it saves
memory      estimated memory of a training step against the allocator's peak
demo        supervised fine-tuning, RL with the engine on the CPU and on the GPU, each verified token by token

Those of `gpu_models.py` and `gpu_tinker.py` as well.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REHEARSAL = os.environ.get("REHEARSAL") == "1"
Found = dict[str, Any]
SCALE = 0.11


def device() -> Any:
    import torch

    return torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)


def features() -> Found:
    import torch
    from primerl.launch.placement import gpus
    from primerl.train.model.packed_model import FLASH_TAKES_GQA
    from torch.nn import attention

    found: Found = {"ok": True, "torch": torch.__version__, "varlen_takes_gqa": FLASH_TAKES_GQA}
    lists = getattr(attention, "list_flash_attention_impls", None)
    found["flash_attention"] = None if lists is None else [str(one) for one in lists()]
    found["gpus"] = [[one.name, one.model, one.memory, one.numa, one.is_part] for one in gpus.visible()]
    if not REHEARSAL:
        about = torch.cuda.get_device_properties(0)
        found |= {"name": about.name, "capability": f"{about.major}.{about.minor}", "memory": about.total_memory}
        found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        # What the plan counts with.
        found["ok"] = bool(found["gpus"]) and abs(found["gpus"][0][2] / about.total_memory - 1) < 0.05
    return found


def attention() -> Found:
    import torch
    from primerl.train.model.packed_model import PackedSequences, _by_bucket, _varlen

    torch.manual_seed(1)
    worst: dict[str, float] = {}
    for lengths, heads, key_heads, size, window in (
        ([5, 190, 1, 64], 4, 2, 64, None),
        ([5, 190, 1, 64], 4, 2, 64, 6),
        ([333, 40], 8, 8, 128, None),
    ):
        packed = PackedSequences.from_lengths(lengths, device())
        shapes = [(sum(lengths), own, size) for own in (heads, key_heads, key_heads)]
        values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        weights = torch.randn(shapes[0], dtype=torch.float64)
        kernels: list[tuple[str, Callable[..., Any], Any]] = [("fp32", _by_bucket, torch.float32)]
        kernels += [] if REHEARSAL else [("bf16", _varlen, torch.bfloat16)]
        for name, kernel, dtype in kernels:
            given = [value.to(device(), dtype).requires_grad_() for value in values]
            out = kernel(*given, packed, SCALE, window)
            own = [out, *torch.autograd.grad(out, given, weights.to(device(), dtype))]
            exact_given = [one.detach().double().cpu().requires_grad_() for one in given]
            exact = written_out(*exact_given, lengths, window)
            references = [exact, *torch.autograd.grad(exact, exact_given, weights)]
            share = max(off(one, other) for one, other in zip(own, references, strict=True))
            worst[name] = max(worst.get(name, 0.0), share)
    return {"ok": worst["fp32"] < 1e-5 and worst.get("bf16", 0.0) < 1e-2, "largest_error": worst}


def written_out(q: Any, k: Any, v: Any, lengths: list[int], window: int | None) -> Any:
    import torch

    group, parts, start = q.shape[1] // k.shape[1], [], 0
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    for length in lengths:
        rows = slice(start, start + length)
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        scores = (torch.einsum("ihd,jhd->hij", q[rows], k[rows]) * SCALE).masked_fill(hidden, -torch.inf)
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[rows]))
        start += length
    return torch.cat(parts)


def off(found: Any, exact: Any) -> float:
    """Norm of the difference as a share; infinite where something is not a number."""
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    share = float((found - exact).norm() / exact.norm().clamp(min=1e-30))
    return share if share == share else float("inf")


def small_model(layers: int, hidden: int, vocabulary: int) -> tuple[Any, Any]:
    """In fp32 on the CPU, with random weights that bf16 can hold; and its folder's config."""
    import torch
    from primerl.models.tiny import TinyConfig, write_model
    from primerl.train.model.packed_model import load_model

    sizes: Any = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    shape = TinyConfig(
        **sizes,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=vocabulary,
        initializer_range=0.02,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_model(folder, shape, seed=0)
        model = load_model(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, config


def computed(model: Any, lengths: list[int], where: Any, shared: tuple[int, ...] = (), tree: bool = True) -> Any:
    """Log-probabilities of all tokens, and the gradient of their weighted sum, on the CPU. `shared`: leading tokens
    that sequences have in common with the one before; without `tree` they are computed for each."""
    import torch

    logprobs = passed(model, lengths, where, shared, tree)
    # A tower of images has none.
    gradient = torch.cat([one.grad.float().flatten().cpu() for one in model.parameters() if one.grad is not None])
    return logprobs.float().cpu(), gradient


def passed(model: Any, lengths: list[int], where: Any, shared: tuple[int, ...], tree: bool) -> Any:
    """One forward and backward pass. Returns the log-probabilities."""
    import torch
    from primerl.train.distributed.fsdp import packed_logprobs
    from primerl.train.model.packed_model import PackedSequences

    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(3, 250, (sum(lengths),), generator=generator)
    weights = torch.randn(sum(lengths), generator=generator)
    sequences = list(torch.split(token_ids, lengths))
    for number, common in enumerate(shared):
        # Views: this writes into `token_ids`.
        sequences[number][:common] = sequences[number - 1][:common]
    packed = PackedSequences.sharing(lengths, shared if tree else (), where)
    targets = (torch.cat([torch.arange(length) for length in lengths]) > 0).nonzero().squeeze(1).to(where)
    logprobs, *_ = packed_logprobs(model, token_ids.to(where), packed, targets)
    (logprobs * weights.to(where)[targets]).sum().backward()
    return logprobs.detach()


def step() -> Found:
    import torch

    lengths = [40, 7, 130, 65] if REHEARSAL else [300, 7, 510, 64, 129]
    model, _ = small_model(4, 256, 4096)
    exact, gradient = computed(copy.deepcopy(model), lengths, torch.device("cpu"))
    found: Found = {"ok": True}
    for name, dtype, limit in (("fp32", torch.float32, 1e-3), ("bf16", torch.bfloat16, 0.1)):
        logprobs, own = computed(copy.deepcopy(model).to(device(), dtype), lengths, device())
        apart, share = float((logprobs - exact).abs().max()), off(own, gradient)
        found |= {f"{name}_logprob": apart, f"{name}_gradient": share}
        found["ok"] &= apart < limit and share < limit
    return found


def trees() -> Found:
    import torch
    from primerl.train.model.tree_proof import kernel_refusal, tree_refusal

    refused = None if REHEARSAL else kernel_refusal(device(), torch.bfloat16)
    found: Found = {"ok": refused is None, "kernel_refused": refused}
    model, _ = small_model(1, 128, 512) if REHEARSAL else small_model(4, 256, 4096)
    lengths, shared = [90, 47, 170, 175, 60], (0, 40, 40, 140, 0)
    exact, gradient = computed(copy.deepcopy(model), lengths, torch.device("cpu"), shared, tree=False)
    for name, dtype, limit in (("fp32", torch.float32, 1e-3), ("bf16", torch.bfloat16, 0.1)):
        own = copy.deepcopy(model).to(device(), dtype)
        found[f"{name}_refused"] = tree_refusal(own)
        logprobs, of_tree = computed(own, lengths, device(), shared)
        apart, share = float((logprobs - exact).abs().max()), off(of_tree, gradient)
        found |= {f"{name}_logprob": apart, f"{name}_gradient": share}
        found["ok"] &= found[f"{name}_refused"] is None and apart < limit and share < limit
    # With 8,192 tokens most work is in matrices; with 2,048 much is in starting kernels.
    prompt, answer = (64, 8) if REHEARSAL else (8192, 512)
    lengths, shared = [prompt + answer] * 8, (0, *[prompt] * 7)
    if not REHEARSAL:
        model, _ = small_model(8, 1024, 32_000)
    own = model.to(device(), torch.float32 if REHEARSAL else torch.bfloat16)
    for name, tree in (("without_s", False), ("with_s", True)):
        found[name] = round(min(timed(own, lengths, shared, tree) for _ in range(3)), 4)
    return found


def timed(model: Any, lengths: list[int], shared: tuple[int, ...], tree: bool) -> float:
    """Seconds of forward and backward."""
    import torch

    began = time.perf_counter()
    passed(model, lengths, device(), shared, tree)
    if not REHEARSAL:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def memory() -> Found:
    import torch
    from primerl.train.model import memory as estimate
    from primerl.train.model.layers import prepare

    if REHEARSAL:
        return {"ok": True, "left_out": "the allocator's peak needs CUDA; tests/test_train_memory.py has the CPU's"}
    errors: dict[str, float] = {}
    for how in ("none", "selective", "full"):
        model, config = small_model(8, 1024, 32_000)
        own = model.to(device(), torch.bfloat16)
        prepare(own, how, compile_layers=False)
        computed(own, [8192], device())  # gradients are there from now on
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        computed(own, [8192], device())
        peak = torch.cuda.max_memory_allocated() - held
        expected = estimate.training(config, 1, 8192, how, adapter=False)  # type: ignore[arg-type]
        assert expected is not None
        errors[how] = round((expected.activations + expected.temporary) / peak - 1, 3)
        del model, own
    return {"ok": all(abs(error) < 0.25 for error in errors.values()), "estimate_off_by": errors}


def demo(folder: Path) -> Found:
    steps, sft = ("2", "40") if REHEARSAL else ("6", "300")
    run = [sys.executable, "-m", "primerl"]
    data, tuned = str(folder / "data.jsonl"), str(folder / "sft")
    make = [sys.executable, "examples/reverse-text/make_data.py", "--output", data, "--rows", "9600"]
    call(*make, "--letters", "a-j", "--min-length", "3", "--max-length", "6")
    call(
        *run,
        "sft",
        "@",
        "examples/reverse-text/sft.toml",
        "--data.path",
        data,
        "--output-dir",
        tuned,
        "--max-steps",
        sft,
        "--clean-output-dir",
    )
    rl = [*run, "rl", "@", "examples/reverse-text/rl-ci.toml", "--model.path", f"{tuned}/weights/step_{sft}"]
    rl += ["--max-steps", steps, "--keep-broadcasts", "--clean-output-dir"]
    found: Found = {"ok": True}
    # By default the trainer takes the GPU and the engine the CPU; then both the one GPU, in shares.
    for name, flags in {
        "engine_on_cpu": [],
        "engine_on_gpu": ["--inference.device", "auto", "--trainer.dtype", "float32"],
    }.items():
        output = str(folder / name)
        began = time.perf_counter()
        call(*rl, "--output-dir", output, *flags)
        found[f"{name}_s"] = round(time.perf_counter() - began, 1)
        call(*run, "verify", output)
        lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        found[f"{name}_steps"] = len(lines)
        found["ok"] &= len(lines) == int(steps)
        key = "mismatch_abs_log_ratio/staleness_0/mean"
        found[f"{name}_log_ratio"] = [line[key] for line in lines if key in line]
    return found


def call(*command: str) -> None:
    subprocess.run(command, check=True)


STAGES: dict[str, Callable[..., Found]] = {
    "features": features,
    "attention": attention,
    "step": step,
    "trees": trees,
    "memory": memory,
    "demo": demo,
}


def line(name: str, code: str, seconds: str, found: str) -> str:
    """The line of results of a stage that has ended so; `found`: its own line of JSON, which may be missing."""
    values: Found = json.loads(found) if found else {}
    ok = code == "0" and bool(values.pop("ok", True))
    return json.dumps({"stage": name, "ok": ok, "code": int(code), "seconds": int(seconds), **values})


def main() -> int:
    if sys.argv[1] == "--line":
        print(line(*sys.argv[2:]))
        return 0
    if sys.argv[1] not in STAGES:
        import gpu_models  # which takes the tests' own modules
        import gpu_tinker

        STAGES.update(families=gpu_models.families, hosted=gpu_models.hosted, tinker=gpu_tinker.tinker)
    found = STAGES[sys.argv[1]](*map(Path, sys.argv[2:]))
    print(json.dumps(found), flush=True)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
