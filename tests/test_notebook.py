"""The example notebook, executed by a kernel: it trains, shows its curve, and an interrupt leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from end_to_end import REPOSITORY, arguments_of, find, read_lines, steps_of, until
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from primerl import notebook
from primerl.runs.registry import Registry
from primerl.runs.standing import standing

NOTEBOOK = REPOSITORY / "examples" / "notebook" / "reverse.ipynb"
SMALL = ("--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "16")


def test_a_curve_is_drawn_between_its_least_and_largest_value() -> None:
    drawn = notebook.picture("reward/<all>", [(1, 0.5), (2, 1.0), (3, 0.75)], 5)
    assert "reward/&lt;all&gt;" in drawn
    (points,) = re.findall(r'points="([^"]+)"', drawn)
    x, y = zip(*((float(a), float(b)) for a, b in (point.split(",") for point in points.split())), strict=True)
    assert list(x) == sorted(x)
    assert y[0] > y[2] > y[1]
    assert 'stroke="' in notebook.picture("flat", [(1, 0.0)], 1)


def test_outside_of_a_notebook_it_is_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    class Batch:
        def __init__(self, step: int) -> None:
            self.step, self.metrics = step, {"reward/all/mean": step / 4}

    class Run:
        max_steps = 2

        def batches(self) -> Iterator[Any]:
            yield from (Batch(1), Batch(2))

    assert [batch.step for batch in notebook.shown(Run())] == [1, 2]  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [
        "step 1 of 2  reward/all/mean 0.250",
        "step 2 of 2  reward/all/mean 0.500",
        "all steps are trained  reward/all/mean 0.500",
    ]


def with_config(given: list[str]) -> tuple[Any, int]:
    """The notebook for another run, and the place of the cell that trains."""
    read = nbformat.read(NOTEBOOK, 4)
    places = [place for place, cell in enumerate(read.cells) if cell.source.startswith("with primerl.Run")]
    (config,) = [cell for cell in read.cells if "CONFIG = [" in cell.source]
    config.source = re.sub(r"CONFIG = \[.*\]", f"CONFIG = {given!r}", config.source)
    return read, places[0]


def stands(output: Path) -> str:
    """As `primerl run list` says it of the one run in this folder."""
    with Registry(reading=True) as registry:
        (run,) = (run for run in registry.all() if run.output_dir == output)
    return standing(run).status


@pytest.mark.end_to_end
@pytest.mark.timeout(400)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_the_example_is_interrupted_and_resumes(
    imitator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    output = tmp_path / "run"

    def arguments(steps: int) -> list[str]:
        return arguments_of(imitator, output, *SMALL, "--max-steps", str(steps))[1:]

    read, training = with_config(arguments(100_000))
    client = NotebookClient(read, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})

    async def interrupt() -> None:
        while len(read_lines(output / "metrics.jsonl")) < 6:
            await asyncio.sleep(0.1)
        await client.km.interrupt_kernel()

    async def scenario() -> list[str]:
        async with client.async_setup_kernel():
            for place in range(training):
                await client.async_execute_cell(read.cells[place], place)
            interrupting = asyncio.create_task(interrupt())
            with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                await client.async_execute_cell(read.cells[training], training)
            await interrupting
            until(lambda: find(str(output / "configs" / "inference.toml")) is None, 20, "the engine to end")
            assert stands(output) == "STOPPED"
            source, trained = read.cells[training].source, len(read_lines(output / "metrics.jsonl"))
            # The same cell again, with an end in sight, which is first before what is trained.
            read.cells[training].source = source.replace("*CONFIG", f"*{arguments(trained - 1)!r}")
            with pytest.raises(CellExecutionError, match=r"max_steps is \d+, but the batches of \d+ steps are cut"):
                await client.async_execute_cell(read.cells[training], training)
            assert stands(output) == "STOPPED", "what was refused is no start"
            read.cells[training].source = source.replace("*CONFIG", f"*{arguments(trained + 4)!r}")
            cell = await client.async_execute_cell(read.cells[training], training)
            shown = [one["data"]["text/html"] for one in cell.outputs if one.output_type == "display_data"]
            assert stands(output) == "COMPLETED"
            with pytest.raises(CellExecutionError, match=r"nothing is left to do: .* has trained all \d+ steps"):
                await client.async_execute_cell(read.cells[training], training)
        steps = steps_of(output)
        assert steps == list(range(1, trained + 5))
        return shown

    shown = asyncio.run(scenario())
    assert len(shown) == 1
    assert "all steps are trained" in shown[0]
    assert "<polyline" in shown[0]
    assert find(str(output)) is None
    assert stands(output) == "COMPLETED"
    assert not os.environ.get("PRIMERL_RUN_MARK")
