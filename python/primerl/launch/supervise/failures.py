"""How a launch fails: exit codes, and errors that name the process and the end of its log."""

from __future__ import annotations

from collections.abc import Sequence

from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.report.logs import describe_end, last_error, own_tail
from primerl.process import redaction
from primerl.process.problems import ProblemError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class RunFailedError(Exception):
    """The run cannot continue: the message names the part that failed and why, without the user's secrets."""

    __module__ = "primerl"

    def __init__(self, message: str) -> None:
        # The ends of logs, which it quotes, may hold them.
        super().__init__(redaction.redact(message))


class RefusedError(RunFailedError, ProblemError):
    """The orchestrator cannot use its input, such as a changed setting: the message is its own."""

    def __init__(self, message: str, *keys: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        found = ProblemError(message, *keys, problems=problems).problems
        self.problems = tuple(problem.worded(redaction.redact(problem)) for problem in found)


def failure_of(process: Process, remark: str = "") -> RunFailedError:
    """`remark`: the end of its first line, before the end of the log."""
    if process.name == "orchestrator" and process.code == BAD_INPUT:
        error = last_error(own_tail(process))
        if error is None:
            return RefusedError(describe_end(process, remark))
        # Its last words say all: no end of the log.
        return RefusedError(f"the orchestrator refuses the run: {error}")
    return RunFailedError(describe_end(process, remark))


def check_placement(placement: Placement) -> None:
    """Raises RunFailedError once the placement has failed."""
    if placement.lost is not None:
        raise RunFailedError(placement.lost)
