"""The rollouts of an env worker: the event loop's half, woken by the client when there is something to do."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from primerl import _core
from primerl.envs import exits, watcher
from primerl.envs.deadline import TimeUpError, within
from primerl.envs.interface import (
    Address,
    Generation,
    Outcome,
    Runner,
    failure,
    sendable,
)
from primerl.envs.limits import NO_LIMITS, RolloutLimits
from primerl.envs.meter import Meter
from primerl.process import redaction

log = logging.getLogger("primerl.envs")

# After the run is over, rollouts that still run have this long to end or to be cancelled.
FINISH_S = 10.0
# After SIGTERM: for reports under way and the goodbye.
LEAVE_S = 2.0
# A rollout's own limit is this much shorter than its lease, so that its report comes in time.
REPORT_MARGIN = 0.95


class Rollouts:
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
        """`package`: the environment's package."""
        self._client = client
        self._package = package
        self._meter = meter
        self._whole_groups = whole_groups
        self._limits = limits
        self._examples = examples
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._model = ""
        self._asked_for: dict[str, str] = {}
        self._runner: Runner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[int] | None = None
        self._stopped: tuple[int, str] | None = None

    def stop(self, reason: str, code: int = 0) -> None:
        """From a signal handler or another thread, at any time: before, in and after
        [`work`][primerl.envs.rollouts.Rollouts.work]."""
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
                    # Not to generations of others that do not know of it, where it is not asked for.
                    self._asked_for = {"demonstration": key} if (key := notice.demonstration) else {}
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
        """Leases that are run together: each alone, or all of a group, which arrive in one answer."""
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
        """What an environment says of a failure goes to the journal, where anyone may read it."""
        try:
            self._client.report(lease.rollout, sendable(redaction.redacted(outcome)))
        except Exception as error:  # whatever it holds: without a report the orchestrator waits until its time is up
            log.exception("%s: its report cannot be sent", _label(lease))
            said = redaction.redact(f"its report cannot be sent: {type(error).__name__}: {error}")
            self._client.report(lease.rollout, sendable(failure("environment", said, type(error).__name__)))

    async def _outcomes(self, leases: list[_core.Lease]) -> list[Outcome]:
        """The outcomes, whatever happens but a cancellation from outside."""
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
            example,
            _address(lease),
            model=self._model,
            sampling=lease.sampling,
            time_limit=time_limit,
            **self._asked_for,
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
            **self._asked_for,
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
