"""The keys that the migration tables send users to exist, and what they accept is not lost from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from primerl.config.describe import fields, forms
from primerl.config.errors import foreign_keys

# Right of a section's tables stand keys of `primerl rl`, but for these.
FORMS = {"prime-rl: fine-tuning": "sft"}
CODE = re.compile(r"`([^`]+)`")
OURS = re.compile(r"`((?:orchestrator|trainer|inference|ckpt|store)\.\w[\w.]*)`")


@dataclass(frozen=True)
class Row:
    section: str
    theirs: str
    ours: str
    note: str

    @property
    def tree(self) -> fields.Table:
        return forms.tree(FORMS.get(self.section, "rl"))


@pytest.fixture(scope="module")
def rows(repository: Path) -> list[Row]:
    text = (repository / "docs" / "migration.md").read_text()
    found = []
    for part in text.split("\n## ")[1:]:
        section, *lines = part.splitlines()
        if section == "Commands":  # tests/test_published_commands.py
            continue
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
        found += [Row(section, *row) for row in cells if not row[1].startswith("primerl")]
    return found


def test_every_row_has_a_key_of_ours_or_says_what_instead(rows: list[Row]) -> None:
    seen: dict[str, int] = {}
    for row in rows:
        keys = CODE.findall(row.ours)
        assert keys or (row.ours == "-" and row.note), row
        for key in keys:
            assert fields.find(row.tree, key) is not None, f"{row.section}: {row.theirs}: {key}"
        # Code in a note that looks like a key of ours is one.
        for key in OURS.findall(row.note):
            assert fields.find(row.tree, key) is not None, f"{row.section}: {row.theirs}: {key}"
        seen[row.section] = seen.get(row.section, 0) + len(keys)
    assert sum(seen.values()) > 150
    assert {"prime-rl: fine-tuning", "Hosted Training"} <= seen.keys()
    assert min(seen.values()) > 10, seen


def test_every_section_of_a_run_has_its_row(rows: list[Row]) -> None:
    mapped = " ".join(row.ours for row in rows)
    for section in (
        "trainer.optim",
        "trainer.loss",
        "trainer.model.lora",
        "orchestrator.sampling",
        "orchestrator.buffer",
    ):
        known = next(table for table in forms.tree("rl").all_tables() if table.path == section)
        assert f"`{section}." in mapped or f"`{section}`" in mapped, known.path


def test_the_whole_short_form_has_its_rows(rows: list[Row]) -> None:
    """What it has of its own is in docs/hosted.md."""
    own = {"output_dir", "clean_output_dir", "fork_server", "skip_event", "dry_run", "seq_len", "seed"}
    theirs = " ".join(row.theirs for row in rows if row.section == "Hosted Training")
    named = set(re.findall(r"\w+", theirs))
    assert {knob.path.split(".")[0].removesuffix("[]") for knob in forms.tree("hosted").all_knobs()} - own <= named
    # And what is refused, each with what to write.
    assert {key.rpartition(".")[2] for key in foreign_keys.HOSTED} - {"lora_rank", "ratio"} <= named


def test_what_a_config_with_other_names_is_told_is_on_the_page(repository: Path) -> None:
    """A name by its end: the page has several of one table in a cell."""
    page = re.sub(
        r"^```.*?^```", "", (repository / "docs" / "migration.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    codes = " ".join(CODE.findall(page))
    for names in (foreign_keys.PRIME_RL, foreign_keys.PRIME_RL_SFT):
        missing = {key for key in names if not re.search(rf"\b{key.split(' = ')[0].rpartition('.')[2]}\b", codes)}
        assert not missing, missing
