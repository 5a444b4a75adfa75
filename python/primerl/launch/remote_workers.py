"""`primerl env-worker --join`: env workers of this machine for a run on another one.

    ask   GET /envs/config: settings, limits, what the run's first worker listed      (again until wait_s have passed)
    start one process a worker, under a guard; each loads the environment, registers, and is refused where it differs
    watch a worker that ends during the run is started again; all end when the run is over, or when this process is
          asked to stop

Nothing is read from the run's folder. Exit codes: 0 the run is over or SIGTERM (Ctrl-C, a closed terminal), 1 the
orchestrator was lost or a worker failed, 2 bad input: no such environment, a wrong key, another version or other
examples than the run's first worker.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from primerl.config.errors.fail import ConfigError
from primerl.config.errors.validation_errors import describe
from primerl.config.process_files import files as process_files
from primerl.config.process_files import resolve
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.env_worker import EnvWorkerConfig, JoinConfig
from primerl.config.schema.environment import JoinedSettings
from primerl.config.schema.rl import RLConfig
from primerl.forking import servers
from primerl.launch.interpreters import lookup
from primerl.launch.placement.commands import start
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.report import addresses
from primerl.launch.report import status as orchestrator_status
from primerl.launch.report.console import Console
from primerl.launch.report.logs import describe_end
from primerl.launch.secrets import read_files
from primerl.launch.supervise.failures import BAD_INPUT, FAILED
from primerl.launch.supervise.orchestrator import signed_off
from primerl.launch.supervise.watching import LAST_WORDS_S, Restarts, gave_up
from primerl.net.requests import UnansweredError, ask
from primerl.process.signals import stop_signals
from primerl.run_key import FILE, VARIABLE
from primerl.runs import secrets as stored
from primerl.runs.state import StateError

# Env workers that join a run from other machines, as its launcher sees them: which it waits for, and how.

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def environments(config: RLConfig) -> list[str]:
    """Those that have no workers on this machine."""
    sources = config.orchestrator
    return [entry.label for entry in [*sources.train.env, *sources.eval.env] if not entry.num_workers]


def announcement(config: RLConfig, url: str, folder: Path) -> str | None:
    """What has to be started on other machines; None where the run waits for nothing."""
    names = environments(config)
    if not names:
        return None
    port = urlsplit(url).port
    host = config.orchestrator.host
    commands = "".join(
        f"\n  primerl env-worker --join {addresses.reached_at(host, port)} --env {name}" for name in names
    )
    file = folder / FILE
    key = f"{VARIABLE}=$(cat {shlex.quote(os.fspath(file))})" if file.is_file() else f"the run's {VARIABLE}"
    here = f"\n  (with {key} in the environment"
    if host in LOOPBACK:
        here += f"; it listens on {host}, which only this machine reaches: for others set orchestrator.host, and "
        here += f"{VARIABLE} on both sides"
    here += ")"
    return (
        f"waiting for env workers to join, for at most timeouts.join_s = {config.timeouts.join_s:g} s:{commands}{here}"
    )


def missing(config: RLConfig, status: dict[str, Any]) -> list[str]:
    return orchestrator_status.not_joined(status, environments(config))


def too_late(config: RLConfig, waiting: list[str]) -> str:
    return (
        f"not everything has joined within timeouts.join_s = {config.timeouts.join_s:g} s: {'; '.join(waiting)}; start "
        "it with `primerl env-worker --join`, raise timeouts.join_s where that takes longer, or give the environment "
        "workers of this machine (num_workers)"
    )


ANSWER_S = 10.0
AGAIN_S = 1.0
POLL_S = 0.5
INSTALL_S = 1800.0
STOP_S = 20.0
# From the last words to the end of all: an orchestrator that was only lost is started again by then.
OVER_S = 30.0
RESTARTS = 5


class JoinRefusedError(Exception):
    """The run does not take workers from here: exit code 2."""


class JoinFailedError(Exception):
    """The orchestrator, or a worker, was lost: exit code 1."""


class Stopped(Exception):  # noqa: N818 - not an error
    """SIGTERM, SIGINT or SIGHUP."""


def run(config: JoinConfig, console: Console | None = None) -> int:
    """Until the run is over; returns the exit code. Signals to stop are its own from then on. Raises ConfigError
    before anything is asked."""
    check_address(config.join)
    files = read_files(config.env_files)
    console = console or Console()
    if config.python is not None:
        lookup.provide(config.python, INSTALL_S, console.say)
    joining = _Joining(config, files, console)
    # For good: given back, a signal in the last moments would change the exit code.
    for number in stop_signals():
        signal.signal(number, lambda *_: joining.stop.set())
    try:
        return joining.work()
    except Stopped:
        return 0
    except JoinRefusedError as error:
        joining.console.say(f"error: {error}")
        return BAD_INPUT
    except JoinFailedError as error:
        joining.console.say(f"error: {error}")
        return FAILED


def check_address(url: str) -> None:
    try:
        address = urlsplit(url)
        usable = address.scheme == "http" and address.hostname and address.port and address.path in ("", "/")
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError.at("join", f"{url!r} is no address of an orchestrator; give http://host:port")


class _Joining:
    def __init__(self, config: JoinConfig, variables: Mapping[str, str], console: Console) -> None:
        self.config = config
        self.console = console
        self.stop = threading.Event()
        self.restarts = Restarts(RESTARTS, key=None)
        self.failed: dict[str, Process] = {}
        self.ended_at: float | None = None
        """When a worker last ended with code 0, as it does when the run is over, or when it is asked to stop."""
        self._files = variables
        self._said = ""

    def work(self) -> int:
        told = self._first_known(self._asked(time.monotonic() + self.config.wait_s))
        settings = _settings(told)
        variables = self._variables(told, settings)
        self._say_what_is_joined(told)
        with tempfile.TemporaryDirectory(prefix="primerl-join-") as folder, LocalPlacement() as placement:
            described = {
                process.name: process for process in workers(self.config, told, settings, variables, Path(folder))
            }
            for process in described.values():
                process_files.write(process)
                start(placement, process)
            return self._watch(placement, described)

    # What the orchestrator says

    def _asked(self, deadline: float) -> dict[str, Any]:
        """The orchestrator's answer, asked for until it comes."""
        wanted = {"environment": self.config.env}
        if self.config.role is not None:
            wanted["role"] = self.config.role
        while True:
            self._check_stopped()
            try:
                status, answer = ask(self.config.join, "/envs/config", within_s=ANSWER_S, **wanted)
                problem = f"it answers {status}"
            except UnansweredError as error:
                status, answer, problem = 0, {}, str(error)
            if status == 200:
                return answer
            # Refused for a reason that waiting does not remove.
            if 400 <= status < 500 and status not in (408, 429):
                raise JoinRefusedError(self._refusal(status, answer))
            if time.monotonic() >= deadline:
                raise JoinFailedError(
                    f"no orchestrator answered at {self.config.join} within wait_s = {self.config.wait_s:g} s "
                    f"({problem}); is the address right, does it listen for other machines (orchestrator.host), does a "
                    "firewall stand between? raise --wait-s where it is started later"
                )
            self._say_once(f"waiting for an orchestrator at {self.config.join} ({problem})")
            self.stop.wait(AGAIN_S)

    def _refusal(self, status: int, answer: dict[str, Any]) -> str:
        error = answer.get("error")
        error = error if isinstance(error, dict) else {}  # of a proxy, say
        if status == 401:
            return (
                f"{self.config.join} refuses the key: set {VARIABLE} to the run's key on this machine (of a run that "
                f"was started without {VARIABLE}: the content of {FILE} in its folder)"
            )
        if error.get("code") == "route_unknown":
            return f"the orchestrator at {self.config.join} is of a version that workers cannot join; update it"
        return str(error.get("message") or f"the orchestrator answers {status}")

    def _first_known(self, told: dict[str, Any]) -> dict[str, Any]:
        """Waits until the run's own workers, where it has any, say what others are compared with."""
        deadline = time.monotonic() + self.config.wait_s
        while told["first"] is None and told["worker"].get("local_workers"):
            if time.monotonic() >= deadline:
                raise JoinFailedError(
                    f"the run's own workers of {self.config.env!r} have not listed their examples within wait_s = "
                    f"{self.config.wait_s:g} s; look into their logs, or raise --wait-s"
                )
            self._say_once(f"waiting for the run's own workers of {self.config.env!r} to list their examples")
            self.stop.wait(AGAIN_S)
            told = self._asked(deadline)
        return told

    def _say_once(self, message: str) -> None:
        if message != self._said:
            self.console.say(message)
            self._said = message

    def _check_stopped(self) -> None:
        if self.stop.is_set():
            raise Stopped

    # What is printed before the start

    def _variables(self, told: dict[str, Any], settings: JoinedSettings) -> dict[str, str]:
        """This machine's stored secrets and files. Reports what the run's own workers have and is missing here."""
        identifier = str(told["id"]).split("@", 1)[0]
        try:
            own = stored.of_environment(identifier.rsplit("/", 1)[-1], identifier, self.config.env) | dict(self._files)
        except StateError as error:
            raise JoinRefusedError(str(error)) from None
        # Those that are exported here are secrets as well.
        own = {name: os.environ[name] for name in settings.variables if name in os.environ} | own
        missing = [name for name in settings.variables if name not in own]
        self.console.say(
            "secrets are not sent: the run's own workers of this environment have "
            + (f"the variables {', '.join(settings.variables)}" if settings.variables else "no variables of their own")
        )
        if missing:
            self.console.say(
                f"warning: not set here: {', '.join(missing)}; export them, give a file of them (--env-files), or keep "
                f"them (primerl env secret set), or rollouts that need them fail"
            )
        return own

    def _say_what_is_joined(self, told: dict[str, Any]) -> None:
        first = told["first"]
        has = "no worker has listed its examples yet"
        if first is not None:
            packages = ((first.get("listing") or {}).get("packages") or {}).items()
            versions = "".join(f", {name} {version}" for name, version in sorted(packages))
            has = f"the run's first worker has {first['examples']} examples{versions}"
        self.console.say(f"joining {self.config.join} for {told['role']} environment {self.config.env!r}; {has}")

    # The workers

    def _watch(self, placement: Placement, described: dict[str, ProcessConfig]) -> int:
        for process in described.values():
            self.console.say(f"{process.name}: {process.log}")
        while True:
            if self.stop.is_set():
                self.console.say("stopping; rollouts that run are handed back")
                placement.stop(grace_s=STOP_S)
                return 0
            for ended in placement.watch(POLL_S):
                self._ended(placement, described, ended)
            servers.tell_lost(self.console.say)
            if placement.lost is not None:
                raise JoinFailedError(placement.lost)
            if self._is_over():
                # Those that had not joined by then would look for it until wait_s are up.
                placement.stop(grace_s=STOP_S)
            if all(process.ended for process in placement.by_name.values()):
                return self._exit_code()

    def _is_over(self) -> bool:
        """A worker has ended in order, and since its orchestrator's last words none is there."""
        now = time.monotonic()
        if self.ended_at is None or now < self.ended_at + LAST_WORDS_S:
            return False
        try:
            ask(self.config.join, "/envs/config", within_s=ANSWER_S, environment=self.config.env)
        except UnansweredError:
            return now >= self.ended_at + OVER_S
        # The run continues; when it ends later, the orchestrator tells each worker itself.
        self.ended_at = None
        return False

    def _ended(self, placement: Placement, described: dict[str, ProcessConfig], process: Process) -> None:
        if process.code == 0:
            self.console.say(f"{process.name} has ended")
            self.ended_at = time.monotonic()
            return
        resolved = described[process.name].config
        assert isinstance(resolved, EnvWorkerConfig)
        left = signed_off(self.config.join, process, resolved)
        if not gave_up("env-worker", process, left.was_registered) and self.restarts.has_one_left(process.name):
            self.console.say(describe_end(process, left.told()))
            self.console.say(f"{process.name} is started again")
            start(placement, described[process.name])
        else:
            self.console.say(describe_end(process, left.told() + self.restarts.used_up(process.name)))
            self.failed[process.name] = process

    def _exit_code(self) -> int:
        if not self.failed:
            self.console.say("the run is over")
            return 0
        refused = all(process.code == BAD_INPUT for process in self.failed.values())
        return BAD_INPUT if refused else FAILED


def _settings(told: dict[str, Any]) -> JoinedSettings:
    try:
        found: JoinedSettings = JoinedSettings.model_validate(told["worker"])
        return found
    except ValidationError as error:
        raise JoinRefusedError(
            "this version of primerl cannot use what the orchestrator says of the environment; install the run's "
            f"version here: {describe(error, JoinedSettings)}"
        ) from None


def workers(
    config: JoinConfig,
    told: dict[str, Any],
    settings: JoinedSettings,
    variables: Mapping[str, str],
    folder: Path,
) -> list[ProcessConfig]:
    """One process a worker; `folder` takes their files."""
    host = socket.gethostname()
    found = []
    for index in range(config.workers):
        resolved = EnvWorkerConfig(
            orchestrator_url=config.join.rstrip("/"),
            environment=config.env,
            role=told["role"],
            worker_name=f"env_{config.env}_{index}@{host}",
            id=told["id"],
            args=settings.args,
            seed=settings.seed,
            held_out=settings.held_out,
            max_concurrent=config.max_concurrent or settings.max_concurrent,
            memory_mb=config.memory_mb or settings.memory_mb,
            cpus=config.cpus or settings.cpus,
            unreachable_s=config.wait_s,
            limits=told["limits"],
            log=settings.log,
            metrics_port=resolve.port_of(config.metrics_port, index),
        )
        log = Path(os.path.abspath(os.path.expanduser(config.log_dir))) / "envs" / str(told["role"]) / config.env
        name = f"env_{config.env}_{index}"
        found.append(
            ProcessConfig(
                kind="env-worker",
                name=name,
                config=resolved,
                file=folder / "configs" / f"{name}.toml",
                log=log / f"env_worker_{index}.log",
                threads=1,
                variables=variables,
                python=None if config.python is None else lookup.interpreter(config.python),
            )
        )
    return resolve.spread_over_cores(found)
