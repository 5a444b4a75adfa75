"""An env worker: leases rollouts from the orchestrator, runs many of them at once, reports how they ended.

    main thread   event loop: one task per rollout, woken by the client when there is something to do
    client        thread in Rust: leases, heartbeats, results, model calls (`primerl._core.EnvClient`)

The client goes on while an environment blocks the event loop, so no lease is lost by a slow reward function; a third
thread says for how long it does, and where (`watcher`).

What ends a wait: a rollout's lease carries a deadline, after which it is reported as timed out; the orchestrator can
cancel a rollout by its answer to a heartbeat; an orchestrator that is silent for `unreachable_s` ends the worker.
Exit codes: 0 the run is over or the worker was told to stop, 1 the orchestrator was lost or the tailnet could not be
joined, 2 the environment or the config cannot be used, 3 its node left the tailnet, 4 the environment blocked the
worker until a lease had run out (the client ends it). `sys.exit` in a rollout is that rollout's failure (`exits`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from primerl import _core
from primerl.envs import exits, machine, versions, watcher
from primerl.envs.deadline import TimeUpError, within
from primerl.envs.generations import choice
from primerl.envs.interface import (
    Address,
    EnvironmentRefusedError,
    Generation,
    Outcome,
    Runner,
    failure,
    module_name,
    sendable,
)
from primerl.envs.limits import NO_LIMITS, RolloutLimits
from primerl.envs.listing import listing_of
from primerl.envs.meter import Meter
from primerl.envs.settings import LogConfig, WorkerConfig
from primerl.envs.tailnet import NODE_LOST, Node, TailnetError, join, proxy_variables, tail
from primerl.net.requests import unusable_proxies, without_proxy
from primerl.process import redaction
from primerl.process.imports import importing
from primerl.process.log_levels import LEVELS
from primerl.process.signals import stop_signals
from primerl.run_key import run_key

log = logging.getLogger("primerl.envs")

# After the run is over, rollouts that still run have this long to end or to be cancelled.
FINISH_S = 10.0
# After SIGTERM: for reports under way and the goodbye.
LEAVE_S = 2.0
# A rollout's own limit is this much shorter than its lease, so that its report comes in time.
REPORT_MARGIN = 0.95


def log_to_stderr(config: LogConfig) -> None:
    """The worker's lines and those of every library; verifiers' by a level of their own, whichever of its modules."""
    logging.basicConfig(
        level=LEVELS[config.level],
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    theirs = logging.getLogger("verifiers")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(LEVELS[config.vf_level])


def run_worker(config: WorkerConfig) -> int:
    """Runs until the run is over; returns the exit code. On the main thread: environments may set signal handlers."""
    log_to_stderr(config.log)
    redaction.note_own()
    if config.tailnet is None:
        _reach_directly(config.orchestrator_url)
        return _run_worker(config, None)
    try:
        node = join(config.tailnet)
    except TailnetError as error:
        print(f"{tail(config.tailnet.log)}\nerror: {error}", file=sys.stderr)
        return 1
    os.environ.update(proxy_variables(node.port, config.orchestrator_url))
    try:
        code = _run_worker(config, node)
    finally:
        node.leave()
    if node.lost is not None and code != 0:
        code = NODE_LOST  # whatever failed for it
    if code == NODE_LOST:
        # The last line of its log is why.
        print(f"{tail(config.tailnet.log)}\nerror: {node.lost}", file=sys.stderr)
    return code


def _reach_directly(orchestrator_url: str) -> None:
    """Before a client is made: those of verifiers, and of the programs it starts, take the user's proxy for the
    orchestrator too."""
    os.environ.update(without_proxy(os.environ, orchestrator_url))
    for name in unusable_proxies(os.environ):
        log.warning(
            "%s names a SOCKS proxy, with which no client of a model can be made unless `socksio` is installed; the "
            "environment does not get it (pip install socksio, or name an HTTP proxy)",
            name,
        )
        del os.environ[name]


def _run_worker(config: WorkerConfig, node: Node | None) -> int:
    if config.memory_mb is not None:
        machine.limit_memory(config.memory_mb)
    if config.cpus is not None:
        machine.limit_cores(config.cpus, config.first_cpu)
    root = f"{config.orchestrator_url.rstrip('/')}/v1"
    try:
        with importing(), exits.refused(config.id):
            generation = choice.chosen(config.id)
            env = generation.load(config.id, config.args, root)
            # Classic verifiers has handlers of its own, by then.
            log_to_stderr(config.log)
            examples = generation.list_examples(env, config.id, config.seed, config.role, config.held_out)
            listing = listing_of(config.id, examples, generation.key)
    except EnvironmentRefusedError as error:
        log_to_stderr(config.log)
        log.error("%s", error, exc_info=error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 2
    for remark in (generation.remark(env, config.id, config.role), versions.remark(config.id)):
        if remark is not None:
            log.warning("%s", remark)
    packages = ", ".join(f"{name} {version}" for name, version in listing["packages"].items())
    log.info("environment %s: %d examples (%s), worker %s", config.id, len(examples), packages, config.name)
    cores = machine.cores()
    if config.cpus is not None:
        log.info("%s", _bound(config.cpus, cores))
    if config.held_out:
        log.info("the first %d examples of the list are held out, and not among these", config.held_out)
    try:
        meter = Meter(config.metrics_port, len(cores) or os.cpu_count() or 1)
        client = _core.EnvClient(
            orchestrator_url=config.orchestrator_url,
            api_key=run_key(),
            environment=config.environment,
            role=config.role,
            name=config.name,
            examples=len(examples),
            listing=listing,
            max_concurrent=config.max_concurrent,
            give_up_s=config.unreachable_s,
            whole_groups=generation.scores_groups(env),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    worker = _Worker(
        client,
        examples,
        meter,
        package=module_name(config.id),
        whole_groups=generation.scores_groups(env),
        limits=config.limits,
    )
    # Not the event loop's own handlers: those end with it, and a signal in the last moments would change the exit code.
    for number in stop_signals():
        signal.signal(number, lambda number, _: worker.stop(f"stopped by {signal.Signals(number).name}"))
    if node is not None:
        node.on_loss(lambda reason: worker.stop(reason, NODE_LOST))
    try:
        return exits.run_to_end(worker.work(generation, env, root))
    except (SystemExit, KeyboardInterrupt) as error:
        # Outside of any rollout: as it began to serve, or when it was torn down.
        log.exception("environment %s ended the worker", config.id)
        print(f"error: environment {config.id!r}: {exits.told(error)}", file=sys.stderr)
        return 1
    finally:
        meter.close()


def _bound(cpus: int, cores: list[int]) -> str:
    """How the wish for so many cores was met."""
    if not cores:
        return f"cpus = {cpus} has no effect: this system binds no process to cores"
    fewer = f" (cpus = {cpus}, and the machine has no more)" if len(cores) < cpus else ""
    return f"bound to {len(cores)} of {os.cpu_count()} cores: {', '.join(map(str, cores))}{fewer}"


class _Worker:
    """State of the event loop: rollouts by number, and model calls that wait for an answer."""

    def __init__(
        self,
        client: _core.EnvClient,
        examples: Sequence[Any],
        meter: Meter,
        *,
        package: str = "",
        whole_groups: bool = False,
        limits: RolloutLimits = NO_LIMITS,
    ) -> None:
        """`package`: the environment's."""
        self._client = client
        self._package = package
        self._meter = meter
        self._whole_groups = whole_groups
        self._limits = limits
        self._examples = examples
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._model = ""
        self._runner: Runner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[int] | None = None
        self._stopped: tuple[int, str] | None = None

    def stop(self, reason: str, code: int = 0) -> None:
        """From a signal handler or another thread, at any time: before, in and after
        [`work`][primerl.envs.worker._Worker.work]."""
        self._stopped = (code, reason)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, code, reason)

    async def work(self, generation: Generation, env: Any, root: str) -> int:
        loop = self._loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if self._stopped is not None:
            self._end(*self._stopped)
        with watcher.Watcher(self._client, self._package).watching():
            return await self._serve(loop, generation, env, root)

    async def _serve(self, loop: asyncio.AbstractEventLoop, generation: Generation, env: Any, root: str) -> int:
        assert self._ended is not None
        async with generation.serving(env, root, self._post, self._limits) as runner:
            self._runner = runner
            loop.add_reader(self._client.fileno(), self._on_notices)
            try:
                code = await self._ended
                if code == 0:
                    log.info("ending; %d rollouts still run", len(self._rollouts))
                return code
            finally:
                await self._cancel(list(self._rollouts))
                loop.remove_reader(self._client.fileno())
                await asyncio.to_thread(self._client.leave, LEAVE_S)

    def _end(self, code: int, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            (log.info if code == 0 else log.error)("%s", reason)
            self._ended.set_result(code)

    def _on_notices(self) -> None:
        for notice in self._client.notices():
            match notice:
                case _core.Answered():
                    self._answered(notice)
                case _core.Leased():
                    for leases in self._units(notice.leases):
                        self._start(leases)
                case _core.Cancelled():
                    for rollout in notice.rollouts:
                        self._stop(rollout)
                case _core.LeasesVoid():
                    log.warning("the orchestrator does not know this worker any more; stopping its rollouts")
                    for rollout in list(self._rollouts):
                        self._stop(rollout)
                case _core.Registered():
                    self._model = notice.model
                    log.info("registered as worker %d; model %s", notice.worker, notice.model)
                case _core.Problem():
                    log.warning("%s", notice.message)
                case _core.Ended():
                    self._no_more_leases(notice)

    def _no_more_leases(self, ended: _core.Ended) -> None:
        if ended.kind != "finished":
            code = 2 if ended.kind == "refused" else 1
            print(f"error: {ended.message}", file=sys.stderr)
            self._end(code, ended.message)
            return
        log.info("%s", ended.message)
        task = asyncio.ensure_future(self._finish())
        task.add_done_callback(lambda _: self._end(0, "all rollouts have ended"))

    async def _finish(self) -> None:
        if self._rollouts:
            await asyncio.wait(self._rollouts.values(), timeout=FINISH_S)

    # Rollouts

    def _units(self, leases: Sequence[_core.Lease]) -> list[list[_core.Lease]]:
        """What is run together: each by itself, or all of a group, which come in one answer."""
        units: dict[int, list[_core.Lease]] = {}
        for lease in leases:
            units.setdefault(lease.group if self._whole_groups else lease.rollout, []).append(lease)
        return list(units.values())

    def _start(self, leases: list[_core.Lease]) -> None:
        task = asyncio.ensure_future(self._roll_out(leases))
        self._rollouts |= {lease.rollout: task for lease in leases}

        def forget(done: asyncio.Task[None]) -> None:
            for lease in leases:
                if self._rollouts.get(lease.rollout) is done:
                    del self._rollouts[lease.rollout]

        task.add_done_callback(forget)

    def _stop(self, rollout: int) -> None:
        task = self._rollouts.get(rollout)
        if task is None:
            self._client.release(rollout)
        else:
            task.cancel()

    async def _cancel(self, rollouts: list[int]) -> None:
        tasks = {self._rollouts[rollout] for rollout in rollouts}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_S)

    async def _roll_out(self, leases: list[_core.Lease]) -> None:
        """Reports exactly one outcome of each, or none where they were cancelled."""
        watcher.rollout.set(leases[0].rollout)
        began, ended = time.monotonic(), ["cancelled"] * len(leases)
        for _ in leases:
            self._meter.began()
        try:
            outcomes = await self._outcomes(leases)
            ended = [outcome["error"]["kind"] if outcome["error"] else "ok" for outcome in outcomes]
            for lease, outcome in zip(leases, outcomes, strict=True):
                self._report(lease, outcome)
        finally:
            for how in ended:
                self._meter.ended(how, time.monotonic() - began)

    def _report(self, lease: _core.Lease, outcome: Outcome) -> None:
        """What an environment says of a failure goes to the journal, and from there to whoever looks."""
        try:
            self._client.report(lease.rollout, sendable(redaction.redacted(outcome)))
        except Exception as error:  # whatever it holds: unsaid, the rollout would be waited for until its time is up
            log.exception("%s: its report cannot be sent", _label(lease))
            said = redaction.redact(f"its report cannot be sent: {type(error).__name__}: {error}")
            self._client.report(lease.rollout, sendable(failure("environment", said, type(error).__name__)))

    async def _outcomes(self, leases: list[_core.Lease]) -> list[Outcome]:
        """Of whatever happens but a cancellation from outside."""
        label = _label(leases[0]) if len(leases) == 1 else f"group {leases[0].group} of {len(leases)} rollouts"
        try:
            return await self._run(leases, label)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                # After a new registration the same rollout may have been leased to us again.
                for lease in leases:
                    if self._rollouts.get(lease.rollout) is task:
                        self._client.release(lease.rollout)
                raise
            log.exception("%s failed", label)
            message = "CancelledError: the environment waited for something it had cancelled"
            return [failure("environment", message) for _ in leases]
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever it is, it is this rollout's failure, not the worker's
            log.exception("%s failed", label)
            return [failure("environment", exits.told(error), type(error).__name__) for _ in leases]

    async def _run(self, leases: list[_core.Lease], label: str) -> list[Outcome]:
        example = leases[0].example
        if example >= len(self._examples):
            message = f"example {example} does not exist: there are {len(self._examples)}"
            return [failure("environment", message) for _ in leases]
        time_limit = min(lease.deadline_s for lease in leases) * REPORT_MARGIN
        run = self._run_group if self._whole_groups else self._run_one
        try:
            running = run(leases, self._examples[example], time_limit)
            return await within(time_limit, label, self._package, running)
        except TimeUpError as error:
            return [failure("timeout", str(error)) for _ in leases]

    async def _run_one(self, leases: list[_core.Lease], example: Any, time_limit: float) -> list[Outcome]:
        assert self._runner is not None
        (lease,) = leases
        outcome = await self._runner.run(
            example, _address(lease), model=self._model, sampling=lease.sampling, time_limit=time_limit
        )
        return [outcome]

    async def _run_group(self, leases: list[_core.Lease], example: Any, time_limit: float) -> list[Outcome]:
        assert self._runner is not None
        return await self._runner.run_group(
            example,
            [_address(lease) for lease in leases],
            model=self._model,
            sampling=leases[0].sampling,
            time_limit=time_limit,
        )

    # Model calls

    async def _post(self, url: str, api_key: str, session: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        call = self._client.call(url, api_key, session, body, timeout_s)
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            return await answer
        finally:
            del self._calls[call]
            # Hangs up where the rollout was cancelled; nothing where the answer is here.
            if answer.cancelled():
                self._client.abort(call)

    def _answered(self, notice: _core.Answered) -> None:
        answer = self._calls.get(notice.call)
        self._meter.answered(str(notice.status) if notice.error is None else "none")
        if answer is None or answer.done():
            return
        if notice.error is None:
            answer.set_result((notice.status, notice.body))
        else:
            answer.set_exception((TimeoutError if notice.timed_out else ConnectionError)(notice.error))


def _address(lease: _core.Lease) -> Address:
    return Address(_label(lease), lease.base_url, lease.api_key)


def _label(lease: _core.Lease) -> str:
    return f"rollout {lease.rollout} (group {lease.group}, example {lease.example})"
