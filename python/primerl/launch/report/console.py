"""What a person sees during a run: one live line with a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from primerl.launch.report import status as status_module
from primerl.process.redaction import redact
from primerl.train.loop.progress import Remaining, duration

PLAIN_EVERY_S = 10.0
LONG_WAIT_S = 2.0
BAR_WIDTH = 20
FEW_FAILED = 0.05


def bar(share: float) -> str:
    """`[==========          ]  50 %`, which every terminal's encoding has."""
    full = int(BAR_WIDTH * min(max(share, 0.0), 1.0))
    return f"[{'=' * full:<{BAR_WIDTH}}] {100 * share:3.0f} %"


def line(status: dict[str, Any], *, now: bool = True, left_s: float | None = None, live: bool = False) -> str:
    """`step 12/60  reward 0.531  failed 58 % (environment)  3,412 tokens/s  in flight 64  staleness 1.2  eta 3:07
    trainer waits for ...`; only step and reward where nothing runs now. `left_s`: how long the rest will take;
    `live`: with a bar."""
    run, rollouts, step = status.get("run", {}), status.get("rollouts", {}), status.get("last_step") or {}
    parts = [f"step {run.get('step', 0)}/{run.get('max_steps', '?')}"]
    eta = [] if left_s is None else [f"eta {duration(left_s)}"]
    if live and run.get("max_steps"):
        # What is cut off where a terminal is narrow is the end.
        parts += [bar(run.get("step", 0) / run["max_steps"]), *eta]
        eta = []
    if step.get("reward/all/mean") is not None:
        parts.append(f"reward {step['reward/all/mean']:.3f}")
    failed = failures(step)
    if failed is not None:
        parts.append(failed)
    if not now:
        return "  ".join(parts)
    parts.append(f"{float(status.get('tokens', {}).get('per_second') or 0.0):,.0f} tokens/s")
    parts.append(f"in flight {rollouts.get('in_flight', 0)}")
    if "staleness/mean" in step:
        parts.append(f"staleness {step['staleness/mean']:.1f}")
    parts += eta
    # Short waits are how a pipeline works; a long one is what holds the run up.
    wait = status_module.longest_wait(status, LONG_WAIT_S)
    if wait is not None:
        parts.append(wait)
    return "  ".join(parts)


def failures(step: dict[str, Any]) -> str | None:
    """`failed 58 % (environment)`: of the rollouts that ended since the step before, where they are more than a few."""
    # Keys over all environments; those of one have its name in between.
    keys = [key for key in step if key.startswith("errors/") and key.count("/") == 1]
    shares = {key.removeprefix("errors/"): float(step[key] or 0.0) for key in keys}
    share = sum(shares.values())
    if share < FEW_FAILED:
        return None
    return f"failed {100 * share:.0f} % ({max(shares, key=lambda kind: shares[kind])})"


class Console:
    """Reports in one place, so that the live line and messages do not overwrite each other."""

    def __init__(self, output: TextIO | None = None) -> None:
        self.output = output or sys.stdout
        self.live = self.output.isatty()
        self._line = ""
        self._step: Any = None
        self._printed_at = -PLAIN_EVERY_S
        self._remaining = Remaining()

    def say(self, message: str) -> None:
        """A message that stays."""
        self._clear()
        print(redact(message), file=self.output, flush=True)

    def update(self, status: dict[str, Any]) -> None:
        run = status.get("run", {})
        step, last = run.get("step"), run.get("max_steps")
        left_s = self._remaining.seconds(step, last) if step is not None and last else None
        text = redact(line(status, left_s=left_s, live=self.live))
        if self.live:
            self._clear()
            width = terminal_width()
            self._line = text if len(text) < width else text[: width - 2] + "…"
            print(self._line, end="", file=self.output, flush=True)
        elif step != self._step or time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            print(text, file=self.output, flush=True)
        self._step = step

    def end(self, metrics: dict[str, Any], max_steps: int) -> None:
        """The last step, which the trainer may have done after the last look at the status."""
        step = metrics.get("step")
        if self.live or step != self._step:
            self.say(line({"run": {"step": step, "max_steps": max_steps}, "last_step": metrics}, now=False))
        self._step = step

    def _clear(self) -> None:
        if self._line:
            print("\r\x1b[2K", end="", file=self.output)
            self._line = ""


def terminal_width() -> int:
    import shutil

    return max(40, shutil.get_terminal_size().columns)
