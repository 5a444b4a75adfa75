"""From when to when, and in which process, a run can be used by the script that has it."""

from __future__ import annotations

import os


class Lifetime:
    """One use, which begins and ends once."""

    def __init__(self, before: str, after: str) -> None:
        """What to say to a script that uses the run before it begins, or after it has ended."""
        self._before, self._after = before, after
        self._process: int | None = None
        self._is_over = False

    def check_new(self) -> None:
        """Raises RuntimeError: it has begun before."""
        if self._process is not None:
            raise RuntimeError(self._after)

    def begin(self) -> None:
        self._process = os.getpid()

    def end(self) -> None:
        self._is_over = True

    @property
    def is_here(self) -> bool:
        """Whether this process can use the run. One that was forked from it, as by a DataLoader, only has a copy of the
        object: what it ends would be its parent's."""
        return self._process == os.getpid() and not self._is_over

    def check(self) -> None:
        """Raises RuntimeError: the run cannot be used, and why."""
        if self._process is None:
            raise RuntimeError(self._before)
        if self._process != os.getpid():
            raise RuntimeError(
                f"the run belongs to process {self._process}, from which this one was forked: use it there only"
            )
        if self._is_over:
            raise RuntimeError(self._after)
