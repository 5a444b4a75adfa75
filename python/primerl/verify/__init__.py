"""`primerl verify`: recompute the log-probability of every sampled token of a run with the weights that sampled it.

Reference: `transformers` in fp32, from the published weights alone; nothing of the engine or of the trainer's packed
attention takes part. The spool holds what was trained (token ids, the engine's log-probabilities, the version of each
token), `broadcasts/` the weights of each version (a run keeps all of them with `trainer.weights.keep_all`).

A turn whose request crossed a weight update keeps the KV cache of its earlier tokens, so the reference does too:

    tokens     p0 p1 p2 | a0 a1 a2 END      prompt, then sampled tokens
    versions             3  3  4  4         version that sampled each token
    forwarded under  3: p0 p1 p2 a0         the input before a token runs under the token's version,
                     4: a1 a2               the prompt under that of the first; earlier KV is kept

Log-probabilities are those of what was sampled from: at the recorded temperature, among the tokens that the recorded
truncation keeps of the reference's own.

Turns are independent of each other: each one's prompt, earlier turns included, is computed under its first version.
Turns are forwarded in batches of one version, versions in ascending order, so each version is loaded once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from primerl.verify.forward import forward_all
from primerl.verify.report import Report, VerifyError, and_now, ranges
from primerl.verify.turns import read_spool
from primerl.verify.weights import Weights

__all__ = ["VerifyError", "main", "verify"]


def main(output_dir: str | Path) -> int:
    """Verify a run and print the report. Returns the exit code: 0 exact, 1 not exact, 2 cannot be verified."""
    try:
        report = verify(output_dir)
    except VerifyError as error:
        print(f"primerl verify: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.passed else 1


def verify(output_dir: str | Path) -> Report:
    """Recompute every sampled token in the spool of a run.

    Raises:
        VerifyError: no spool, a damaged one, missing or damaged weights, or a model this reference cannot run.
    """
    started = time.perf_counter()
    folder = Path(output_dir)
    report = Report()
    turns = read_spool(folder, report)
    report.crossed = sum(len(turn.segments) > 1 for turn in turns)
    needed = sorted({segment.version for turn in turns for segment in turn.segments})
    report.versions = len(needed)
    missing = [version for version in needed if not (folder / "broadcasts" / f"step_{version}").is_dir()]
    if missing:
        raise VerifyError(
            f"{folder / 'broadcasts'} lacks the weights of policy versions {ranges(missing)}{and_now(folder)}"
        )
    weights = Weights(folder)
    with torch.inference_mode():
        forward_all(turns, weights, report)
    report.seconds = time.perf_counter() - started
    return report
