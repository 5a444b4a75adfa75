"""What `srun` starts on a node: it starts one process of the run there, under a guard, and reports to the launcher.

Run as `python -I -S agent.py`; standard library only. Its standard input and output are the launcher's, through
`srun`, which copies the input to the tasks of all nodes. One JSON object a line:

    launcher -> agent   {"start": name, "command": [..], "environment": {..}, "logs": [path, ..], "hide": [..],
                         "gpus": [..], "witness": [path, text], "versions": {name: text}}
                        environment: on top of the task's own; with the run's key, which so is in no script, no file
                        and no process list
                        logs: by the number of the task
                        witness: a file that every node sees with this text, if the folder is shared
                        {"signal": number}
                        {"stop": grace seconds}          SIGTERM, then SIGKILL
                        {"alive": true}                  every ALIVE_S
    agent -> launcher   {"at": node, "step": "17.3", "clock": seconds since 1970}     it is there
                        {"at": node, "started": pid}
                        {"at": node, "exited": code, "cpu_s": float}
                        {"at": node, "failed": reason}   it could not be started
                        {"at": node, "alive": true}      every ALIVE_S

Slurm sends SIGTERM to everything in a step that it cancels; the agent ignores it, reports how the process ended, and
ends with it. If the launcher is gone the input ends, and the agent stops everything; where `slurmd` of this node is
gone too, nothing ends the input, but it is silent. If the agent is killed, its guard does
(`launch/supervise/guard.py`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

if __name__ == "__main__":
    # Last, so that no module of ours stands in for one of Python's.
    _file = os.path.abspath(__file__)
    for _ in range(5):
        _file = os.path.dirname(_file)
    sys.path.append(_file)
from pathlib import Path

from primerl.launch.placement import alike
from primerl.launch.supervise.processes import Processes

ALIVE_S = 5.0
ORPHAN_GRACE_S = 2.0
ORPHAN_S = 25.0
"""A launcher that sends nothing for so long is gone."""
# A folder on a network is seen by other nodes with some delay.
SHARED_S = 15.0
# srun passes lines on whole up to 1024 bytes.
LONGEST_REASON = 500
GPUS = "CUDA_VISIBLE_DEVICES"
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Agent:
    def __init__(self) -> None:
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.task = int(os.environ.get("SLURM_PROCID", "0"))
        self.received = b""
        self.name: str | None = None
        self.kill_at: float | None = None
        self.told_alive = self.looked = time.monotonic()
        self.silent_s = 0.0
        self.processes = Processes()

    def run(self) -> int:
        step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
        self.tell(step=step, clock=time.time())
        with self.processes:
            while self.turn():
                pass
        return 0

    def turn(self) -> bool:
        """Waits for news, and acts on them. False when there is nothing left to do."""
        wait_s = self.told_alive + ALIVE_S - time.monotonic()
        if self.kill_at is not None:
            wait_s = min(wait_s, self.kill_at - time.monotonic())
        readable, _, _ = select.select([0, self.processes.fileno()], [], [], max(0.0, wait_s))
        if (0 in readable and not self.receive()) or self.is_orphan():
            self.processes.stop(grace_s=ORPHAN_GRACE_S)
            return False
        for process in self.processes.poll(0.0):
            if process.failure is not None:
                self.tell(failed=process.failure[:LONGEST_REASON])
            else:
                self.tell(exited=process.code, cpu_s=round(process.cpu_s, 3))
            return False
        if self.processes.guard_end is not None:
            self.tell(failed=f"the guard of the process {self.processes.guard_end}")
            return False
        self.tell_started()
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at and self.name is not None:
            self.kill_at = None
            self.processes.signal(self.name, signal.SIGKILL)
        if now - self.told_alive >= ALIVE_S:
            self.told_alive = now
            self.tell(alive=True)
        return True

    def is_orphan(self) -> bool:
        """Whether the launcher has been silent for too long. A time in which this process did not run, say because the
        whole job was suspended, counts as little: the launcher may not have run either."""
        now = time.monotonic()
        self.silent_s += min(now - self.looked, ALIVE_S)
        self.looked = now
        return self.silent_s > ORPHAN_S

    def tell_started(self) -> None:
        if self.name is None or self.name not in self.processes.by_name:
            return
        pid = self.processes.by_name[self.name].pid
        if pid is not None and self.reported_pid != pid:
            self.reported_pid = pid
            self.tell(started=pid)

    reported_pid: int | None = None

    def receive(self) -> bool:
        """Does what the launcher has sent. False when that is gone, or nothing can be started."""
        data = os.read(0, 1 << 16)
        self.looked, self.silent_s = time.monotonic(), 0.0
        self.received += data
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                reason = self.start(request)
                if reason is not None:
                    self.tell(failed=reason[:LONGEST_REASON])
                    return False
            elif "signal" in request and self.name is not None:
                self.processes.signal(self.name, int(request["signal"]))
            elif "stop" in request and self.name is not None:
                self.processes.signal(self.name, signal.SIGTERM if request["stop"] > 0 else signal.SIGKILL)
                self.kill_at = time.monotonic() + float(request["stop"])
        return bool(data)

    def start(self, request: dict[str, Any]) -> str | None:
        """Why it cannot be started, if so."""
        own = alike.versions()
        if (other := alike.difference(f"node {self.node}", own, request.get("versions", own))) is not None:
            return other
        path, text = request["witness"]
        if not sees(path, text):
            return (
                f"output_dir: {os.path.dirname(path)} is not the same folder on node {self.node} as on the launcher's; "
                "give an output_dir that all nodes share"
            )
        environment = {**os.environ, **request["environment"], "PRIMERL_NODE_RANK": str(self.task)}
        environment.pop("SLURM_GPUS_PER_TASK", None)
        if request["gpus"]:
            environment[GPUS] = visible(request["gpus"], os.environ.get(GPUS))
        self.name = str(request["start"])
        self.processes.start(
            self.name,
            request["command"],
            log=Path(request["logs"][self.task]),
            environment=environment,
            hide=request["hide"],
        )
        return None

    def tell(self, **what: Any) -> None:
        """The launcher may be gone, which the end of the input says."""
        try:
            os.write(1, json.dumps({"at": self.node, **what}).encode() + b"\n")
        except OSError:
            return


def sees(path: str, text: str, within_s: float = SHARED_S) -> bool:
    deadline = time.monotonic() + within_s
    while True:
        try:
            with open(path, encoding="utf-8") as file:
                if file.read() == text:
                    return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def visible(numbers: list[int], given: str | None) -> str:
    """The GPUs with these numbers among those that Slurm lets the task see."""
    names = [name for name in (given or "").split(",") if name]
    return ",".join(names[number] if number < len(names) else str(number) for number in numbers)


def main() -> int:
    for number in IGNORED:
        # What it starts would inherit that a signal is ignored, but not this.
        signal.signal(number, lambda *_: None)
    return Agent().run()


if __name__ == "__main__":
    sys.exit(main())
