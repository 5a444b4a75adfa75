"""Counts and names rows that cannot be used; too many of them stop the run before training."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from primerl.train.checkpoint.files import write_text
from primerl.train.data.sources import DataError

EXAMPLES = 3
"""Example rows for each reason in the table."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """`index` as in `sources.Found`."""

    index: int
    kind: str
    reason: str


@dataclass(slots=True)
class Dataset:
    """Bad rows of one dataset."""

    title: str
    unit: str
    rows: int = 0
    truncated: int = 0
    unwritten_reasoning: int = 0
    """Rows with answers whose reasoning the template drops."""
    answers_without_it: int = 0
    with_control_tokens: list[int] = field(default_factory=list)
    """Rows whose messages hold control tokens of the model in their text."""
    control_tokens: Counter[str] = field(default_factory=Counter)
    """Number of rows by control token."""
    bad: list[BadRow] = field(default_factory=list)

    @property
    def share(self) -> float:
        return len(self.bad) / self.rows if self.rows else 0.0


class BadRows:
    """Bad rows of all datasets, in their order."""

    def __init__(self, max_share: float, key: str) -> None:
        self._max_share = max_share
        self._key = key
        self.datasets: list[Dataset] = []

    @property
    def titles(self) -> list[str]:
        return [dataset.title for dataset in self.datasets]

    def begin(self, title: str, unit: str) -> None:
        self.datasets.append(Dataset(title, unit))

    def count(self) -> None:
        self.datasets[-1].rows += 1

    def truncated(self) -> None:
        self.datasets[-1].truncated += 1

    def reasoning_left_out(self, answers: int) -> None:
        self.datasets[-1].unwritten_reasoning += 1
        self.datasets[-1].answers_without_it += answers

    def control_tokens(self, index: int, found: tuple[str, ...]) -> None:
        self.datasets[-1].with_control_tokens.append(index)
        self.datasets[-1].control_tokens.update(found)

    def add(self, row: BadRow) -> None:
        self.count()
        self.datasets[-1].bad.append(row)

    def check(self) -> None:
        """Raises DataError, with a table of reasons, if a dataset has more than the allowed share."""
        over = [dataset for dataset in self.datasets if dataset.share > self._max_share]
        if over:
            names = ", ".join(f"{dataset.title} ({dataset.share:.2%})" for dataset in over)
            raise DataError(
                f"{self._key}max_bad_share is {self._max_share:.2%}, and more rows cannot be used of {names}; fix "
                f"them or raise it\n{self.table()}",
                f"{self._key}max_bad_share",
            )

    def refuse(self, kind: str, because: str, key: str) -> None:
        """Raises DataError, about the key, if there is a row of this kind."""
        if any(row.kind == kind for dataset in self.datasets for row in dataset.bad):
            raise DataError(f"{because}, and there are such rows\n{self.table()}", key)

    def table(self) -> str:
        """A line for each dataset and kind, then the first rows of it by name."""
        lines = [f"{'dataset':<24} {'cannot be used':<32} {'rows':>9} {'share':>8}"]
        for dataset in self.datasets:
            for kind, count in Counter(row.kind for row in dataset.bad).most_common():
                share = count / dataset.rows
                lines.append(f"{dataset.title[:24]:<24} {kind:<32} {count:>9,} {share:>8.2%}")
                named = [row for row in dataset.bad if row.kind == kind][:EXAMPLES]
                lines += [f"    {dataset.title}, {dataset.unit} {row.index}: {row.reason}" for row in named]
        return "\n".join(lines)

    def summary(self, named_in: Path) -> list[str]:
        """One line for each dataset that lost rows. `named_in`: the file that names them."""
        lines = []
        for dataset in self.datasets:
            if dataset.bad:
                lines.append(
                    f"{dataset.title}: {len(dataset.bad):,} of {dataset.rows:,} rows cannot be used; see {named_in}"
                )
            if dataset.truncated:
                lines.append(f"{dataset.title}: {dataset.truncated:,} of {dataset.rows:,} rows are cut to seq_len")
            if dataset.unwritten_reasoning:
                rows = f"{dataset.unwritten_reasoning:,} of {dataset.rows:,} rows"
                lines.append(
                    f"{dataset.title}: in {rows} the chat template drops the reasoning of answers "
                    f"({dataset.answers_without_it:,} of them), which are trained without it"
                )
            if dataset.with_control_tokens:
                lines.append(_control_tokens(dataset))
        return lines

    def write(self, path: Path) -> None:
        """Write each bad row as a JSON object a line; no file if there are none."""
        path.unlink(missing_ok=True)
        lines = [
            json.dumps({"dataset": dataset.title, dataset.unit: row.index, "kind": row.kind, "reason": row.reason})
            for dataset in self.datasets
            for row in dataset.bad
        ]
        if lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join(lines) + "\n")


def _control_tokens(dataset: Dataset) -> str:
    found = dataset.with_control_tokens
    tokens = ", ".join(token for token, _ in dataset.control_tokens.most_common(EXAMPLES))
    named = ", ".join(str(index) for index in found[:EXAMPLES])
    more = ", .." if len(found) > EXAMPLES else ""
    return (
        f"{dataset.title}: in {len(found):,} of {dataset.rows:,} rows the text of messages holds control tokens of the "
        f"model ({tokens}), which are encoded as such and not as text ({dataset.unit} {named}{more}); take them out "
        'where they are no syntax of the conversation, or set data.control_tokens to "neutralize"'
    )
