"""Memory of log-probabilities and their gradients, in chunks, against the logits they are computed from.

    python benches/logprob_memory.py [--tokens 16384] [--vocabulary 152000] [--hidden 64] [--device cpu|cuda]

Prints the most memory that forward and backward hold beyond their inputs, by the allocator of a GPU, or, on a CPU, by
the process's resident set, which a thread reads every millisecond. The goal is an eighth of the logits in fp32; the
whole is not computed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time

import torch
from primerl.train.objective.logprobs import OutputHead, token_logprobs


class ResidentSet:
    """Largest resident set of this process within the block, in bytes."""

    def __enter__(self) -> ResidentSet:
        self.before = self.largest = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.largest = max(self.largest, self._now())

    @staticmethod
    def _now() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def once(hidden: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, chunk_tokens: int | None) -> None:
    logprobs, entropy = token_logprobs(hidden, OutputHead(weight), token_ids, chunk_tokens=chunk_tokens)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk-tokens", type=int, help="instead of the library's own choice")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(given.tokens, given.hidden, device=given.device).to(dtype).requires_grad_()
    weight = torch.randn(given.vocabulary, given.hidden, device=given.device).to(dtype).requires_grad_()
    token_ids = torch.randint(0, given.vocabulary, (given.tokens,), device=given.device)
    once(hidden[:2], weight, token_ids[:2], None)  # threads and their buffers
    hidden.grad = weight.grad = None
    gc.collect()
    start = time.perf_counter()
    if given.device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once(hidden, weight, token_ids, given.chunk_tokens)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with ResidentSet() as resident:
            once(hidden, weight, token_ids, given.chunk_tokens)
        peak = resident.largest - resident.before
    seconds = time.perf_counter() - start
    logits = 4 * given.tokens * given.vocabulary
    shape = f"{given.tokens} tokens x {given.vocabulary} vocabulary, hidden {given.hidden}"
    print(f"{shape}, {given.dtype}, {given.device}")
    print(
        f"peak {peak / 2**20:.0f} MiB, logits {logits / 2**20:.0f} MiB, ratio 1/{logits / peak:.1f} "
        f"({peak / logits:.4f}), {seconds:.1f} s"
    )
    return 0 if peak * 8 <= logits else 1


if __name__ == "__main__":
    sys.exit(main())
