"""What a run looks like in a notebook: one cell's output, which is updated after each step.

    from primerl import notebook

    with primerl.Run("rl.toml") as run:
        for batch in notebook.shown(run):
            ...

Outside of a notebook, a line of text a step.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primerl.api import Batch
    from primerl.own_trainer.loop import TrainingLoop

REWARD = "reward/all/mean"
WIDTH, HEIGHT, MARGIN = 480, 160, 28


def shown(run: TrainingLoop, metrics: Sequence[str] = (REWARD,)) -> Iterator[Batch]:
    """The run's batches; meanwhile the cell shows the step, and a curve of each of these metrics of the batch."""
    output = _Output(run.max_steps, metrics)
    for batch in run.batches():
        output.add(batch.step, batch.metrics)
        yield batch
    output.end()


class _Output:
    def __init__(self, max_steps: int, metrics: Sequence[str]) -> None:
        self._max_steps = max_steps
        self._points: dict[str, list[tuple[int, float]]] = {name: [] for name in metrics}
        self._handle: Any = None
        self._display = _display()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        for name, points in self._points.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                points.append((step, value))
        self._show(f"step {step} of {self._max_steps}")

    def end(self) -> None:
        self._show("all steps are trained")

    def _show(self, state: str) -> None:
        last = {name: points[-1][1] for name, points in self._points.items() if points}
        text = "  ".join([state, *(f"{name} {value:.3f}" for name, value in last.items())])
        if self._display is None:
            print(text, flush=True)
            return
        bundle = {"text/plain": text, "text/html": page(text, self._points, self._max_steps)}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _display() -> Any:
    """IPython's, if this is a notebook's kernel."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    shell = get_ipython()
    return display if shell is not None and getattr(shell, "kernel", None) is not None else None


def page(text: str, curves: dict[str, list[tuple[int, float]]], max_steps: int) -> str:
    """The text, and a picture of each curve, in colours that both schemes of a notebook show."""
    pictures = "".join(picture(name, points, max_steps) for name, points in curves.items() if points)
    return f'<div style="font-family: monospace">{html.escape(text)}<br>{pictures}</div>'


def picture(name: str, points: Sequence[tuple[int, float]], max_steps: int) -> str:
    """An SVG of the points (step, value), with the least and the largest value at its edge."""
    values = [value for _, value in points]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN

    def place(step: int, value: float) -> str:
        x = MARGIN * 2 + (right - MARGIN * 2) * (step - 1) / max(1, max_steps - 1)
        return f"{x:.1f},{bottom - (bottom - MARGIN) * (value - low) / span:.1f}"

    line = " ".join(place(step, value) for step, value in points)
    words = 'font-size="11" fill="currentColor"'
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(name)} by step">'
        f'<text x="{MARGIN * 2}" y="16" {words}>{html.escape(name)}</text>'
        f'<text x="2" y="{MARGIN + 4}" {words}>{high:.3g}</text><text x="2" y="{bottom}" {words}>{low:.3g}</text>'
        f'<text x="{right - 40}" y="{HEIGHT - 8}" {words}>step {max_steps}</text>'
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/></svg>'
    )
