"""The guard's dealings with fork servers: processes that they are asked for, and make. Standard library only."""

from __future__ import annotations

import math
import os
import selectors
import time
from collections.abc import Callable, Sequence

from primerl.forking.request import Forked
from primerl.launch.supervise.trees import Tree


class Asked:
    """A process that is to be started: by a fork server, or by the guard itself."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        output: int,
        writer: int | None,
        tree: Tree,
    ) -> None:
        """`writer`: the process that writes the log, where `output` is a pipe to it; `tree`: what it will be in."""
        self.name = name
        self.tree = tree
        self.command = command
        self.environment = environment
        self.output = output
        self.writer = writer
        self.server = ""

    def close(self, writers: dict[int, int], pid: int) -> None:
        """The process has its log, or never will."""
        os.close(self.output)
        if self.writer is not None:
            writers[self.writer] = pid


class Forks:
    """Each is asked for, then begins, or is started the plain way; and ends."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        begun: Callable[[Asked, int], None],
        start_plain: Callable[[Asked], None],
        ended: Callable[[int, int, float], None],
    ) -> None:
        """`selector`: gets their descriptors, with the fork as data, for `look`. `begun` is called with the process id,
        `ended` with process id, code and CPU seconds."""
        self._selector = selector
        self._begun = begun
        self._start_plain = start_plain
        self._ended = ended
        self._asked: dict[Forked, Asked] = {}  # no answer yet
        self._registered: dict[Forked, list[int]] = {}  # of each, its descriptors in the selector
        self._hung: set[str] = set()  # servers that did not answer in time, which are asked no more

    def ask(self, server: str, asked: Asked) -> bool:
        """False where no server takes the request."""
        if server in self._hung:
            return False
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            files = (nothing, asked.output, asked.output)
            forked = Forked(server, asked.command, asked.environment, files, begins=asked.tree.take)
        except OSError:
            return False
        finally:
            os.close(nothing)
        asked.server = server
        self._asked[forked] = asked
        self._register(forked, forked.sources())
        return True

    def due(self) -> float:
        """When `look_at_overdue` is to be called at the latest."""
        return min((forked.until for forked in self._registered), default=math.inf)

    def look(self, forked: Forked) -> None:
        """Something can be read of it. Does nothing for one that was withdrawn, or has ended, just before."""
        if forked not in self._registered:
            return
        forked.look()
        asked = self._asked.get(forked)
        if asked is not None and forked.refusal is not None:
            del self._asked[forked]
            if forked.timed_out:
                self._hung.add(asked.server)
            self._leave(forked)
            self._start_plain(asked)
            return
        if asked is not None and forked.pid is not None:
            del self._asked[forked]
            self._begun(asked, forked.pid)
        if forked.pid is not None and forked.code is not None:
            self._leave(forked)
            self._ended(forked.pid, forked.code, forked.cpu_s)
        else:
            self._register(forked, forked.sources())

    def look_at_overdue(self) -> None:
        now = time.monotonic()
        for forked in [forked for forked in self._registered if now >= forked.until]:
            self.look(forked)

    def withdraw(self, names: Sequence[str]) -> list[Asked]:
        """Those of these names (all where there are none) that have not begun, and will not."""
        withdrawn = {forked: asked for forked, asked in self._asked.items() if not names or asked.name in names}
        for forked in withdrawn:
            del self._asked[forked]
            self._leave(forked)
        return list(withdrawn.values())

    def _register(self, forked: Forked, sources: list[int]) -> None:
        registered = self._registered.get(forked, [])
        for source in set(registered) - set(sources):
            self._selector.unregister(source)
        for source in set(sources) - set(registered):
            self._selector.register(source, selectors.EVENT_READ, forked)
        self._registered[forked] = sources

    def _leave(self, forked: Forked) -> None:
        self._register(forked, [])
        del self._registered[forked]
        forked.close()
