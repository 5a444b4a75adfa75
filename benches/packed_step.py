"""A training step's forward and backward pass over packed rows, against stock `transformers` on padded rows, of each
family with layers of linear attention, Mamba-2 or short convolutions, and of the other hosted ones; on a CPU, one
thread, fp32.

    python benches/packed_step.py                                  # all families, some minutes
    python benches/packed_step.py --families qwen3_5_text --rounds 9

Both compute the same sequences from the same weights: packed, as one row; stock, as rows padded to the longest, with an
attention mask, the model's own loss. They take turns, so what else the machine does hits them alike, and the ratio is
of their median CPU times. Lengths are as uneven as those of conversations. Before anything is timed, the packed loss is
compared with the one of stock one sequence at a time. Goal: no family slower than 1.0 times stock. Exits 1 when it is
missed, or when the losses differ.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from primerl.train.model.architectures import annotate
from primerl.train.model.packed_model import ATTENTION, PackedSequences, output_head, packed_attention, predicted_hidden
from primerl.train.model.proof import prove
from primerl.train.objective.logprobs import token_logprobs
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = [*(3 * ["linear_attention"]), "full_attention"]
DELTA_RULE = {
    "layer_types": LINEAR,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA_2, "attn_layer_indices": [3]},
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 512},
    "granitemoehybrid": {
        **MAMBA_2,
        "layer_types": [*(3 * ["mamba"]), "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 128,
    },
    "kimi_linear": {
        **LATENT,
        "layer_types": LINEAR,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 32,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "lfm2": {"layer_types": [*(3 * ["conv"]), "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": [*(3 * ["conv"]), "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 32, "n_groups": 1, "chunk_size": 64},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"],
        "ssm_state_size": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "chunk_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
    "olmo_hybrid": DELTA_RULE,
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_RULE, "shared_expert_intermediate_size": 128},
    "qwen3_5_text": DELTA_RULE,
    "qwen3_next": {**EXPERTS, **DELTA_RULE, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1},
    "zamba2": {
        "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"],
        "mamba_d_state": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 64,
        "mamba_ngroups": 1,
        "chunk_size": 64,
        "attention_head_dim": 128,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
    },
}
"""Small models with the families' layers; where layers have a state, three of four do, as in the hub's."""

WITHOUT_SDPA = ("gpt_oss", "mamba2")


def config(family: str) -> Any:
    given = {**COMMON, **FAMILIES[family]}
    try:
        return AutoConfig.for_model(family, **given)
    except (AttributeError, ValueError):  # where the size of a head is computed from others
        return AutoConfig.for_model(family, **{name: value for name, value in given.items() if name != "head_dim"})


def models(family: str) -> tuple[Any, Any]:
    """The same weights: told where packed sequences begin, and stock."""
    AttentionInterface.register(ATTENTION, packed_attention)
    torch.manual_seed(0)
    attention = "eager" if family in WITHOUT_SDPA else "sdpa"
    stock = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32, attn_implementation=attention).train()
    ours = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32, attn_implementation=ATTENTION).train()
    ours.load_state_dict(stock.state_dict())
    annotate(ours, ATTENTION)
    prove(ours)
    return ours, stock


def packed_loss(model: Any, rows: list[Tensor]) -> Tensor:
    packed, token_ids = PackedSequences.from_lengths([len(row) for row in rows]), torch.cat(rows)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    hidden = predicted_hidden(model, token_ids, packed, targets)
    logprobs, _ = token_logprobs(hidden, output_head(model), token_ids[targets], entropy=False)
    return -logprobs.mean()


def padded_loss(model: Any, rows: list[Tensor]) -> Tensor:
    longest = max(map(len, rows))
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    attended = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = labels[place, : len(row)] = row
        attended[place, : len(row)] = 1
    loss: Tensor = model(input_ids=ids, attention_mask=attended, labels=labels, use_cache=False).loss
    return loss


def alone_loss(model: Any, rows: list[Tensor]) -> float:
    losses = []
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum"))
    return float(torch.stack(losses).sum()) / sum(len(row) - 1 for row in rows)


def seconds(loss: Callable[[Any, list[Tensor]], Tensor], model: Any, rows: list[Tensor]) -> float:
    model.zero_grad(set_to_none=True)
    began = time.process_time()
    loss(model, rows).backward()
    return time.process_time() - began


def measure(family: str, rows: list[Tensor], rounds: int) -> bool:
    """Whether it is exact and as fast."""
    ours, stock = models(family)
    off = abs(packed_loss(ours, rows).item() - alone_loss(stock, rows))
    times: dict[str, list[float]] = {"packed": [], "padded": []}
    for number in range(rounds + 1):
        for name, loss, model in (("packed", packed_loss, ours), ("padded", padded_loss, stock)):
            spent = seconds(loss, model, rows)
            if number:  # the first warms up
                times[name].append(spent)
    packed, padded = (statistics.median(times[name]) for name in ("packed", "padded"))
    print(
        f"{family:18} packed {packed:6.2f} s  padded {padded:6.2f} s  ratio {padded / packed:5.2f}  loss off {off:.1e}"
    )
    return off <= 1e-5 and packed <= padded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    draws = random.Random(0)
    lengths = [min(given.longest, 8 + int(draws.lognormvariate(4.5, 0.9))) for _ in range(given.sequences)]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, COMMON["vocab_size"], (length,), generator=generator) for length in lengths]
    print(f"{len(rows)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} together", flush=True)
    held = [measure(family, rows, given.rounds) for family in given.families]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
