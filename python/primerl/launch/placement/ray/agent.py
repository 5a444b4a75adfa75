"""The actor of a run on one Ray node: it starts keepers there (`keeper.py`), and passes their messages on.

It is sent to the nodes by value, so it uses the standard library alone, and works in an interpreter of Ray's without
this package. If the driver does not ask for news any more (it is gone, or the network is cut), the processes end: the
launcher has given them up by then, or is about to, and may start others elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import time
from importlib import import_module
from typing import Any

DROP = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV", "CUDA_VISIBLE_DEVICES")
"""Set by Ray for its workers, which our processes are not."""
ALONE_S = 18.0
ALIVE_S = 5.0
"""How often keepers hear that they are wanted: they stop what they have started when nothing comes for some time
(`ORPHAN_S` of `placement/slurm/agent.py`), as when this process is frozen."""
LOOK_S = 1.0
FACTS_S = 60.0
NAME = "PRIMERL_RAY_NODE"


class Agent:
    """An actor of Ray, all of whose methods run in its event loop."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.keepers: dict[str, asyncio.subprocess.Process] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.events: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        self.heard = time.monotonic()

    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in DROP}
        return {**own, NAME: self.node}

    async def facts(self, command: list[str]) -> dict[str, Any]:
        """What the node's package says, and `error` where it has none. `command`: the keeper's, for facts."""
        self.do(self.watch())
        gpus = [str(one) for one in import_module("ray").get_runtime_context().get_accelerator_ids().get("GPU", [])]
        # In any order, of a worker whose raylet sees some of them.
        found: dict[str, Any] = {"pid": os.getpid(), "gpus": sorted(gpus, key=lambda name: (len(name), name))}
        try:
            asked = await asyncio.create_subprocess_exec(
                *command, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, errors = await asyncio.wait_for(asked.communicate(), FACTS_S)
            return {**found, **json.loads(out)} if out else {**found, "error": errors.decode(errors="replace")[-300:]}
        except (TimeoutError, OSError, ValueError) as error:
            return {**found, "error": f"{type(error).__name__}: {error}"}

    async def clock(self) -> float:
        """Seconds since 1970, as this node has it."""
        return time.time()

    async def port(self) -> int:
        """A free one, at the moment."""
        with socket.socket() as opened:
            opened.bind(("", 0))
            return int(opened.getsockname()[1])

    async def begin(self, key: str, command: list[str], request: str) -> None:
        """Starts a keeper, with its first message."""
        try:
            keeper = await asyncio.create_subprocess_exec(
                *command,
                env=self.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self.events.put_nowait((key, json.dumps({"failed": str(error)})))
            return
        self.keepers[key] = keeper
        self.do(self.follow(key, keeper))
        await self.send(key, request)

    async def send(self, key: str, message: str) -> None:
        keeper = self.keepers.get(key)
        if keeper is not None and keeper.stdin is not None:
            keeper.stdin.write(message.encode() + b"\n")

    async def news(self, timeout_s: float) -> list[tuple[str, str | None]]:
        """What keepers have said, a line each; None where one has ended. Waits up to that long for the first."""
        self.heard = time.monotonic()
        try:
            found = [await asyncio.wait_for(self.events.get(), timeout_s)]
        except TimeoutError:
            found = []
        while not self.events.empty():
            found.append(self.events.get_nowait())
        self.heard = time.monotonic()
        return found

    async def follow(self, key: str, keeper: asyncio.subprocess.Process) -> None:
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        while line := await keeper.stdout.readline():
            self.events.put_nowait((key, line.decode(errors="replace")))
        self.keepers.pop(key, None)
        keeper.stdin.close()
        self.events.put_nowait((key, None))
        await keeper.wait()

    async def watch(self) -> None:
        told = -math.inf
        while (now := time.monotonic()) - self.heard < ALONE_S:
            if now - told >= ALIVE_S:
                told = now
                for key in list(self.keepers):
                    await self.send(key, json.dumps({"alive": True}))
            await asyncio.sleep(LOOK_S)
        # Their input ends, which stops them.
        os._exit(1)

    def do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
