"""The launcher within its job: where its processes listen, the run's key, the time limit, going back to the queue."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from primerl.config.process_files.files import absolute
from primerl.config.schema.launched import C, Launched
from primerl.config.schema.sft import SFTConfig
from primerl.launch.cluster import has_orchestrator, make_key, reachable, serves_others
from primerl.launch.placement.registry import SLURM
from primerl.launch.placement.slurm import allocation
from primerl.launch.slurm import jobs
from primerl.launch.slurm.script import VARIABLE
from primerl.launch.supervise.watching import Interrupted
from primerl.train.checkpoint import on_request
from primerl.train.checkpoint.step_folders import saved_steps

REASON = "the job's time limit was near"
LOOK_EVERY_S = 0.2
LAST_S = 30.0
"""The last part of the time before the limit, in which the processes end."""
PUT_BACK_S = 60.0
"""How long Slurm may take to end a job that it has put back into the queue."""


def is_within() -> bool:
    """Whether the script that `[slurm]` wrote has started this process."""
    job = os.environ.get(VARIABLE)
    return bool(job) and job == os.environ.get(allocation.JOB)


def restarts() -> int:
    """How often Slurm has put this job back."""
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def placed(config: C) -> C:
    """With the placement of the job, and addresses that its nodes reach. They are this job's: the stored config does
    not have them."""
    deployment = config.deployment.model_copy(update={"type": SLURM})
    found = config.implied(deployment=deployment)
    here = allocation.current()
    if isinstance(found, SFTConfig) or here is None or (len(here.nodes) < 2 and not serves_others(found)):
        return found
    return reachable(found, allocation.addresses(here.nodes)[here.nodes[0]])


def begun(config: C, say: Callable[[str], None], *, saves: bool) -> tuple[C, TimeLimit | None]:
    """What a launcher begins with: within a job, with addresses of its nodes, a key, and an ear for its time limit."""
    if not is_within() or config.slurm is None:
        return config, None
    folder = Path(absolute(config.output_dir))
    limit = TimeLimit(folder, config.slurm.signal_s, say, saves=saves)
    limit.listen()
    if has_orchestrator(config):
        make_key(folder)
    return placed(config), limit


def ended(config: Launched, code: int, limit: TimeLimit | None, say: Callable[[str], None]) -> int:
    """The launcher's exit code, after what is to be done about a time limit."""
    slurm = config.slurm
    if limit is not None and slurm is not None and limit.is_up and slurm.requeue:
        requeue(slurm.max_requeues, say)
    return code


class TimeLimit:
    """What a launcher does when its job is about to reach its time limit: Slurm sends it SIGUSR1.

    It asks the trainer for a checkpoint after the current step, waits for that while there is time, and ends by
    [`TimeIsUp`][primerl.launch.slurm.within.TimeIsUp].
    """

    def __init__(self, folder: Path, before_s: float, say: Callable[[str], None], *, saves: bool) -> None:
        """`before_s`: how long before the limit the signal comes. `saves`: whether there is a trainer that could."""
        self.folder = folder
        self.before_s = before_s
        self.say = say
        self.saves = saves
        self.is_near = False
        self.is_up = False
        """Whether it has ended the run."""
        self._until: float | None = None
        self._newest = -1

    def listen(self) -> None:
        signal.signal(signal.SIGUSR1, self._hear)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self.is_near = True

    def check(self) -> None:
        """Raises TimeIsUp once the run is to stop."""
        if not self.is_near:
            return
        now = time.monotonic()
        if self._until is None:
            self._until = now + max(0.0, self.before_s - LAST_S) if self.saves else now
            self._newest = _newest(self.folder)
            if self.saves:
                self.say(f"the job's time limit is {self.before_s:.0f} s away; a checkpoint is saved after this step")
                on_request.ask(self.folder)
        if _newest(self.folder) > self._newest or now >= self._until:
            on_request.forget(self.folder)
            self.is_up = True
            raise TimeIsUp


class InBackground:
    """The same for a process whose main thread trains: it gets SIGTERM once the run is to stop."""

    def __init__(self, limit: TimeLimit | None) -> None:
        self._limit = limit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)

    def __enter__(self) -> None:
        if self._limit is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._limit is not None:
            self._thread.join()

    def _watch(self) -> None:
        while self._limit is not None and not self._over.wait(LOOK_EVERY_S):
            try:
                self._limit.check()
            except TimeIsUp:
                os.kill(os.getpid(), signal.SIGTERM)
                return


class TimeIsUp(Interrupted):
    """The job's time limit is near: the run stops, and can be resumed."""


def _newest(folder: Path) -> int:
    return max(saved_steps(folder / "checkpoints"), default=-1)


def requeue(most: int, say: Callable[[str], None]) -> bool:
    """Puts this job back into the queue, unless that was done as often as is allowed. Returns once Slurm ends it."""
    if restarts() >= most:
        say(
            f"the job was put back into the queue {restarts()} times (slurm.max_requeues); the same command resumes "
            "the run"
        )
        return False
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    try:
        jobs.command("scontrol", "requeue", os.environ[allocation.JOB])
        # The job's end is Slurm's to decide from here on: an exit code of this process could make it a failed one.
        deadline = time.monotonic() + PUT_BACK_S
        while not ended and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
    except jobs.SlurmError as error:
        if not ended:
            say(f"the job was not put back into the queue: {error}; the same command resumes the run")
            return False
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    return True
