"""Statistics of a step's tokens, as sums and histograms of fixed bins, so that micro-batches and ranks add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primerl.train.data.batch import Batch
from primerl.train.distributed.ranks import Ranks
from primerl.train.objective.components import COMPONENTS, TokenValues

HISTOGRAM_RANGES = {"entropy": (0.0, 12.0, 48), "log_ratio": (-1.0, 1.0, 50)}
"""First edge, last edge, number of bins. Values beyond an edge count in the nearest bin. Nats."""


class Histograms:
    """Counts of tokens, `[bins]` int64 each."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.counts = {
            name: torch.zeros(bins, dtype=torch.int64, device=device) for name, (_, _, bins) in HISTOGRAM_RANGES.items()
        }

    @torch.no_grad()
    def add(self, values: TokenValues) -> None:
        for name, (low, high, bins) in HISTOGRAM_RANGES.items():
            column = values.columns[name][values.sampled].float()
            place = ((column - low) * (bins / (high - low))).floor().clamp(0, bins - 1)
            # NaN has no bin; it ends the run anyway.
            self.counts[name] += torch.bincount(place[place.isfinite()].long(), minlength=bins)

    def over(self, ranks: Ranks) -> Histograms:
        """Summed over all data ranks."""
        whole = Histograms()
        whole.counts = {name: ranks.sum(counts) for name, counts in self.counts.items()}
        return whole

    def line(self) -> dict[str, Any]:
        """`{name: {"edges": [bins + 1], "counts": [bins]}}`, without names that no token was measured for."""
        found = {}
        for name, (low, high, bins) in HISTOGRAM_RANGES.items():
            counts = self.counts[name].tolist()
            if sum(counts):
                edges = [low + (high - low) * edge / bins for edge in range(bins + 1)]
                found[name] = {"edges": edges, "counts": counts}
        return found


COLUMNS = (
    "tokens",
    "mismatch_kl",
    "mismatch_kl_squared",
    "abs_log_ratio",
    "entropy",
    "positive",
    "negative",
    "masked",
    "masked_positive",
    "masked_negative",
    "ref_kl",
    "ref_kl_tokens",
)
MOST_STALE = 16
"""Staler tokens count as having this staleness."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of the tables below: all tokens, those of each environment, those of each staleness."""

    environments: int
    staleness: int
    """Highest staleness."""

    @classmethod
    def of(cls, batch: Batch, ranks: Ranks) -> Groups:
        """The same on all ranks, which all have to call it."""
        environments = max((max(m.environments) + 1 for m in batch.micro_batches if m.environments), default=0)
        stale = max(batch.staleness(), default=0)
        most = torch.tensor([environments, min(stale, MOST_STALE)], device=ranks.device)
        environments, stale = ranks.largest(most).tolist()
        return cls(environments, stale)

    @property
    def count(self) -> int:
        return 1 + self.environments + self.staleness + 1

    def environment_names(self, given: Sequence[str]) -> list[str]:
        """Names of the environments; one without a name gets its number."""
        return [
            given[number] if number < len(given) else f"environment_{number}" for number in range(self.environments)
        ]

    def names(self, environment_names: Sequence[str]) -> list[str]:
        own = self.environment_names(environment_names)
        return ["all", *own, *(f"staleness_{n}" for n in range(self.staleness + 1))]


class Statistics:
    """Tables of sums and of largest values, in fp64."""

    def __init__(self, groups: Groups, device: torch.device | str = "cpu") -> None:
        self.groups = groups
        # Sums of millions of tokens need fp64, which every device of torch but MPS has.
        self.sums = torch.zeros(groups.count, len(COLUMNS), dtype=torch.float64, device=device)
        self.largest = torch.zeros(groups.count, dtype=torch.float64, device=device)  # of mismatch_kl, at least 0
        self.losses = torch.zeros(1 + len(COMPONENTS), dtype=torch.float64, device=device)
        self.extra: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, values: TokenValues, environments: Tensor) -> None:
        """`environments`: [M] int64, index of each token's environment."""
        for index, name in enumerate(("loss", *(f"loss/{component}" for component in COMPONENTS))):
            if name in values.columns:
                self.losses[index] += values.columns[name].double().sum()
        columns = {name: column[values.sampled] for name, column in values.columns.items()}
        columns["tokens"] = torch.ones_like(columns["mismatch_kl"])
        columns["mismatch_kl_squared"] = columns["mismatch_kl"].double().square()
        # Columns that no component measured are 0 for all tokens.
        none = torch.zeros_like(columns["mismatch_kl"])
        rows = torch.stack([columns.get(name, none).double() for name in COLUMNS], dim=1)
        stale = columns["staleness"].clamp(0, self.groups.staleness)
        kl = columns["mismatch_kl"].double()
        for ids in (
            torch.zeros_like(stale),
            1 + environments[values.sampled],
            1 + self.groups.environments + stale,
        ):
            self.sums.index_add_(0, ids, rows)
            self.largest.scatter_reduce_(0, ids, kl, "amax")
        for name, column in columns.items():
            if name.startswith("metric/"):
                own = self.extra.setdefault(name.removeprefix("metric/"), column.new_zeros((), dtype=torch.float64))
                own += column.sum()

    def over(self, ranks: Ranks) -> Statistics:
        """Summed over all data ranks, whose groups have to be the same."""
        whole = Statistics(self.groups, self.sums.device)
        whole.sums, whole.losses = ranks.sum(self.sums), ranks.sum(self.losses)
        whole.largest = ranks.largest(self.largest)
        # A rank with empty micro-batches has none of these.
        for name in ranks.union(self.extra):
            whole.extra[name] = ranks.sum(self.extra.get(name, self.losses.new_zeros(())))
        return whole

    def metrics(self, environment_names: Sequence[str] = ()) -> dict[str, float]:
        """Metrics under their published names."""
        total, *components = self.losses.tolist()
        found = {"loss/mean": total}
        found |= {f"loss/{name}/mean": value for name, value in zip(COMPONENTS, components, strict=True) if value}
        for name, row, largest in zip(
            self.groups.names(environment_names), self.sums.tolist(), self.largest.tolist(), strict=True
        ):
            sums = dict(zip(COLUMNS, row, strict=True))
            if sums["tokens"] or name == "all":
                found |= _means(name, sums, largest)
        tokens = max(float(self.sums[0, 0]), 1.0)
        found |= {f"{name}/all/mean": float(value) / tokens for name, value in self.extra.items()}
        return found


class Trained:
    """Samples and tokens that were trained since the run began, over all ranks, and those of each environment."""

    def __init__(self, samples: int = 0, tokens: int = 0, environments: dict[str, list[int]] | None = None) -> None:
        """`environments`: by name, its samples and tokens; those of all may be fewer than `samples` and `tokens` where
        a checkpoint of an earlier version did not tell them apart."""
        self.samples, self.tokens = samples, tokens
        self.environments = {name: list(counts) for name, counts in (environments or {}).items()}

    def add(self, names: Sequence[str], counts: Sequence[Sequence[int]]) -> int:
        """`counts`: samples and tokens of a step, for each of `names`. Returns the step's tokens."""
        for name, (samples, tokens) in zip(names, counts, strict=True):
            if samples:
                own = self.environments.setdefault(name, [0, 0])
                own[0] += samples
                own[1] += tokens
        self.samples += sum(samples for samples, _ in counts)
        tokens = sum(tokens for _, tokens in counts)
        self.tokens += tokens
        return tokens

    def metrics(self) -> dict[str, float]:
        """`progress/{num_samples,num_tokens}`, and of each environment that was trained
        `progress/<name>/ratio_{samples,tokens}`."""
        found: dict[str, float] = {"progress/num_samples": self.samples, "progress/num_tokens": self.tokens}
        samples = sum(own for own, _ in self.environments.values())
        tokens = sum(own for _, own in self.environments.values())
        for name, (own_samples, own_tokens) in self.environments.items():
            found[f"progress/{name}/ratio_samples"] = own_samples / samples
            found[f"progress/{name}/ratio_tokens"] = own_tokens / tokens
        return found


def counted(batch: Batch, environments: int) -> Tensor:
    """[environments, 2] int64: samples and tokens of the batch by environment."""
    own = [environment for micro_batch in batch.micro_batches for environment in micro_batch.environments]
    each = [(1, length) for micro_batch in batch.micro_batches for length in micro_batch.sequence_lengths]
    counts = torch.zeros(environments, 2, dtype=torch.int64)
    return counts.index_add_(0, torch.tensor(own, dtype=torch.int64), torch.tensor(each, dtype=torch.int64).view(-1, 2))


def _means(name: str, sums: dict[str, float], largest: float) -> dict[str, float]:
    tokens, masked = max(sums["tokens"], 1.0), max(sums["masked"], 1.0)
    mean = sums["mismatch_kl"] / tokens
    variance = sums["mismatch_kl_squared"] / tokens - mean * mean
    # For all tokens, the published names of masked shares have no group in them.
    group = "" if name == "all" else f"{name}/"
    found = {
        f"mismatch_kl/{name}/mean": mean,
        f"mismatch_kl/{name}/std": math.sqrt(variance) if variance > 0 else (0.0 if variance <= 0 else math.nan),
        f"mismatch_kl/{name}/max": largest,
        f"mismatch_abs_log_ratio/{name}/mean": sums["abs_log_ratio"] / tokens,
        f"entropy/{name}/mean": sums["entropy"] / tokens,
        f"masked/{name}/mean": sums["masked"] / tokens,
    }
    for sign in ("positive", "negative"):
        # The share of masked tokens with this sign of advantage; the masked share of tokens with this sign.
        found[f"masked_advantage_{sign}/{group}mean"] = sums[f"masked_{sign}"] / masked
        found[f"masked_share/{sign}/{group}mean"] = sums[f"masked_{sign}"] / max(sums[sign], 1.0)
    if sums["ref_kl_tokens"]:
        found[f"ref_kl/{name}/mean"] = sums["ref_kl"] / sums["ref_kl_tokens"]
    return found
