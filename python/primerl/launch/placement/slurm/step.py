"""One step of a job as the launcher sees it: `srun`, and the agents that it has started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl.forking.exit_status import NOT_KNOWN
from primerl.launch.placement import alike
from primerl.launch.placement.protocol import Process
from primerl.launch.placement.slurm import agent

PIPE_BYTES = 1 << 20
"""A start is written at once, also while `srun` waits for its nodes."""
SILENT_S = 25.0
"""An agent that sends nothing for so long is lost, and with it its process."""
CREATED_S = 300.0
"""How long `srun` may wait for Slurm to create the step: it has no deadline of its own where resources are taken."""
OTHERS_S = 8.0
"""How long the parts of a role on other nodes have to end by themselves after one of them has failed."""
KEPT_LINES = 20
NO_BINDING = "lacks support for cpu binding"
"""What `srun` says on a cluster without a plug-in for tasks, which does what is asked for."""
# Variables of the job as a whole, or its batch step, that another step must not inherit.
NOT_OF_STEPS = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TRES_PER_TASK",
)


def command_line(name: str, nodes: Sequence[str], job: str, group: int | None = None) -> list[str]:
    """`srun` of one task on each of the nodes, which shares the job's resources with the other steps: the plan, not
    Slurm, says which GPUs are whose. `group`: the component of a heterogeneous job that the nodes are of."""
    count = str(len(nodes))
    return [
        "srun",
        f"--jobid={job}",
        *([] if group is None else [f"--het-group={group}"]),
        f"--job-name={name}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--overlap",
        "--cpu-bind=none",
        "--mem=0",
        "--mpi=none",
        "--input=all",
        "--kill-on-bad-exit=0",
        "--wait=0",
        sys.executable,
        "-I",
        "-S",
        agent.__file__,
    ]


def environment_of_srun(environ: Mapping[str, str], secret: frozenset[str]) -> dict[str, str]:
    """The launcher's, without what belongs to the batch step, and without names in `secret`."""
    return {name: value for name, value in environ.items() if name not in NOT_OF_STEPS and name not in secret}


@dataclass(slots=True, kw_only=True)
class Task(Process):
    """The role's process on one node."""

    node: str
    heard: float
    """When its agent last sent something, of `time.monotonic`."""


class Step:
    def __init__(self, process: Process, nodes: Sequence[str], command: Sequence[str], environment: Mapping[str, str]):
        """Raises OSError where there is no `srun`."""
        self.process = process
        self.began = time.monotonic()
        self.tasks = {node: Task(process.name, process.log, node=node, heard=self.began) for node in nodes}
        self.step: str | None = None
        """Its id, as `17.3`."""
        self.witness: Path | None = None
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)
        self.remarks: list[tuple[str, str]] = []
        """What the launcher's user is to read, each after the node that it is about."""
        self.first_end: Task | None = None
        self.was_in_vain = False
        """Whether Slurm has not created it within CREATED_S."""
        self._said: list[str] = []
        self._is_stopping = self._is_lost = False
        self._received = {"out": b"", "err": b""}
        self._open = {"out": True, "err": True}
        self.srun = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.srun.stdin is not None
        with contextlib.suppress(OSError):  # as large as this user may have it
            fcntl.fcntl(self.srun.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def is_lost(self) -> bool:
        """Whether it ended without a report from one of its agents."""
        return self._is_lost

    @property
    def is_started(self) -> bool:
        return all(task.pid is not None for task in self.tasks.values())

    def descriptors(self) -> list[int]:
        """To be waited on."""
        streams = {"out": self.srun.stdout, "err": self.srun.stderr}
        return [stream.fileno() for key, stream in streams.items() if stream is not None and self._open[key]]

    def send(self, message: Mapping[str, object]) -> None:
        """Nothing, where `srun` is gone: its end is noticed by `look`."""
        if self.srun.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self.srun.stdin.write(json.dumps(message).encode() + b"\n")
                self.srun.stdin.flush()

    def look(self, now: float) -> bool:
        """Reads what there is. Returns whether the process has just ended."""
        before = self.process.ended
        for key in ("out", "err"):
            self._read(key)
        if not self.process.ended:
            self._settle(now)
        return self.process.ended and not before

    def said(self) -> list[str]:
        """What there is to note in the logs of its nodes, since the last call."""
        said, self._said = self._said, []
        return said

    def _read(self, key: str) -> None:
        stream = self.srun.stdout if key == "out" else self.srun.stderr
        if stream is None or not self._open[key]:
            return
        os.set_blocking(stream.fileno(), False)
        while True:
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._open[key] = False
                return
            *lines, self._received[key] = (self._received[key] + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                self._note(text) if key == "out" else self._complain(text)

    def _complain(self, line: str) -> None:
        if line.endswith(NO_BINDING):
            return
        self.errors.append(line)
        self._said.append(line)

    def _note(self, line: str) -> None:
        try:
            message = json.loads(line)
            task = self.tasks[message["at"]]
        except (ValueError, LookupError, TypeError):
            return self._complain(line)
        task.heard = time.monotonic()
        if "step" in message:
            self.step = message["step"]
            if (remark := alike.skew(f"node {task.node}", message["clock"] - time.time())) is not None:
                self.remarks.append((task.node, remark))
        elif "started" in message:
            task.pid = message["started"]
            self._said.append(f"{task.node}: process {task.pid} was started")
            if task is next(iter(self.tasks.values())):
                self.process.pid = task.pid
        elif "exited" in message:
            task.code, task.cpu_s = message["exited"], message["cpu_s"]
            self.first_end = self.first_end or task
        elif "failed" in message:
            task.failure = message["failed"]
            self.first_end = self.first_end or task
        return None

    def _settle(self, now: float) -> None:
        """Whether the whole role has ended: with the last of its tasks, or with `srun`."""
        tasks = list(self.tasks.values())
        gone = self.srun.poll() is not None and not self._open["out"]
        if all(task.ended for task in tasks):
            return self._end()
        first = self.first_end
        if first is not None and (first.code or first.failure) and not self._is_stopping:
            # The other ranks wait for one that is gone.
            self._is_stopping = True
            self.send({"stop": OTHERS_S})
        if gone:
            for task in tasks:
                if not task.ended:
                    self._lost(task, self._why_gone())
            return self._end()
        if self.step is None and now - self.began > CREATED_S:
            return self._give_up(now)
        silent = [task for task in tasks if not task.ended and now - task.heard > SILENT_S]
        if silent and self.step is not None:
            self.kill()
            for task in silent:
                self._lost(task, f"its agent has sent nothing for {now - task.heard:.0f} s")
            for task in tasks:
                if not task.ended:
                    self._lost(task, "it was ended with the others")
            return self._end()
        return None

    def _give_up(self, now: float) -> None:
        self.was_in_vain = True
        self.kill()
        said = f": {'; '.join(self.errors)}" if self.errors else ""
        for task in self.tasks.values():
            if not task.ended:
                self._lost(task, f"srun has waited {now - self.began:.0f} s for Slurm to create its step{said}")
        return self._end()

    def _why_gone(self) -> str:
        return "; ".join(self.errors) or f"srun ended with code {self.srun.returncode}"

    def _lost(self, task: Task, why: str) -> None:
        self._is_lost = True
        self._said.append(f"{task.node}: lost: {why}")
        if task.pid is None:
            task.failure = f"on node {task.node}: {why}"
        else:
            task.code = NOT_KNOWN
            task.lost = f"was lost on node {task.node}: {why}"
        self.first_end = self.first_end or task

    def _end(self) -> None:
        """As the first of its tasks that ended badly."""
        bad = [task for task in self.tasks.values() if task.failure is not None or task.code]
        first = self.first_end if self.first_end in bad else next(iter(bad), None)
        self.process.cpu_s = sum(task.cpu_s for task in self.tasks.values())
        if first is None:
            self.process.code = 0
        elif first.failure is not None:
            self.process.failure = first.failure
        else:
            self.process.code, self.process.lost = first.code, first.lost
        self._said.append(f"{self.process.name} {self.process.describe_end()}")

    def kill(self) -> None:
        """Without waiting: the agents stop what they have started once their input ends."""
        self.close()
        with contextlib.suppress(OSError):
            self.srun.send_signal(signal.SIGKILL)
        if self.step is not None:
            # In the background; it may be gone already.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--quiet", self.step], check=False, timeout=10, capture_output=True)

    def close(self) -> None:
        if self.srun.stdin is not None:
            with contextlib.suppress(OSError):
                self.srun.stdin.close()

    def release(self) -> bool:
        """Whether `srun` has ended, and holds nothing any more."""
        if self.srun.poll() is None:
            return False
        for stream in (self.srun.stdin, self.srun.stdout, self.srun.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return True
