"""A real Slurm on this machine for tests: one controller and two nodes, which share the host and its loopback.

It installs nothing: `missing()` says what is not there, and tests skip with that (`scripts/slurm_install.sh` installs
it). Everything is in a folder of its own, with a munge daemon of its own, on ports that are bound to be found free, and
is ended by the process ids that it wrote.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from end_to_end import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
NODES = ("n1", "n2")
# Debian has the daemons there, which a user's PATH may lack.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_S = 120
END_S = 20
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmUser=root
StateSaveLocation={folder}/state
SwitchType=switch/none
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=0
SelectType=select/cons_tres
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
JobAcctGatherType=jobacct_gather/none
KillWait=5
SlurmdParameters=config_overrides
MinJobAge=300
SlurmdTimeout=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4 PriorityTier=1
PartitionName=left Nodes=n1 MaxTime=60 State=UP OverSubscribe=FORCE:4 PriorityTier=1
PartitionName=right Nodes=n2 MaxTime=60 State=UP OverSubscribe=FORCE:4 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP OverSubscribe=EXCLUSIVE PriorityTier=10
"""


def missing() -> str | None:
    """What of Slurm is not on this machine, as a reason to skip; None where all of it is."""
    if os.geteuid() != 0:
        return "Slurm's daemons run as root in these tests"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(absent)} here: run scripts/slurm_install.sh" if absent else None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class Cluster:
    folder: Path
    daemons: dict[str, Path] = field(default_factory=dict)  # name -> file with its process id

    @property
    def variables(self) -> dict[str, str]:
        """For programs that are to use this Slurm."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        for name in ("munge", "run", "state", "log", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname()
        controller, *ports = free_ports(1 + len(NODES))
        # Slurm wants the ports of a range of nodes in order.
        lines = "\n".join(
            line.format(host=host, folder=self.folder, controller=controller, nodes=node, ports=port)
            for node, port in zip(NODES, ports, strict=True)
            for line in CONF.splitlines()
            if line.startswith("NodeName")
        )
        rest = [line for line in CONF.splitlines() if not line.startswith("NodeName")]
        partitions = [line for line in rest if line.startswith("PartitionName")]
        conf = self.folder / "slurm.conf"
        head = "\n".join(line for line in rest if line not in partitions)
        text = head.format(host=host, folder=self.folder, controller=controller)
        conf.write_text("\n".join([text, lines, *partitions, ""]))
        self._munge()
        # All of them answer `-c`: without the state of an earlier one.
        self._begin("slurmctld", "slurmctld", "-c", "-f", str(conf))
        for node in NODES:
            self.start_node(node)
        until(lambda: self.states() == dict.fromkeys(NODES, "idle"), START_S, "two idle nodes")

    def start_node(self, node: str) -> None:
        self._begin(f"slurmd.{node}", "slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """Within the block a node that does not answer for some seconds is down: no busy machine is to be one."""
        conf = self.folder / "slurm.conf"
        before = conf.read_text()
        try:
            conf.write_text(before.replace("SlurmdTimeout=300", "SlurmdTimeout=10"))
            self.run("scontrol", "reconfigure")
            yield
        finally:
            conf.write_text(before)
            self.run("scontrol", "reconfigure")

    def _munge(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        munge.chmod(0o755)
        files = {"key-file": "key", "socket": "socket", "seed-file": "seed", "log-file": "log", "pid-file": "pid"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self.run("munged", "--force", *options)
        self.daemons["munged"] = munge / "pid"

    def _begin(self, name: str, *command: str) -> None:
        self.run(*command)
        self.daemons[name] = self.folder / "run" / f"{name}.pid"

    def states(self) -> dict[str, str]:
        found = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %t")
        return dict(line.split() for line in found.splitlines())

    def job(self, number: int) -> dict[str, str]:
        """What the controller knows of it."""
        # The first line is that of the leader, where the job has several components.
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", str(number)).splitlines()[0]))

    def is_over(self, number: int) -> bool:
        return self.job(number)["JobState"] in (
            "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
        )  # fmt: skip

    def kill(self, daemon: str) -> None:
        os.kill(self.pid(daemon), signal.SIGKILL)

    def pid(self, daemon: str) -> int:
        return int(self.daemons[daemon].read_text())

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            until(lambda: self.run("squeue", "-h") == "", 30, "the end of all jobs")
        # Munge last, which the others need.
        for name in reversed(self.daemons):
            with contextlib.suppress(OSError, ValueError):
                end(self.pid(name))


def end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while runs(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    found = Cluster(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
