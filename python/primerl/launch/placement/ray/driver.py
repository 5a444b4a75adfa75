"""The process that talks to Ray for a launcher, which so needs none of Ray's threads and signal handlers.

Run as `python -m primerl.launch.placement.ray.driver ADDRESS NAMESPACE`. One JSON object a line:

    launcher -> driver  {"nodes": true}
                        {"reserve": group, "seats": [{"seat": .., "node": id, "name": .., "CPU": .., "GPU": ..}],
                         "wait_s": .., "facts": [command, ..]}
                        {"reseat": seat, "facts": [..]}       another agent, after the loss of one
                        {"port": seat}
                        {"begin": key, "seat": .., "command": [..], "request": {..}}   a keeper, and its first message
                        {"send": key, "seat": .., "message": {..}}
                        {"end": true}
    driver -> launcher  {"connected": {"ray": .., "node": id of its own, "nodes": [..]}} or {"failed": why}
                        {"nodes": [..]}
                        {"waits": group, "state": ..}
                        {"reserved": group, "facts": {seat: {..}}} or {"refused": group, "why": ..}
                        {"port": number, "seat": ..}
                        {"of": key, "line": text, or null at its end}
                        {"lost": seat, "why": .., "is_node": bool}

If the launcher is gone, so is this process (PR_SET_PDEATHSIG), and Ray ends its actors, whose keepers stop all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from primerl.launch.placement.ray import agent

POLL_S = 5.0
SILENT_S = 25.0
"""An agent that has not answered for so long is lost; Ray itself takes about a minute."""
START_S = 90.0
"""For an actor to start, and to look at its node."""
PLACED_S = 1
"""Ray waits by whole seconds. A group is not removed before it was waited for: Ray may lose what it holds."""
TOLD_EVERY_S = 10
PR_SET_PDEATHSIG = 1
NODE_ID = "ray.io/node-id"


@dataclass
class Seat:
    """One bundle of a group, and the agent in it."""

    name: str
    node: str
    group: Any
    index: int
    resources: dict[str, float]
    agent: Any = None


class Driver:
    def __init__(self, ray: Any, out: int) -> None:
        self.ray = ray
        self.out = out
        self.seats: dict[str, Seat] = {}
        self.groups: list[Any] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def tell(self, **what: Any) -> None:
        data = json.dumps(what).encode() + b"\n"
        with contextlib.suppress(OSError):  # the launcher is gone, which the input says
            while data:
                data = data[os.write(self.out, data) :]

    def nodes(self) -> list[dict[str, Any]]:
        """Those that are alive, with what they have and what is free."""
        # Ray's public functions have the cluster's sum alone.
        state: Any = import_module("ray._private.state")
        free = state.available_resources_per_node()
        return [
            {
                "id": one["NodeID"],
                "name": one["NodeManagerHostname"],
                "address": one["NodeManagerAddress"],
                "total": {key: one["Resources"].get(key, 0.0) for key in ("CPU", "GPU")},
                "free": {key: free.get(one["NodeID"], {}).get(key, 0.0) for key in ("CPU", "GPU")},
            }
            for one in self.ray.nodes()
            if one["Alive"]
        ]

    async def run(self, connected: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 26)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self.tell(connected=connected)
        while line := await reader.readline():
            request = json.loads(line)
            if "end" in request:
                break
            self.do(self.handle(request))
        await asyncio.to_thread(self.end)

    def do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def handle(self, request: dict[str, Any]) -> None:
        if "nodes" in request:
            self.tell(nodes=await asyncio.to_thread(self.nodes))
        elif "reserve" in request:
            await self.reserve(request)
        elif "reseat" in request:
            seat = self.seats[request["reseat"]]
            await self.seated(request["reseat"], {request["reseat"]: seat}, request["facts"])
        else:
            await self.pass_on(request)

    async def pass_on(self, request: dict[str, Any]) -> None:
        """To an agent, whose loss is reported by its follower."""
        seat = self.seats.get(request.get("seat") or request.get("port", ""))
        if seat is None or seat.agent is None:
            return
        with contextlib.suppress(self.ray.exceptions.RayError, asyncio.TimeoutError):
            if "port" in request:
                self.tell(port=await answer(seat.agent.port.remote(), SILENT_S), seat=request["port"])
            elif "begin" in request:
                first = json.dumps(request["request"])
                await answer(seat.agent.begin.remote(request["begin"], request["command"], first), SILENT_S)
            else:
                await answer(seat.agent.send.remote(request["send"], json.dumps(request["message"])), SILENT_S)

    async def reserve(self, request: dict[str, Any]) -> None:
        name, asked = request["reserve"], request["seats"]
        bundles = [{key: one[key] for key in ("CPU", "GPU") if one[key]} for one in asked]
        group = self.ray.util.placement_group(
            bundles, strategy="PACK", bundle_label_selector=[{NODE_ID: one["node"]} for one in asked]
        )
        self.groups.append(group)
        refused = await self.placed(name, group, request["wait_s"])
        if refused is not None:
            self.groups.remove(group)
            await asyncio.to_thread(self.ray.util.remove_placement_group, group)
            return self.tell(refused=name, why=refused)
        seats = {
            one["seat"]: Seat(one["name"], one["node"], group, index, bundles[index]) for index, one in enumerate(asked)
        }
        self.seats.update(seats)
        await self.seated(name, seats, request["facts"])
        return None

    async def placed(self, name: str, group: Any, wait_s: float) -> str | None:
        """Waits until Ray has placed the group; why it has not, otherwise."""
        loop = asyncio.get_running_loop()
        began = told = loop.time()
        while not await asyncio.to_thread(group.wait, PLACED_S):
            table = await asyncio.to_thread(self.ray.util.placement_group_table, group)
            state = table["stats"]["scheduling_state"]
            if state == "INFEASIBLE":
                return "no node of the cluster can ever have it (Ray says INFEASIBLE)"
            if loop.time() - began > wait_s:
                return f"it was not free within {wait_s:.0f} s (Ray says {state})"
            if loop.time() - told > TOLD_EVERY_S:
                told = loop.time()
                self.tell(waits=name, state=state)
        return None

    async def seated(self, name: str, seats: dict[str, Seat], command: list[str]) -> None:
        """Starts the agents, and tells what they say of their nodes."""
        strategy: Any = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        for seat in seats.values():
            options = {
                "num_cpus": seat.resources.get("CPU", 0),
                "num_gpus": seat.resources.get("GPU", 0),
                "max_concurrency": 64,
                "max_restarts": 0,
                "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
                "scheduling_strategy": strategy(seat.group, seat.index),
            }
            seat.agent = self.ray.remote(agent.Agent).options(**options).remote(seat.name)
        try:
            found = await asyncio.gather(
                *(answer(seat.agent.facts.remote(command), START_S) for seat in seats.values())
            )
            # Once all are there: an answer takes milliseconds, the start of an actor seconds.
            for fact, seat in zip(found, seats.values(), strict=True):
                asked = time.time()
                fact["ahead_s"] = await answer(seat.agent.clock.remote(), START_S) - (asked + time.time()) / 2
        except (TimeoutError, self.ray.exceptions.RayError) as error:
            why = str(error).strip().partition("\n")[0] or f"an agent did not start within {START_S:.0f} s"
            for seat in seats.values():
                self.ray.kill(seat.agent)
            return self.tell(refused=name, why=why)
        for key, seat in seats.items():
            self.do(self.follow(key, seat))
        self.tell(reserved=name, facts=dict(zip(seats, found, strict=True)))
        return None

    async def follow(self, key: str, seat: Seat) -> None:
        """The heartbeat of an agent: it is asked for news all the time."""
        errors = self.ray.exceptions
        while True:
            try:
                for of, line in await answer(seat.agent.news.remote(POLL_S), SILENT_S):
                    self.tell(of=of, line=line)
            except (TimeoutError, errors.RayError) as error:
                why, is_node = reason(error, errors)
                with contextlib.suppress(errors.RayError):
                    self.ray.kill(seat.agent)
                seat.agent = None
                return self.tell(lost=key, why=why, is_node=is_node)

    def end(self) -> None:
        for seat in self.seats.values():
            if seat.agent is not None:
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.kill(seat.agent)
        for group in self.groups:
            with contextlib.suppress(self.ray.exceptions.RayError):
                group.wait(PLACED_S)
                self.ray.util.remove_placement_group(group)
        self.ray.shutdown()


async def answer(reference: Any, timeout_s: float) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)


def reason(error: BaseException, errors: Any) -> tuple[str, bool]:
    """Why an agent is lost, and whether its node is not to be used any more."""
    if isinstance(error, asyncio.TimeoutError):
        return f"its agent has not answered for {SILENT_S:.0f} s", True
    text = " ".join(str(error).split())
    if isinstance(error, errors.OutOfMemoryError):
        return (
            "Ray's memory monitor has killed its agent, since the node was short of memory (only the cluster's owner "
            "can turn it off: RAY_memory_monitor_refresh_ms=0)"
        ), False
    if isinstance(error, errors.ActorDiedError) and "its node has died" not in text:
        return f"its agent has died: {text[:300]}", False
    return f"its node, or the network to it, is gone: {text[:300]}", True


def main(address: str, namespace: str) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    out = os.dup(1)
    os.dup2(2, 1)  # Ray writes there
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # or it would upload the working directory

    def failed(why: str) -> int:
        os.write(out, json.dumps({"failed": why}).encode() + b"\n")
        return 1

    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        return failed(f"ray cannot be imported: {error}")
    try:
        ray.init(address=address, namespace=namespace or None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        return failed(" ".join(str(error).split())[:600])
    for number in (signal.SIGTERM, signal.SIGINT):
        # `ray job stop` sends it to every process of the job: the launcher stops them in order.
        signal.signal(number, signal.SIG_IGN)
    ray.cloudpickle.register_pickle_by_value(agent)
    driver = Driver(ray, out)
    own = ray.get_runtime_context().get_node_id()
    asyncio.run(driver.run({"ray": ray.__version__, "node": own, "nodes": driver.nodes()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
