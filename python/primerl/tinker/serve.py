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
from safetensors import SafetensorError

from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.process_files import files
from primerl.config.process_files.files import ProcessConfig, absolute, shared
from primerl.config.schema.inference import EngineModel, InferenceConfig, InferenceSettings
from primerl.config.schema.serve import ServeConfig
from primerl.inference import backends
from primerl.inference.backend import UnservableError
from primerl.launch.placement.commands import start
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.preflight import hub, model_folder
from primerl.launch.registration import registered
from primerl.launch.report.logs import describe_end
from primerl.launch.supervise.lock import LOCK, take
from primerl.launch.supervise.watching import Restarts
from primerl.net import addresses
from primerl.process.log_levels import LEVELS
from primerl.run_key import VARIABLE
from primerl.runs.served import note_url
from primerl.tinker import places
from primerl.tinker.clients import BaseModel, on_one_device
from primerl.tinker.engines import Pool
from primerl.tinker.page import Page
from primerl.tinker.records import Limits
from primerl.tinker.routes import application
from primerl.tinker.service import Service
from primerl.tinker.untied import engines_folder
from primerl.train.distributed.ranks import keep_to, own_device
from primerl.train.model.packed_model import ModelError

log = logging.getLogger("primerl.tinker")
said = logging.getLogger("primerl.tinker.serve")
"""What is printed as well: for the log's file alone."""

ENGINES_MODEL = "engines_model"
"""Folder in output_dir: the base model with an output layer of its own, where it is tied."""
LOG = "server.log"
WITH_KEY = "with_key"
"""In output_dir/run: a server that was started there had a key."""
KEY = "TINKER_API_KEY"
KEY_BEGINS = "tml-"
TEND_S = 30.0
WATCH_S = 0.5
STOP_S = 5.0
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def serve(config: ServeConfig) -> int:
    """Serves until it is asked to stop. Raises ConfigError before anything starts."""
    key = _key(config)
    folder, output_dir = _checked(config)
    lock = output_dir / LOCK
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir: cannot use {output_dir}: {error.strerror}; use another folder, or change its permissions"
        ) from None
    with lock.open("w", encoding="utf-8") as file:
        if not take(file):
            raise ConfigError(f"output_dir: another process is using {output_dir}; choose another output_dir")
        _start_logging(config, output_dir)
        with _listening(config) as listener:
            if key is None and not addresses.is_loopback(listener.getsockname()[0]):
                raise ConfigError(_exposed(config.host))
            _note_key(key, lock.parent / WITH_KEY)
            served = _for_engines(config, folder, output_dir)
            config, shared_gpu = places.with_share(config, _backend(config, folder))
            if shared_gpu is not None:
                _say(shared_gpu)
            with registered(config, output_dir, _say, goes_on=True) as session:
                try:
                    code = asyncio.run(_Server(config, key, folder, served, output_dir, listener).run())
                except ConfigError:
                    session.exit_code = BAD_INPUT
                    raise
                # One that was asked to stop is listed as stopped.
                session.exit_code = INTERRUPTED if code == 0 else code
            return code


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


def _key(config: ServeConfig) -> str | None:
    """Raises ConfigError where clients of other machines could call without one, or the SDK would refuse it."""
    key = os.environ.get(KEY)
    if key is not None and not key.startswith(KEY_BEGINS):
        raise ConfigError(
            f"{KEY} has to begin with {KEY_BEGINS}: the SDK refuses any other; for example {KEY_BEGINS}local"
        )
    if key is None and addresses.is_reached_from_elsewhere(config.host):
        raise ConfigError(_exposed(config.host))
    return key


def _note_key(key: str | None, marker: Path) -> None:
    """Says so where this server had a key before, as one that is resumed elsewhere may have lost it."""
    if key is not None:
        marker.touch()
    elif marker.exists():
        _say(
            f"warning: this server had a key before, and {KEY} is not set now: any program of this machine may call it"
        )


def _exposed(host: str) -> str:
    return (
        f"host: {host} can be reached from other machines, and {KEY} is not set; set it here and for clients (it "
        f"begins with {KEY_BEGINS}), or listen on 127.0.0.1"
    )


def _checked(config: ServeConfig) -> tuple[Path, Path]:
    """The model's folder and the output folder. Raises ConfigError."""
    name = config.model.path
    folder = hub.folder_of(name) if hub.is_hub_name(name) else Path(absolute(name))
    problems = Problems()
    with problems.noted():
        model_folder.check_model(folder)
    problems.check()
    with problems.noted():
        model_folder.check_trainable(folder, trusted=config.model.trust_remote_code)
    with problems.noted():
        try:
            backend = backends.named(_backend(config, folder))
            backend.check_model(folder, config.inference.python)
            dtype = config.inference.dtype or backend.default_dtype(config.inference.python)
            backend.check_dtype(folder, dtype, config.inference.python)
        except (UnservableError, ValueError) as error:
            raise ConfigError(str(error)) from None
    limit = model_folder.longest_sequence(folder)
    if limit is not None and config.inference.max_model_len is not None and config.inference.max_model_len > limit:
        problems.found.append(
            f"inference.max_model_len is {config.inference.max_model_len}; the model attends to {limit}"
        )
    problems.check()
    output_dir = Path(absolute(config.output_dir))
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir: {output_dir} is not a folder; choose another output_dir")
    return folder, output_dir


def _for_engines(config: ServeConfig, folder: Path, output_dir: Path) -> Path:
    """The folder that engines load. Raises ConfigError."""
    try:
        return engines_folder(folder, output_dir / ENGINES_MODEL, trusted=config.model.trust_remote_code)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"output_dir: {output_dir / ENGINES_MODEL} cannot be written: {error}") from None


def _backend(config: ServeConfig, folder: Path) -> str:
    return backends.chosen(config.inference.backend, config.inference.python, folder)


def _listening(config: ServeConfig) -> contextlib.closing[socket.socket]:
    """Bound before anything is started. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol's number, by which asyncio knows that small answers are not to be held back (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: {config.host}:{config.port} cannot be listened on ({error}); choose another"
        ) from None
    return contextlib.closing(listener)


class _Server:
    def __init__(
        self,
        config: ServeConfig,
        key: str | None,
        folder: Path,
        served: Path,
        output_dir: Path,
        listener: socket.socket,
    ) -> None:
        """`served`: the model's folder as engines load it."""
        self._config, self._key, self._folder, self._output_dir = config, key, folder, output_dir
        self._served = served
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._engines_key = secrets.token_hex(32)
        self._restarts = Restarts(config.restarts)
        self._failure: str | None = None
        self._interrupted = False

    async def run(self) -> int:
        thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        described = self._described()
        placement = LocalPlacement()
        places.take(places.plan(placement, self._config, described.values()))
        with placement:
            for process in described.values():
                files.write(process)
                start(placement, process)
            loop = asyncio.get_running_loop()
            _say(f"loading {self._folder}; {len(described)} engines start, logs in {self._output_dir / 'logs'}")
            try:
                base = await loop.run_in_executor(thread, self._base)
            except ModelError as error:
                raise ConfigError(f"model.path: {error}") from None
            pool = Pool(list(described), str(described["engine_0"].config.model.name), thread)  # type: ignore[attr-defined]
            context = self._context()
            service = Service(base, pool, self._output_dir, self._limits(), self._tokenizer())
            app = application(service, self._key, self._engines_key, context, Page(service, self._about()))
            server = _Uvicorn(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=75))
            tasks = [
                asyncio.create_task(self._watch(placement, described, pool, server)),
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
                placement.stop(grace_s=STOP_S)
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
        base = BaseModel(self._folder, computation, given.lora_alpha, trusted=self._config.model.trust_remote_code)
        _say(f"the trainer computes in {str(base.model.dtype).removeprefix('torch.')} on {base.device}")
        return base

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(os.fspath(self._folder / "tokenizer.json"))

    def _context(self) -> int:
        longest = self._config.inference.max_model_len or self._config.trainer.max_tokens
        return min(longest, model_folder.longest_sequence(self._folder) or longest)

    def _limits(self) -> Limits:
        name = self._config.model.path if hub.is_hub_name(self._config.model.path) else self._folder.name
        given, timeouts = self._config.trainer, self._config.timeouts
        return Limits(
            # By its folder, SDK and cookbooks on this machine find its tokenizer without a hub.
            names=tuple(dict.fromkeys([*(self._config.model.names or [name]), os.fspath(self._folder)])),
            max_rank=given.max_rank,
            max_clients=given.max_clients,
            most_tokens=given.max_tokens,
            context=self._context(),
            most_samples=self._config.inference.max_num_seqs,
            gap_s=timeouts.gap_s,
            session_s=timeouts.session_s,
        )

    def _described(self) -> dict[str, ProcessConfig]:
        source = self._config.inference
        options = dict(source.vllm)
        if self._config.model.trust_remote_code and source.backend == "vllm":
            options.setdefault("trust-remote-code", True)
        found, backend = {}, _backend(self._config, self._folder)
        for index in range(source.replicas):
            name = f"engine_{index}"
            resolved = InferenceConfig.model_validate(
                {
                    **shared(source, InferenceSettings),
                    "vllm": options,
                    "backend": backend,
                    "gpu_share": places.engine_share(self._config, backend),
                    "start_s": self._config.timeouts.start_s,
                    "max_model_len": self._context(),
                    "logprobs_mode": "raw_logprobs",
                    "model": EngineModel(path=os.fspath(self._served), name=self._folder.name),
                    "seed": index,
                    "join": self.url,
                    "join_as": name,
                    "log": self._config.log,
                }
            )
            found[name] = ProcessConfig(
                kind="inference",
                name=name,
                config=resolved,
                file=self._output_dir / "configs" / f"{name}.toml",
                log=self._output_dir / "logs" / f"{name}.log",
                threads=source.threads,
                variables={VARIABLE: self._engines_key},
            )
        return found

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
        self, placement: LocalPlacement, described: dict[str, ProcessConfig], pool: Pool, server: uvicorn.Server
    ) -> None:
        while True:
            ended = await asyncio.to_thread(placement.watch, WATCH_S)
            if placement.lost is not None:
                self._fail(placement.lost, server)
                return
            for process in ended:
                await pool.lost(process.name)
                if not self._restarts.has_one_left(process.name) or process.code == BAD_INPUT:
                    self._fail(f"{describe_end(process)}{self._restarts.used_up(process.name)}", server)
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
