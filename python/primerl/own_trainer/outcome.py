"""How a training script has ended its run: what an exception that leaves the run's block means."""

from __future__ import annotations

from primerl.launch.supervise.failures import FAILED, INTERRUPTED


def is_orderly(error: BaseException | None) -> bool:
    """Whether the block was left as by its end or by `break`; so does `sys.exit()`."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def outcome(error: BaseException | None, failure: str | None, unfinished_step: int | None) -> tuple[int, str]:
    """Exit code and reason, as `run/summary.json` has them.

    Args:
        error: what left the block.
        failure: of a process of the run.
        unfinished_step: the first that was not trained; None if all were.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if failure is not None:
        return FAILED, failure
    if not is_orderly(error):
        return FAILED, _told(error)
    if unfinished_step is not None:
        return INTERRUPTED, f"the training script left before step {unfinished_step} was trained"
    return 0, "finished"


def _told(error: BaseException | None) -> str:
    if isinstance(error, SystemExit):
        # sys.exit("why") prints it, and the code is 1.
        code = f"with code {error.code}" if isinstance(error.code, int) else f"with code 1: {error.code}"
        return f"the training script has exited {code}"
    return f"the training script: {type(error).__name__}: {error}"
