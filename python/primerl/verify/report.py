"""What a verification found, and what it lets pass."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MEAN_LIMIT = 1e-4
MAX_LIMIT = 1e-3


class VerifyError(Exception):
    """The run cannot be verified: something it needs is missing or damaged. The message names it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One token's two log-probabilities, in nats."""

    step: int
    rollout: int
    token: int
    """Index within the sample."""
    version: int
    engine: float
    reference: float


@dataclass(slots=True)
class Report:
    samples: int = 0
    tokens: int = 0
    crossed: int = 0
    """Turns that crossed a weight update."""
    steps: int = 0
    unchecked: int = 0
    """Trained steps whose batches are not kept any more."""
    trained: int = 0
    versions: int = 0
    truncated: int = 0
    """Tokens that were sampled with `top_p`, `top_k` or `min_p`."""
    edges: int = 0
    """Truncated tokens where rounding decided what was kept."""
    structured: int = 0
    """Tokens that were sampled by a grammar."""
    sum_difference: float = 0.0
    max_difference: float = 0.0
    worst: Difference | None = None
    seconds: float = 0.0

    @property
    def mean_difference(self) -> float:
        return self.sum_difference / self.tokens

    @property
    def passed(self) -> bool:
        return self.mean_difference <= MEAN_LIMIT and self.max_difference <= MAX_LIMIT

    def __str__(self) -> str:
        lines = [
            f"{self.samples} samples of {self.steps} steps, {self.tokens} sampled tokens, {self.versions} policy "
            f"versions, {self.crossed} turns that crossed a weight update ({self.seconds:.1f} s)",
            f"mean |difference| {self.mean_difference:.3e}  (limit {MEAN_LIMIT:.0e})",
            f"max  |difference| {self.max_difference:.3e}  (limit {MAX_LIMIT:.0e})",
        ]
        if self.truncated:
            lines.append(
                f"{self.truncated} tokens sampled with top_p, top_k or min_p, replayed; at {self.edges} of them the "
                "edge of what is kept lies within rounding, and the engine's side of it was taken"
            )
        if self.structured:
            lines.append(f"{self.structured} tokens sampled by the grammar of a structured output, replayed")
        if self.worst is not None:
            lines.append(
                f"worst: step {self.worst.step}, rollout {self.worst.rollout}, token {self.worst.token}, "
                f"version {self.worst.version}: engine {self.worst.engine:.6f}, reference {self.worst.reference:.6f}"
            )
        if self.unchecked:
            lines.append(
                f"NOT checked: {self.unchecked} of the {self.trained} steps that were trained, for their batches are "
                "not there any more; run with --keep-broadcasts to keep every batch and its weights"
            )
        lines.append("token-exact" if self.passed else "NOT token-exact")
        return "\n".join(lines)


def and_now(folder: Path) -> str:
    """What to do about batches and weights that are not there any more, if they ever were."""
    config = folder / "configs" / "rl.toml"
    try:
        keeps = tomllib.loads(config.read_text(encoding="utf-8")).get("keep_broadcasts")
    except (OSError, ValueError):
        keeps = None
    if keeps or not (config.is_file() or (folder / "spool").is_dir()):
        return "; give the output_dir of a run that has trained"
    return (
        "; they are deleted while a run trains, unless it was started with --keep-broadcasts: start one with that in "
        "another --output-dir, and verify it"
    )


def ranges(numbers: Iterable[int]) -> str:
    """`[1, 2, 3, 7]` -> `1-3, 7`: ascending numbers in one line."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)
