"""The keys that the migration table sends users to exist, and what they accept is not lost from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from primerl.config import fields, forms


@pytest.fixture(scope="module")
def rows(repository: Path) -> list[list[str]]:
    text = (repository / "docs" / "migration.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_has_a_key_of_ours_or_says_what_instead(rows: list[list[str]]) -> None:
    root = forms.tree("rl")
    seen = 0
    for theirs, ours, note in rows:
        if ours == "primerl":
            continue
        keys = re.findall(r"`([^`]+)`", ours)
        assert keys or ours == "-", theirs
        for key in keys:
            assert fields.find(root, key) is not None, f"{theirs}: {key}"
            seen += 1
        # Code in a note that looks like a key of ours is one.
        for key in re.findall(r"`((?:orchestrator|trainer|inference|ckpt)\.\w[\w.]*)`", note):
            assert fields.find(root, key) is not None, f"{theirs}: {key}"
    assert seen > 80


def test_every_section_of_a_run_has_its_row(rows: list[list[str]]) -> None:
    mapped = " ".join(ours for _, ours, _ in rows)
    for section in (
        "trainer.optim",
        "trainer.loss",
        "trainer.model.lora",
        "orchestrator.sampling",
        "orchestrator.buffer",
    ):
        known = next(table for table in forms.tree("rl").all_tables() if table.path == section)
        assert f"`{section}." in mapped or f"`{section}`" in mapped, known.path
