"""Forward and backward pass of a mixture's experts on a CPU, against those of `transformers`: its grouped products (its
default) and its plain loop; one thread, fp32, CPU time of the thread, the best of several rounds that take turns.

    python benches/experts.py                        # about a minute
    python benches/experts.py --rounds 9 --loop      # with transformers' loop, which takes minutes where all is trained

Shapes are those of a layer: tokens, hidden size, an expert's size, experts, experts a token is sent to. `frozen`: only
what comes in has a gradient, as under an adapter. Before anything is timed, answers and gradients are compared. Exits 1
where they differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from primerl.train.model import experts
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

SHAPES = [(512, 256, 128, 64, 4), (2048, 256, 128, 32, 4), (256, 512, 256, 128, 8), (64, 256, 128, 128, 2)]
TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    experts.register()
    kinds = [experts.EXPERTS, "grouped_mm", *(["eager"] if given.loop else [])]
    wrong = False
    print(f"{'tokens hidden size experts chosen':34} {'':8} {'ours ms':>9}", *(f"{kind:>12}" for kind in kinds[1:]))
    for shape in SHAPES:
        for frozen in (False, True):
            layers = {kind: layer(kind, shape, frozen=frozen) for kind in kinds}
            found = {kind: [run(one, shape) for _ in range(given.rounds)] for kind, one in layers.items()}
            best = {kind: min(seconds for seconds, _ in rounds) for kind, rounds in found.items()}
            expected = found["grouped_mm"][0][1]
            wrong |= any(differs(rounds[0][1], expected) for rounds in found.values())
            ratios = (f"{best[experts.EXPERTS] / best[kind]:11.2f}x" for kind in kinds[1:])
            what = "frozen" if frozen else "trained"
            print(f"{shape!s:34} {what:8} {1e3 * best[experts.EXPERTS]:9.1f}", *ratios, flush=True)
    print("DIFFERENT" if wrong else "ours / theirs; answers and gradients are the same")
    return int(wrong)


def layer(kind: str, shape: tuple[int, ...], *, frozen: bool) -> Any:
    _, hidden, size, count, chosen = shape
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=size, num_experts=count, num_experts_per_tok=chosen
    )
    config._experts_implementation = kind
    made = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02, generator=generator)
    return made.requires_grad_(not frozen)


def run(made: Any, shape: tuple[int, ...]) -> tuple[float, list[Tensor]]:
    """Seconds of CPU, and the answer with all gradients."""
    tokens, hidden, _, count, chosen = shape
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    scores = torch.randn(tokens, count, generator=generator) + torch.linspace(0, 2, count)
    weights, places = scores.softmax(-1).topk(chosen)
    made.zero_grad()
    start = time.thread_time()
    answer = made(rows, places, weights)
    answer.square().sum().backward()
    seconds = time.thread_time() - start
    return seconds, [answer.detach(), *(one.grad for one in (rows, *made.parameters()) if one.grad is not None)]


def differs(found: list[Tensor], expected: list[Tensor]) -> bool:
    return any((one - other).norm() > TOLERANCE * other.norm() for one, other in zip(found, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main())
