"""An env worker: leases rollouts from the orchestrator, runs many of them at once, reports how they ended.

    main thread   event loop: one task per rollout, woken by the client when there is something to do
    client        thread in Rust: leases, heartbeats, results, model calls (`primerl._core.EnvClient`)

The client continues while an environment blocks the event loop, so no lease is lost by a slow reward function; a third
thread says for how long it does, and where (`watcher`).

What ends a wait: a rollout's lease carries a deadline, after which it is reported as timed out; the orchestrator can
cancel a rollout by its answer to a heartbeat; an orchestrator that is silent for `unreachable_s` ends the worker.
Exit codes: 0 the run is over or the worker was asked to stop, 1 the orchestrator was lost or the tailnet could not be
joined, 2 the environment or the config cannot be used, 3 its node left the tailnet, 4 the environment blocked the
worker until a lease had run out (the client ends it). `sys.exit` in a rollout is that rollout's failure (`exits`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from primerl import _core
from primerl.envs import exits, machine, overrides, versions
from primerl.envs.generations import choice
from primerl.envs.interface import (
    EnvironmentRefusedError,
    Generation,
    module_name,
)
from primerl.envs.listing import listing_of
from primerl.envs.meter import Meter
from primerl.envs.rollouts import Rollouts
from primerl.envs.settings import LogConfig, WorkerConfig
from primerl.envs.tailnet import NODE_LOST, Node, TailnetError, join, proxy_variables, tail
from primerl.net.requests import unusable_proxies, without_proxy
from primerl.process import redaction
from primerl.process.imports import importing
from primerl.process.log_levels import LEVELS
from primerl.process.signals import stop_signals
from primerl.run_key import run_key

log = logging.getLogger("primerl.envs")


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
        code = NODE_LOST  # the loss of the node is the cause
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
            "%s names a SOCKS proxy, which model clients cannot use without `socksio`; the variable is removed for the "
            "environment (pip install socksio, or name an HTTP proxy)",
            name,
        )
        del os.environ[name]


def _run_worker(config: WorkerConfig, node: Node | None) -> int:
    if config.memory_mb is not None:
        machine.limit_memory(config.memory_mb)
    if config.cpus is not None:
        machine.limit_cores(config.cpus, config.first_cpu)
    root = f"{config.orchestrator_url.rstrip('/')}/v1"
    cores = machine.cores()
    try:
        loaded = _load(config, root)
        _describe(config, loaded, cores)
        meter = Meter(config.metrics_port, len(cores) or os.cpu_count() or 1)
        client = _client(config, loaded)
    except EnvironmentRefusedError as error:
        log_to_stderr(config.log)
        log.error("%s", error, exc_info=error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rollouts = Rollouts(
        client,
        loaded.examples,
        meter,
        package=module_name(config.id),
        whole_groups=loaded.scores_groups,
        limits=config.limits,
    )
    # Not the event loop's own handlers: those end with it, and a signal in the last moments would change the exit code.
    for number in stop_signals():
        signal.signal(number, lambda number, _: rollouts.stop(f"stopped by {signal.Signals(number).name}"))
    if node is not None:
        node.on_loss(lambda reason: rollouts.stop(reason, NODE_LOST))
    try:
        return exits.run_to_end(rollouts.work(loaded.generation, loaded.env, root))
    except (SystemExit, KeyboardInterrupt) as error:
        # Outside of any rollout: as it began to serve, or when it was torn down.
        log.exception("environment %s ended the worker", config.id)
        print(f"error: environment {config.id!r}: {exits.told(error)}", file=sys.stderr)
        return 1
    finally:
        meter.close()


@dataclass(frozen=True)
class _Loaded:
    """The environment, with its examples."""

    generation: Generation
    env: Any
    examples: Sequence[Any]
    listing: dict[str, Any]

    @property
    def scores_groups(self) -> bool:
        return self.generation.scores_groups(self.env)


def _load(config: WorkerConfig, root: str) -> _Loaded:
    """Raises EnvironmentRefusedError."""
    with importing(), exits.refused(config.id):
        generation = choice.chosen(config.id)
        own, asked = overrides.split(config.args)
        env = generation.load(config.id, own, root)
        # Classic verifiers has handlers of its own, by then.
        log_to_stderr(config.log)
        listed = generation.list_examples(env, config.id, config.seed, config.role, config.held_out)
        examples = asked.applied(generation, config.id, listed)
        return _Loaded(generation, env, examples, listing_of(config.id, examples, generation.key))


def _describe(config: WorkerConfig, loaded: _Loaded, cores: list[int]) -> None:
    for remark in (loaded.generation.remark(loaded.env, config.id, config.role), versions.remark(config.id)):
        if remark is not None:
            log.warning("%s", remark)
    packages = ", ".join(f"{name} {version}" for name, version in loaded.listing["packages"].items())
    log.info("environment %s: %d examples (%s), worker %s", config.id, len(loaded.examples), packages, config.name)
    if config.cpus is not None:
        log.info("%s", _bound(config.cpus, cores))
    if config.held_out:
        log.info("the first %d examples of the list are held out, and not among these", config.held_out)


def _client(config: WorkerConfig, loaded: _Loaded) -> _core.EnvClient:
    """Raises ValueError."""
    return _core.EnvClient(
        orchestrator_url=config.orchestrator_url,
        api_key=run_key(),
        environment=config.environment,
        role=config.role,
        name=config.name,
        examples=len(loaded.examples),
        listing=loaded.listing,
        max_concurrent=config.max_concurrent,
        give_up_s=config.unreachable_s,
        whole_groups=loaded.scores_groups,
    )


def _bound(cpus: int, cores: list[int]) -> str:
    """Which cores the worker got, for the log."""
    if not cores:
        return f"cpus = {cpus} has no effect: this system binds no process to cores"
    fewer = f" (cpus = {cpus}, and the machine has no more)" if len(cores) < cpus else ""
    return f"bound to {len(cores)} of {os.cpu_count()} cores: {', '.join(map(str, cores))}{fewer}"
