"""Throughput of the trainer on one device: a Qwen3-0.6B (or another shape) of random weights, RL and SFT on 16k packed
tokens a step.

    PYTHONPATH=python python benches/trainer_gpu.py                     # a GPU machine
    PYTHONPATH=python python benches/trainer_gpu.py --shape tiny --tokens 512 --steps 2 --dtype float32

Needs torch >= 2.11, transformers >= 5.17 and safetensors, and of this repository only the folders `train` and
`process` of `python/primerl` (no compiled extension, no network, no model files). Prints, for each of the two, tokens
per second, MFU by the formula of `primerl.train.model.flops` (where the device's peak is known), peak memory and the
time of the parts. What is timed is what `primerl trainer` and `primerl sft` do with a step, but for receiving the
batch and publishing weights.

Sequences are 512 to 4,096 tokens long, their second half sampled (RL) or to be imitated (SFT).

Goals, of the Qwen3-0.6B with 16,384 tokens on one H100: RL 24,000 tokens/s, an MFU of 0.25 and at most 12.5 GiB; SFT
45,000 tokens/s. By their sizes, weights and the optimizer's state take 9 GiB, and the activations of all layers 18 GiB
more: RL computes these again (`--activation-checkpointing full`) and SFT keeps them, where nothing else is given. Exits
1 when a goal is missed on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics as median_of
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from primerl.train.data.batch import MicroBatch
from primerl.train.loop.metrics import peak_memory
from primerl.train.loop.statistics import Groups, Statistics
from primerl.train.model import experts, norms
from primerl.train.model.architectures import annotate
from primerl.train.model.flops import ModelShape, peak_flops
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import (
    ATTENTION,
    DTYPES,
    PackedSequences,
    output_head,
    packed_attention,
    predicted_hidden,
)
from primerl.train.model.proof import prove
from primerl.train.model.recurrent import slower_kernels
from primerl.train.objective.components import Loss
from primerl.train.objective.logprobs import token_logprobs
from primerl.train.optim import Optimizer
from primerl.train.settings import LossConfig, OptimConfig
from torch import Tensor

LOSS = LossConfig(
    type="dppo",
    args={},
    custom=None,
    rl_weight=1.0,
    ce_weight=0.0,
    ref_kl_weight=0.0,
    ref_kl_max_ratio=2.0,
    entropy_weight=0.0,
)
OPTIM = OptimConfig(
    type="adamw",
    args={},
    lr=1e-5,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    weight_decay_by_name={},
    max_norm=1.0,
    schedule="constant",
    warmup_steps=0,
    decay_steps=None,
    final_lr_ratio=0.1,
)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    # The gated delta rule in three of four layers.
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    # Eight layers as Nemotron 3 Nano has them, with a quarter of its experts.
    "nemotron3-part": {
        "model_type": "nemotron_h",
        "vocab_size": 131_072,
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "moe"] * 2,
        "ssm_state_size": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "chunk_size": 128,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "max_position_embeddings": 40_960,
    },
}


def random_model(shape: str, dtype: str, device: torch.device) -> Any:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, packed_attention)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape], use_cache=False)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=ATTENTION)
    annotate(model, ATTENTION)
    experts.install(model)
    norms.install(model)
    for slower in slower_kernels(model, device, DTYPES[dtype]):
        print(slower, flush=True)
    return model.train()


def sequence_lengths(tokens: int) -> list[int]:
    """Between 1/32 and 1/4 of the whole, adding up to it."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(torch.randint(tokens // 32, tokens // 4 + 1, (1,), generator=generator))
        lengths.append(min(max(2, length), left) if left - length >= 2 else left)
    return lengths


def micro_batch(tokens: int, vocabulary: int) -> MicroBatch:
    lengths = sequence_lengths(tokens)
    generator = torch.Generator().manual_seed(1)
    loss_mask = torch.cat([(torch.arange(length) >= length // 2).to(torch.uint8) for length in lengths])
    sampled = loss_mask == 1
    return MicroBatch(
        token_ids=torch.randint(0, vocabulary, (tokens,), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        logprobs=torch.where(sampled, -10.0 - 2.0 * torch.rand(tokens, generator=generator), 0.0),
        advantages=torch.randn(tokens, generator=generator),
        versions=torch.where(sampled, 0, -1).to(torch.int32),
        temperatures=torch.ones(tokens),
        sequence_lengths=tuple(lengths),
        rollouts=tuple(range(len(lengths))),
        environments=(0,) * len(lengths),
    )


def policy_gradient(model: Any, batch: MicroBatch, device: torch.device) -> Callable[[], float]:
    loss = Loss(LOSS)

    def run() -> float:
        targets = loss.targets(batch)
        counts, own = loss.counts([targets]).to(device), targets.to(device)
        packed = PackedSequences.from_lengths(batch.sequence_lengths, device)
        token_ids = batch.token_ids.long().to(device)
        hidden = predicted_hidden(model, token_ids, packed, own.indices)
        # All temperatures are 1, so there are none to divide by.
        logprobs, entropy = token_logprobs(hidden, output_head(model), token_ids[own.indices])
        value, values = loss(own, batch, logprobs, entropy, counts, step=1)
        value.backward()  # type: ignore[no-untyped-call]
        statistics = Statistics(Groups(1, 0), device)
        statistics.add(values, torch.zeros_like(own.sequences))
        return statistics.metrics()["loss/mean"]

    return run


def imitation(model: Any, batch: MicroBatch, device: torch.device) -> Callable[[], float]:
    def run() -> float:
        packed = PackedSequences.from_lengths(batch.sequence_lengths, device)
        token_ids: Tensor = batch.token_ids.long().to(device)
        targets = batch.trained().to(device)
        hidden = predicted_hidden(model, token_ids, packed, targets)
        logprobs, _ = token_logprobs(hidden, output_head(model), token_ids[targets], entropy=False)
        loss = -logprobs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return run


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    mfu: float | None
    peak_gib: float


@dataclass(frozen=True)
class Part:
    """RL or SFT: what is run, how activations are kept where nothing is given, and the goals."""

    name: str
    objective: Callable[[Any, MicroBatch, torch.device], Callable[[], float]]
    activations: str
    tokens_per_s: float
    mfu: float = 0.0
    peak_gib: float = math.inf

    def misses(self, measured: Measured) -> list[str]:
        found = [
            (measured.tokens_per_s < self.tokens_per_s, f"{self.tokens_per_s:,.0f} tokens/s"),
            ((measured.mfu or 0.0) < self.mfu, f"an MFU of {self.mfu}"),
            (measured.peak_gib > self.peak_gib, f"at most {self.peak_gib} GiB"),
        ]
        return [goal for is_missed, goal in found if is_missed]


PARTS = (
    Part("RL", policy_gradient, "full", 24_000, 0.25, 12.5),
    Part("SFT", imitation, "none", 45_000),
)


def measure(
    name: str, run: Callable[[], float], optimizer: Optimizer, batch: MicroBatch, shape: ModelShape, given: Any
) -> Measured:
    device, tokens = torch.device(given.device), sum(batch.sequence_lengths)
    computing, updating = [], []
    for step in range(1, given.warmup + given.steps + 1):
        if step == given.warmup + 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = now(device)
        loss = run()
        middle = now(device)
        optimizer.step(step)
        if step > given.warmup:
            computing.append(middle - start)
            updating.append(now(device) - middle)
    seconds = median_of.median(map(sum, zip(computing, updating, strict=True)))
    peak = peak_flops(device, DTYPES[given.dtype])
    flops = shape.flops(batch.sequence_lengths, len(batch.trained()))
    measured = Measured(tokens / seconds, None if peak is None else flops / seconds / peak, peak_memory(device))
    mfu = "unknown" if measured.mfu is None else f"{measured.mfu:.3f}"
    print(
        f"{name}: {tokens / seconds:.0f} tokens/s, MFU {mfu}, peak memory {measured.peak_gib:.2f} GiB, "
        f"{seconds:.3f} s a step (forward and backward {median_of.median(computing):.3f}, "
        f"optimizer {median_of.median(updating):.3f}), {flops / 1e12:.2f} TFLOP, loss {loss:.4f}",
        flush=True,
    )
    return measured


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--activation-checkpointing", choices=("none", "full", "selective"), help="of both parts")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="this part alone")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels that one more step spends its time in"
    )
    given = parser.parse_args()
    device = torch.device(given.device)
    batch = micro_batch(given.tokens, SHAPES[given.shape]["vocab_size"])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{given.shape}, {given.dtype}, {where}, {given.tokens} tokens in {len(batch.sequence_lengths)} sequences, "
        f"{len(batch.trained())} trained, torch {torch.__version__}",
        flush=True,
    )
    missed = []
    for part in (part for part in PARTS if given.only in (None, part.name)):
        goals = part.misses(measured_part(part, batch, given))
        if goals and device.type == "cuda" and (given.shape, given.tokens) == ("qwen3-0.6b", 16_384):
            missed.append(f"{part.name}: {', '.join(goals)}")
    if missed:
        print(f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


def measured_part(part: Part, batch: MicroBatch, given: Any) -> Measured:
    """On a model of its own."""
    device = torch.device(given.device)
    # The model of the part before is in reference cycles, and in the GPU's memory until they are collected.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = random_model(given.shape, given.dtype, device)
    prove(model)
    activations = given.activation_checkpointing or part.activations
    prepare(model, activations, given.compile)
    optimizer = Optimizer(model.named_parameters(), replace(OPTIM, type=given.optimizer), 1000)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{part.name} of {millions:.0f}M parameters, activation checkpointing: {activations}", flush=True)
    run = part.objective(model, batch, device)
    measured = measure(part.name, run, optimizer, batch, ModelShape.of(model), given)
    if given.profile:
        profile(run, optimizer, given.warmup + given.steps + 1)
    return measured


def profile(run: Callable[[], float], optimizer: Optimizer, step: int) -> None:
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as found:
        run()
        optimizer.step(step)
        now(torch.device("cuda" if on_gpu else "cpu"))
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90), flush=True)


if __name__ == "__main__":
    sys.exit(main())
