"""`primerl serve --tinker @ file`: one process that listens and trains, and engines that it starts and watches.

Exit codes: 0 stopped by SIGTERM, 130 by Ctrl-C, 1 an engine failed too often, 2 bad input: nothing was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.serve import ServeConfig
from primerl.launch import cluster, placing
from primerl.launch.placement.commands import start
from primerl.launch.placement.protocol import Placement, Plan, machines
from primerl.launch.preflight import hub, kinds
from primerl.launch.preflight.output_folder import check_output_dir, claimed
from primerl.launch.registration import registered
from primerl.launch.report.logs import describe_end
from primerl.launch.slurm import submission, within
from primerl.launch.supervise.failures import RefusedError
from primerl.launch.supervise.watching import Restarts
from primerl.net import addresses
from primerl.process import signals
from primerl.process.log_levels import LEVELS
from primerl.runs.served import KIND, note_url
from primerl.tinker import checks, places
from primerl.tinker.checks import KEY, KEY_BEGINS, Checked
from primerl.tinker.clients import BaseModel, on_one_device
from primerl.tinker.engines import Pool
from primerl.tinker.page import Page
from primerl.tinker.records import Limits
from primerl.tinker.routes import application
from primerl.tinker.service import Service
from primerl.train.distributed.ranks import keep_to, own_device
from primerl.train.model.packed_model import ModelError

log = logging.getLogger("primerl.tinker")
said = logging.getLogger("primerl.tinker.serve")
"""What is printed as well: for the log's file alone."""

ENGINES_MODEL = "engines_model"
"""Folder in output_dir: the base model with an output layer of its own, where it is tied."""
LOG = "server.log"
TEND_S = 30.0
WATCH_S = 0.5
STOP_S = 5.0
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def serve(config: ServeConfig) -> int:
    """Serves until it is asked to stop, or submits the job that does. Raises ConfigError before anything starts."""
    begun = placing.begun(config, _say, saves=False)
    config, placement = begun.config, begun.placement
    check_output_dir(config.output_dir, clean=config.clean_output_dir, goes_on=kinds.holds(KIND), kind=KIND)
    key = checks.key_of(config, submits=begun.submits)
    checked = checks.checked(config)
    config, shared_gpu = places.with_share(config, checked.backend)
    plan = places.plan(placement, config, places.engines(config, checked))
    if begun.submits:
        # Without a host, the job takes its node's address.
        if "host" in config.model_fields_set:
            places.check_reached(config.host, placement, plan)
        return submission.submit(config, _say, command="serve --tinker", goes_on=lambda _: True)
    # The folder, which may be emptied, comes after all that may refuse the start.
    with (
        _listening(config, key, placement, plan) as listener,
        claimed(config.output_dir, clean=config.clean_output_dir, kind=KIND) as output_dir,
    ):
        if config.dry_run:
            _say(f"where the trainer, which is the server's own process, and the engines would run:\n{plan.table()}")
            _say("everything checked; nothing was started")
            return 0
        _start_logging(config, output_dir)
        checks.note_key(key, output_dir / "run", _say)
        served = checks.for_engines(config, checked, output_dir / ENGINES_MODEL)
        if shared_gpu is not None:
            _say(shared_gpu)
        goes_on = not config.clean_output_dir
        with registered(config, output_dir, _say, goes_on=goes_on) as session, placement:
            try:
                # Reserves a cluster's nodes.
                cluster.prepare(placement, output_dir, _say, signals.check)
                places.take(placement, plan)
                server = _Server(config, key, checked, served, output_dir, listener, placement, begun.limit)
                code = asyncio.run(server.run())
            except RefusedError as error:
                raise ConfigError.like(error) from None
            # One that was asked to stop is listed as stopped.
            session.exit_code = INTERRUPTED if code == 0 else code
    return within.ended(config, code, begun.limit, _say)


def _start_logging(config: ServeConfig, output_dir: Path) -> None:
    """To the terminal, and to a file that `primerl run logs` reads."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=LEVELS[config.log.level], format=form)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = output_dir / "logs"
    folder.mkdir(exist_ok=True)
    to_file = logging.FileHandler(folder / LOG, encoding="utf-8", delay=True)
    to_file.setFormatter(logging.Formatter(form))
    log.addHandler(to_file)
    said.propagate = False
    said.setLevel(logging.INFO)
    said.addHandler(to_file)


def _listening(
    config: ServeConfig, key: str | None, placement: Placement, plan: Plan
) -> contextlib.closing[socket.socket]:
    """Bound before anything is started. Raises ConfigError, also where other machines could call without a key, or
    engines on other nodes could not join."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol's number, by which asyncio knows that small answers are not to be held back (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError.at(
            "port", f"{config.host}:{config.port} cannot be listened on ({error}); choose another"
        ) from None
    host = listener.getsockname()[0]
    try:
        if key is None and not addresses.is_loopback(host):
            raise checks.exposed(config.host)
        places.check_reached(host, placement, plan)
    except ConfigError:
        listener.close()
        raise
    return contextlib.closing(listener)


class _Server:
    def __init__(
        self,
        config: ServeConfig,
        key: str | None,
        checked: Checked,
        served: Path,
        output_dir: Path,
        listener: socket.socket,
        placement: Placement,
        limit: within.TimeLimit | None,
    ) -> None:
        """`served`: the model's folder as engines load it. `placement`: entered. `limit`: of the job that this is."""
        self._config, self._key, self._checked, self._output_dir = config, key, checked, output_dir
        self._served = served
        self._listener = listener
        self._placement = placement
        self._limit = limit
        host, port = listener.getsockname()[:2]
        joined_at = machines(placement).own_address() if addresses.is_unspecified(host) else host
        self.url, self._joined_at = addresses.url_of(host, port), addresses.url_of(joined_at, port)
        self._engines_key = secrets.token_hex(32)
        self._restarts = Restarts(config.restarts)
        self._failure: str | None = None
        self._interrupted = False

    async def run(self) -> int:
        # One for what torch computes, and one that waits for the placement, which one thread uses at a time.
        thread, watching = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("trainer", "placement"))
        starting = places.Starting(self._served, self._joined_at, self._engines_key)
        described = {one.name: one for one in places.engines(self._config, self._checked, starting)}
        for process in described.values():
            files.write(process)
            start(self._placement, process)
        loop = asyncio.get_running_loop()
        _say(f"loading {self._checked.folder}; {len(described)} engines start, logs in {self._output_dir / 'logs'}")
        try:
            base = await loop.run_in_executor(thread, self._base)
        except ModelError as error:
            raise ConfigError.at("model.path", str(error)) from None
        pool = Pool(list(described), self._checked.folder.name, thread)
        service = Service(base, pool, self._output_dir, self._limits(), self._tokenizer())
        page = Page(service, self._about())
        app = application(service, self._key, self._engines_key, self._checked.context, page)
        server = _Uvicorn(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=75))
        tasks = [
            asyncio.create_task(self._watch(watching, described, pool, server)),
            asyncio.create_task(_tend(service)),
            asyncio.create_task(self._announce(pool, server)),
        ]
        for task in tasks:
            task.add_done_callback(lambda ended: self._check(ended, server))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number, server)
        try:
            await server.serve([self._listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
            thread.shutdown(wait=False, cancel_futures=True)
            watching.shutdown(cancel_futures=True)
            self._placement.stop(grace_s=STOP_S)
        if self._failure is not None:
            _say(f"error: {self._failure}")
            return FAILED
        _say("stopped; saved states stay, and a server that is started again in the same output_dir has them")
        return INTERRUPTED if self._interrupted else 0

    def _about(self) -> dict[str, Any]:
        """What the page says of the server."""
        names = self._limits().names
        return {"folder": self._output_dir.name, "output_dir": os.fspath(self._output_dir), "model": names[0]}

    def _stop(self, number: int, server: uvicorn.Server) -> None:
        self._interrupted = number == signal.SIGINT
        server.should_exit = True
        # Long polls of clients would hold it up.
        server.force_exit = True

    def _base(self) -> BaseModel:
        given = self._config.trainer
        computation = on_one_device(
            dtype=given.dtype,
            activation_checkpointing=given.activation_checkpointing,
            shared_prefixes=given.shared_prefixes,
            threads=given.threads,
        )
        if given.threads:
            import torch

            torch.set_num_threads(given.threads)
        keep_to(places.trainer_share(self._config), own_device())
        trusted = self._config.model.trust_remote_code
        base = BaseModel(self._checked.folder, computation, given.lora_alpha, trusted=trusted)
        _say(f"the trainer computes in {str(base.model.dtype).removeprefix('torch.')} on {base.device}")
        return base

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(os.fspath(self._checked.folder / "tokenizer.json"))

    def _limits(self) -> Limits:
        name = self._config.model.path if hub.is_hub_name(self._config.model.path) else self._checked.folder.name
        given, timeouts = self._config.trainer, self._config.timeouts
        return Limits(
            # By its folder, SDK and cookbooks on this machine find its tokenizer without a hub.
            names=tuple(dict.fromkeys([*(self._config.model.names or [name]), os.fspath(self._checked.folder)])),
            max_rank=given.max_rank,
            max_clients=given.max_clients,
            most_tokens=given.max_tokens,
            context=self._checked.context,
            most_samples=self._config.inference.max_num_seqs,
            gap_s=timeouts.gap_s,
            session_s=timeouts.session_s,
        )

    async def _announce(self, pool: Pool, server: uvicorn.Server) -> None:
        try:
            await asyncio.wait_for(pool.ready.wait(), self._config.timeouts.start_s)
        except TimeoutError:
            missing = ", ".join(one.name for one in pool.engines.values() if one.url is None)
            self._fail(
                f"engines were not ready within timeouts.start_s = {self._config.timeouts.start_s:g} s: {missing} "
                f"(logs: {self._output_dir / 'logs'}); raise it where the start is only slow",
                server,
            )
            return
        shown = f"{KEY}=(its value here)" if self._key else f"{KEY}={KEY_BEGINS}local"
        names = ", ".join(self._limits().names)
        try:
            note_url(self._output_dir, self.url)
        except OSError as error:
            log.warning("the list of runs shows this server as starting, as its address cannot be noted: %s", error)
        _say(f"ready: TINKER_BASE_URL={self.url} {shown}; base models: {names}")
        _say(f"the server's page: {self.url}/")

    def _check(self, ended: asyncio.Task[None], server: uvicorn.Server) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._fail(f"{type(error).__name__}: {error}", server)

    def _fail(self, reason: str, server: uvicorn.Server) -> None:
        self._failure = reason
        server.should_exit = server.force_exit = True

    async def _watch(
        self, watching: ThreadPoolExecutor, described: dict[str, ProcessConfig], pool: Pool, server: uvicorn.Server
    ) -> None:
        placement, loop = self._placement, asyncio.get_running_loop()
        while True:
            ended = await loop.run_in_executor(watching, placement.watch, WATCH_S)
            if placement.lost is not None:
                self._fail(placement.lost, server)
                return
            try:
                if self._limit is not None:
                    self._limit.check()
            except within.TimeIsUp:
                _say(f"stopping: {within.REASON}")
                self._stop(signal.SIGINT, server)
                return
            for process in ended:
                await pool.lost(process.name)
                if not self._restarts.has_one_left(process.name) or process.code == BAD_INPUT:
                    self._fail(describe_end(process, self._restarts.used_up(process.name)), server)
                    return
                log.warning("%s %s; it is started again", process.name, process.describe_end())
                start(placement, described[process.name])


def _say(text: str) -> None:
    """Prints it, and writes it to the log."""
    print(text, flush=True)
    said.info(text)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Signals are this module's."""
        yield


async def _tend(service: Service) -> None:
    while True:
        await asyncio.sleep(TEND_S)
        before = time.monotonic()
        await service.tend()
        if time.monotonic() - before > TEND_S:
            log.warning("letting old sessions go has taken %.0f s", time.monotonic() - before)
