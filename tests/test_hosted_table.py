"""The table of `docs/models.md`: what is measured of each hosted model is what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import hosted_table
import pytest
from engine_helpers import need_vllm
from hosted_models import HOSTED
from hosted_table import COLUMNS, Row, measure

DRY_RUN, SFT, WHOLE, ADAPTER, NAMES, ON_VLLM = COLUMNS
NUMBER = re.compile(r"\d+e-?\d+")


def row_on_the_page(repository: Path, models: tuple[str, ...]) -> tuple[str, ...]:
    (line,) = (line for line in hosted_table.lines_in(repository / "docs" / "models.md") if f" {models[0]}" in line)
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def without_numbers(cells: tuple[str, ...]) -> list[str]:
    return [NUMBER.sub("a number", cell) for cell in cells]


def test_the_page_has_each_hosted_model(repository: Path) -> None:
    lines = hosted_table.lines_in(repository / "docs" / "models.md")
    named = [name for line in lines for name in line.strip("| ").split(" | ")[0].split(", ")]
    assert sorted(named) == sorted(HOSTED)
    for line in lines:
        for largest in re.findall(r"/ (\d+e-?\d+) \|", line):
            assert float(largest) < 1e-4


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "columns"),
    [("Qwen3.5-35B-A3B", (DRY_RUN, ADAPTER)), ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", (WHOLE, NAMES))],
)
def test_two_families_are_as_the_page_says(
    name: str, columns: tuple[hosted_table.Column, ...], repository: Path, tmp_path: Path
) -> None:
    (models,) = (models for models in hosted_table.kinds() if name in models)
    row = measure(models, tmp_path, columns)
    page = row_on_the_page(repository, models)
    expected = tuple(page[1 + COLUMNS.index(column)] for column in columns)
    assert without_numbers(row.cells) == without_numbers(expected)


@pytest.mark.vllm
@pytest.mark.end_to_end
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "gpt-oss-20b"])
def test_vision_towers_states_and_experts_are_updated_on_a_live_vllm(
    name: str, repository: Path, tmp_path: Path
) -> None:
    need_vllm()
    (models,) = (models for models in hosted_table.kinds() if name in models)
    row = measure(models, tmp_path, [ON_VLLM])
    assert without_numbers(row.cells) == without_numbers((row_on_the_page(repository, models)[-1],))


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("models", hosted_table.kinds(), ids=lambda models: models[0])
def test_every_hosted_model_is_as_the_page_says(models: tuple[str, ...], repository: Path, tmp_path: Path) -> None:
    row = measure(models, tmp_path)
    assert without_numbers(row.cells) == without_numbers(row_on_the_page(repository, models)[1:])


def test_what_fails_has_its_reason_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path, model: Path) -> str:
        raise hosted_table.FailedError(f"{folder}/model is too large")

    monkeypatch.setattr(hosted_table, "write_hub_folder", lambda folder, name: folder)
    row = measure(("a", "b"), tmp_path, [hosted_table.Column("c", fails)])
    assert row == Row(("a", "b"), ("no: /model is too large",))
    assert not row.is_whole
    assert row.line == "| a, b | no: /model is too large |"
