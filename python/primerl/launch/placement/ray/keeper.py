"""What an agent on a Ray node starts: it keeps one process of the run there under a guard, as on one machine.

Run as `python -I -S keeper.py` with pipes of the agent (`agent.py`) as input and output; the messages are those of an
agent on Slurm (`placement/slurm/agent.py`), one JSON object a line. Standard library only.

A Ray worker that ends kills its children at once, and them alone. So this is two processes: the worker's child only
waits. The other one sees its input end, stops what it has started, and ends.

`keeper.py --in FOLDER` starts it in the launcher's folder, where relative paths begin, if the node has that.
`keeper.py --facts PATH TEXT` prints what a launcher compares before anything starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Last, so that no module of ours stands in for one of Python's.
    _file = os.path.abspath(__file__)
    for _ in range(5):
        _file = os.path.dirname(_file)
    sys.path.append(_file)
from primerl.launch.placement import alike
from primerl.launch.placement.slurm import agent

FACTS, IN = "--facts", "--in"
NAME = "PRIMERL_RAY_NODE"
PR_SET_NAME = 15


class Keeper(agent.Agent):
    def __init__(self) -> None:
        super().__init__()
        self.node = os.environ.pop(NAME, self.node)
        self.task = 0

    def run(self) -> int:
        with self.processes:
            while self.turn():
                pass
        return 0

    def start(self, request: dict[str, Any]) -> str | None:
        """The folder was looked at before."""
        environment = {**os.environ, **request["environment"], "PRIMERL_NODE_RANK": str(request["rank"])}
        # Empty where it gets none: it would see all of them without.
        environment[agent.GPUS] = ",".join(request["gpus"])
        self.name = str(request["start"])
        self.processes.start(
            self.name,
            request["command"],
            log=Path(request["logs"][0]),
            environment=environment,
            hide=request["hide"],
        )
        return None


def detach() -> None:
    """Goes on in a process that is not the worker's child, without what a Ray worker passes on to its children."""
    if os.fork():
        os.wait()
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("0")
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"primerl-keeper", 0, 0, 0)


def facts(path: str, text: str) -> dict[str, Any]:
    return {**alike.versions(), "sees": agent.sees(path, text)}


def main(arguments: list[str]) -> int:
    if arguments[:1] == [FACTS]:
        print(json.dumps(facts(*arguments[1:])))
        return 0
    if arguments[:1] == [IN]:
        # Only what is given relative paths needs it, such as an environment's files.
        with suppress(OSError):
            os.chdir(arguments[1])
    detach()
    for number in agent.IGNORED:
        # What it starts would inherit that a signal is ignored, but not this.
        signal.signal(number, lambda *_: None)
    return Keeper().run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
