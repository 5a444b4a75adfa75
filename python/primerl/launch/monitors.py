"""The monitors of a run: checked before the start, started next to the other processes, notified of the run's end.

Nothing here fails a run. A monitor process that ends is started again, as often as `restarts` allows; what it did not
send stays on the disk, and is named in the launcher's last words.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files as process_files
from primerl.config.process_files import monitored, resolve
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.monitors import PRIME, WANDB, MonitorConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from primerl.launch import secrets
from primerl.launch.placement.commands import start
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.supervise.failures import BAD_INPUT
from primerl.launch.supervise.watching import Restarts
from primerl.monitors import load
from primerl.monitors.keys import usable
from primerl.monitors.process import END_FILE, RECORDS_FILE, STATUS_FILE
from primerl.monitors.records import BusyError, last_step, locked
from primerl.monitors.services import prime
from primerl.process import extras
from primerl.process.problems import Problem
from primerl.train.checkpoint.files import keep_steps
from primerl.train.checkpoint.step_folders import saved_steps

WANDB_KEY = "WANDB_API_KEY"
PRIME_KEY = "orchestrator.prime_monitor"
WANDB_URL = "https://api.wandb.ai"
RESTART_AFTER_S = 1.0
# The process has `monitor.finish_s`, and then says what is left.
LAST_WORDS_S = 5.0
LOOK_EVERY_S = 0.5
POLL_S = 0.05
FAILURES = (OSError, ValueError, LookupError, BusyError)
# What the trainer writes a line a step of.
TOLD_BY_STEP = ("metrics.jsonl", "distributions.jsonl")
# `primerl sft` has no setting for it, which restarts nothing else.
SFT_RESTARTS = 5


def check(config: RLConfig | SFTConfig) -> None:
    """Raises ConfigError."""
    problems: list[Problem | None] = []
    for entry in monitored.entries(config):
        if entry.name == WANDB:
            problems.append(_wandb_problem(config))
        elif entry.path == PRIME:
            problems.append(_prime_problem(has_samples=entry.samples_interval is not None))
        else:
            try:
                load.find(entry.path, entry.args)
            except ValueError as error:
                problems.append(Problem.at("monitors", str(error)))
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError.of(found)


def _wandb_problem(config: RLConfig | SFTConfig) -> Problem | None:
    if importlib.util.find_spec("wandb") is None:
        how = f"omit wandb (--no-wandb), or install {extras.described('wandb')}"
        return Problem.at("wandb", f"the package is not installed; {how}")
    try:
        key = _wandb_key(config)
    except ValueError as error:
        return Problem.at("wandb", str(error))
    if monitored.wandb_mode(config.wandb) == "offline" or key is not None or has_login():
        return None
    return Problem.at(
        "wandb",
        "there is no key: set WANDB_API_KEY (from https://wandb.ai/authorize) in the environment, in a file of "
        "env_files or by `primerl secret set WANDB_API_KEY`, or run `wandb login`; --wandb.offline needs none, and "
        "--no-wandb leaves W&B out",
    )


def _wandb_key(config: RLConfig | SFTConfig) -> str | None:
    """The environment's goes before what is in files or was stored. Raises ValueError, which does not show it, and
    ConfigError where a file or the store cannot be read."""
    given = None if config.wandb is None or config.wandb.api_key is None else config.wandb.api_key.get_secret_value()
    found = usable(given, "wandb.api_key") or usable(os.environ.get(WANDB_KEY), WANDB_KEY)
    if found is not None:
        return found
    files = config.env_files if isinstance(config, RLConfig) else []
    return usable(secrets.of_all(files).get(WANDB_KEY), f"{WANDB_KEY} of env_files or the stored secrets")


def has_login() -> bool:
    """Whether the netrc file has a key for W&B's server."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_URL)).hostname or ""
    given = os.environ.get("NETRC")
    files = [Path(given)] if given else [Path(os.path.expanduser(name)) for name in ("~/.netrc", "~/_netrc")]
    for file in files:
        try:
            if netrc.netrc(os.fspath(file)).hosts.get(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _prime_problem(*, has_samples: bool) -> Problem | None:
    try:
        key = prime.api_key()
    except ValueError as error:
        return Problem.at(PRIME_KEY, str(error))
    if key is None:
        return Problem.at(
            PRIME_KEY,
            "there is no key: set PRIME_API_KEY, or run `prime login`; --no-orchestrator.prime-monitor leaves the "
            "platform out",
        )
    if has_samples and importlib.util.find_spec("pyarrow") is None:
        return Problem.at(
            PRIME_KEY,
            "samples are sent as Parquet, and pyarrow is not installed; "
            f"--no-orchestrator.prime-monitor.log-extras.samples, or install {extras.described('prime')}",
        )
    return None


def wanted(config: RLConfig | SFTConfig) -> ProcessConfig | None:
    """The process, or None where the run has no monitor."""
    variables = {}
    # A file that was read for the checks, and is gone since, is no reason for a run to fail.
    with suppress(ConfigError):
        key = None if config.wandb is None else _wandb_key(config)
        variables = {} if key is None else {WANDB_KEY: key}
    return resolve.monitor(config, variables)


class MonitorWatch:
    """The process of the monitors, as its launcher sees it. Not for several threads."""

    def __init__(self, described: ProcessConfig, folder: Path, restarts: int, say: Callable[[str], None]) -> None:
        self.described = described
        self.folder = folder
        self.say = say
        self._restarts = Restarts(restarts)
        self._start_at: float | None = None
        self._shown: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.described.name

    def start(self, placement: Placement, goes_back_to: int | None = None) -> None:
        """`goes_back_to`: the step whose checkpoint the run continues from, where that is not the newest. Raises
        nothing that the run would fail by."""
        try:
            if goes_back_to is not None:
                self.go_back(goes_back_to)
            for file in (END_FILE, STATUS_FILE):
                (self.folder / file).unlink(missing_ok=True)
            process_files.write(self.described)
            start(placement, self.described)
        except FAILURES as error:
            self.say(f"the monitors cannot be started, and training continues without them: {error}")

    def go_back(self, step: int) -> None:
        """Without a checkpoint of that step nothing changes: the trainer will refuse."""
        if step not in saved_steps(self.folder / "checkpoints"):
            return
        # The trainer, which starts after the monitors, would cut them too late: the new run would get the steps that
        # are discarded.
        for name in TOLD_BY_STEP:
            keep_steps(self.folder / name, step)
        self._set_aside(step)

    def _set_aside(self, step: int) -> None:
        """Services cannot take back later steps that they have received: the run continues there as another one, which
        gets all steps up to this one first."""
        records = self.folder / RECORDS_FILE
        if not records.is_file():
            return
        with locked(records.parent):
            if last_step(records) <= step:
                return
            number = 1
            while (former := self.folder / f"{records.parent.name}.former_{number}").exists():
                number += 1
            records.parent.rename(former)
        self.say(
            f"monitors were sent steps after {step}, so they get a new run, from the first step on; the records of the "
            f"previous one are renamed to {former}"
        )

    def ended(self, process: Process) -> None:
        """During the run."""
        if process.code == BAD_INPUT or not self._restarts.has_one_left(self.name):
            self.say(f"{self.name} {process.describe_end()}, and training continues without it; see {process.log}")
            return
        self.say(f"{self.name} {process.describe_end()}; it is started again")
        self._start_at = time.monotonic() + RESTART_AFTER_S

    def look(self, placement: Placement) -> None:
        """Starts it again where that is due; says where the run can be seen, and which monitor fails."""
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_at = None
            try:
                start(placement, self.described)
            except FAILURES as error:
                self.say(f"{self.name} cannot be started again, and training continues without it: {error}")
        for name, monitor in self._status().items():
            if monitor["is_given_up"]:
                self._show(name, f"monitor {name} is given up, and training continues without it: {monitor['error']}")
            elif monitor["where"]:
                self._show(name, f"monitor {name}: {monitor['where']}")

    def end(self, placement: Placement, code: int, reason: str) -> None:
        """With the other processes gone. Raises nothing that the run would fail by."""
        status = {0: "finished", 130: "interrupted"}.get(code, "failed")
        try:
            process_files.write_text(self.folder / END_FILE, json.dumps({"status": status, "reason": reason}) + "\n")
            process = placement.by_name.get(self.name)
            if process is not None:  # it could be started
                self._wait(placement, process)
                placement.stop(grace_s=0.0, names=[self.name])
            self._start_at = None
            self.look(placement)
            for line in self._left():
                self.say(line)
        except FAILURES as error:  # a full disk may be why the run has failed
            self.say(f"monitors did not get the run's end: {error}")

    def _wait(self, placement: Placement, process: Process) -> None:
        """Until it has sent what is left, or its time is over. It is not sent a signal, which one that has just been
        started would die of."""
        config = self.described.config
        finish_s = config.finish_s if isinstance(config, MonitorConfig) else 0.0
        deadline = time.monotonic() + finish_s + LAST_WORDS_S
        while placement.lost is None and time.monotonic() < deadline:
            if process.ended:
                if self._start_at is None and (process.code is None or process.code >= 0):
                    return
                self._start_at = None
                process = start(placement, self.described)
            placement.watch(POLL_S)

    def _left(self) -> Iterator[str]:
        status = self._status()
        again = f"`primerl monitor @ {self.described.file}` sends the rest"
        if not status:
            yield f"the monitors have failed; see {self.described.log}; {again}"
        for name, monitor in status.items():
            if not monitor["is_done"]:
                left = monitor["records"] - monitor["sent"]
                yield (
                    f"monitor {name} has failed: {left} of {monitor['records']} records were not sent "
                    f"({monitor['error'] or 'the time, monitor.finish_s, was over'}); {again}"
                )

    def _show(self, name: str, message: str) -> None:
        if self._shown.get(name) != message:
            self._shown[name] = message
            self.say(message)

    def _status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / STATUS_FILE).read_text(encoding="utf-8"))["monitors"]
        except (OSError, ValueError, LookupError):
            return {}
        return found


@contextmanager
def beside(config: SFTConfig, folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], int]]:
    """The monitors of a training in this process. The block calls what it is given with its exit code."""
    described = wanted(config)
    if described is None:
        yield lambda code: code
        return
    code, over = [1], threading.Event()

    def ended(number: int) -> int:
        code[0] = number
        return number

    with LocalPlacement() as placement:
        watch = MonitorWatch(described, folder, SFT_RESTARTS, say)
        ckpt = config.ckpt
        step = None if ckpt is None else ckpt.resume_step
        watch.start(placement, None if step == -1 else step)

        def look() -> None:
            while not over.wait(LOOK_EVERY_S):
                for process in placement.watch(0.0):
                    watch.ended(process)
                watch.look(placement)

        looking = threading.Thread(target=look, name="monitors", daemon=True)
        looking.start()
        try:
            yield ended
        finally:
            over.set()
            looking.join()
            # 128 + n: stopped by a signal, which somebody sent.
            watch.end(placement, 130 if code[0] > 128 else code[0], f"exit code {code[0]}")
