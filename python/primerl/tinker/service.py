"""What each call means: sessions, training clients, sampling clients. HTTP is `routes`'."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from primerl.runs.served import STEPS
from primerl.tinker import sampling
from primerl.tinker.clients import BROKEN, FROM_STATE, BaseModel, LoraOptions, Published, SavedAdapter, TrainingClient
from primerl.tinker.engines import EngineError, Pool, Weights
from primerl.tinker.export import Export
from primerl.tinker.futures import Future, Futures, Queue
from primerl.tinker.generation import Generation
from primerl.tinker.history import Samples, StepLines
from primerl.tinker.losses import LossInputError, NotFoundError
from primerl.tinker.overflow import Overflows
from primerl.tinker.records import Limits, Model, Sampler, Session, UnknownError, number, options_of
from primerl.tinker.store import SAMPLER, Facts, Store
from primerl.tinker.wire import Request
from primerl.train.checkpoint.step_folders import saving

log = logging.getLogger("primerl.tinker")

BASE = "base"


class Service:
    """Used by one event loop; torch computes in the pool's thread."""

    def __init__(self, base: BaseModel, pool: Pool, output_dir: Path, limits: Limits, tokenizer: Any) -> None:
        self.limits = limits
        self.futures = Futures()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.pool = pool
        self.architecture = type(base.model).__name__
        self.tokenizer_folder = str(base.folder)
        self._base = base
        self._store = Store(output_dir / "states", base.digest, base.alpha)
        self._store.clean()
        self.export = Export(self._store)
        self._snapshots = output_dir / "snapshots"
        """Adapters of samplers that were not given a name; they end with their session."""
        for left in (self._snapshots, output_dir / "broadcasts"):
            shutil.rmtree(left, ignore_errors=True)
        self._creating = 0
        self.tokenizer = tokenizer
        self.samples = Samples()
        self._steps = StepLines(output_dir / STEPS)
        self._generation = Generation(pool, tokenizer, limits.most_samples)
        self._published = Published(base, output_dir)
        self._overflows = Overflows()
        self._turn = asyncio.Lock()

    # Sessions

    def begin(self) -> Session:
        session = Session(uuid.uuid4().hex[:12], time.monotonic())
        self.sessions[session.id] = session
        return session

    def heartbeat(self, session_id: str) -> None:
        self._session(session_id).heard = time.monotonic()

    async def finish(self, session_id: str) -> None:
        """Its models and samplers are let go; what they have saved stays."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        tasks = list(session.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in session.samplers:
            self.samplers.pop(name, None)
        await asyncio.to_thread(shutil.rmtree, self._snapshots / session.id, ignore_errors=True)
        for name in session.models:
            model = self.models.pop(name, None)
            if model is not None:
                await model.queue.close("the session has ended")

    async def tend(self) -> None:
        """To be called now and then: sessions without heartbeats end, and old results are forgotten."""
        now = time.monotonic()
        self.futures.forget_old(now)
        self._overflows.keep(one.weights.key for one in self.samplers.values())
        for session in list(self.sessions.values()):
            if now - session.heard > self.limits.session_s:
                log.warning(
                    "session %s has sent no heartbeat for %.0f s; its %d training clients are let go (what they saved "
                    "stays)",
                    session.id,
                    now - session.heard,
                    len(session.models),
                )
                await self.finish(session.id)

    def _session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise UnknownError(f"session {session_id!r} is not known: it has ended, or the server was started again")
        return self.sessions[session_id]

    # Training clients

    def create_model(self, body: Mapping[str, Any]) -> Future:
        async def work(session: Session, model_id: str) -> dict[str, Any]:
            self._check_base(body.get("base_model"))
            options = options_of(body.get("lora_config"), self.limits.max_rank)
            with self._room():
                client = await self._compute(TrainingClient, self._base, options, self.limits.most_tokens)
            self._add(session, model_id, str(body["base_model"]), options, body.get("user_metadata"), client)
            return {"model_id": model_id}

        return self._make_model(body, "create_model", work)

    def load_model(self, body: Mapping[str, Any]) -> Future:
        """A new training client from a saved state."""

        async def work(session: Session, model_id: str) -> dict[str, Any]:
            with self._room():
                with_optimizer = bool(body["optimizer"])
                facts, client = await self._compute(self._loaded, str(body["path"]), with_optimizer=with_optimizer)
            metadata = body.get("user_metadata") or facts.user_metadata
            self._add(session, model_id, facts.base_model, facts.options, metadata, client)
            return {"model_id": model_id, "path": body["path"]}

        return self._make_model(body, "load_weights", work)

    def _make_model(
        self, body: Mapping[str, Any], kind: str, work: Callable[[Session, str], Awaitable[dict[str, Any]]]
    ) -> Future:
        """Raises ValueError where the client's number is not one."""
        session = self._session(str(body["session_id"]))
        model_id = f"{session.id}:train:{number(body, 'model_seq_id')}"
        # As a retry of the same call.
        known = self.futures.of_call((model_id, 0))
        if known is not None:
            return known
        future = self.futures.new(kind, model_id, (model_id, 0))
        self._start(session, future, lambda: work(session, model_id))
        return future

    def _loaded(self, path: str, *, with_optimizer: bool) -> tuple[Facts, TrainingClient]:
        facts, tensors, state = self._store.load(path)
        if with_optimizer and state is None:
            raise LossInputError(f"{path} holds no optimizer state (it was saved for samplers): load it without")
        client = TrainingClient(self._base, facts.options, self.limits.most_tokens)
        client.load(tensors, state if with_optimizer else None)
        return facts, client

    def _add(
        self,
        session: Session,
        model_id: str,
        base_model: str,
        options: LoraOptions,
        metadata: Any,
        client: TrainingClient,
    ) -> None:
        if session.id not in self.sessions:
            raise LossInputError("the session has ended")

        def lost(kind: str, why: str) -> None:
            # None of the client's calls runs meanwhile.
            client.lose(why, drop=kind == "optim_step")

        client.name = model_id
        queue = Queue(self._turn, self.limits.gap_s, lost)
        now = time.time()
        self.models[model_id] = Model(model_id, session.id, base_model, options, metadata, queue, client, now)
        session.models.append(model_id)

    def _check_base(self, name: object) -> None:
        if name not in self.limits.names:
            raise NotFoundError(f"base_model {name!r} is not served here; served: {', '.join(self.limits.names)}")

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """For one training client more, which is being made. Raises LossInputError."""
        most = self.limits.max_clients
        if len(self.models) + self._creating >= most:
            now = time.time()
            last = ", ".join(f"{one.id} {now - one.last_call:.0f} s ago" for one in list(self.models.values())[:3])
            raise LossInputError(
                f"this server has {most} training clients, as many as it takes (trainer.max_clients); the oldest were "
                f"called last: {last}. A client ends with its script's ServiceClient (`with ServiceClient() as ..`), "
                f"or {self.limits.session_s:g} s after its script has (timeouts.session_s)"
            )
        self._creating += 1
        try:
            yield
        finally:
            self._creating -= 1

    def model(self, model_id: object) -> Model:
        if model_id not in self.models:
            raise UnknownError(
                f"model {model_id!r} is not known: its session has ended, or the server was started again"
            )
        return self.models[str(model_id)]

    def forward_backward(self, request: Request) -> Future:
        async def work(model: Model) -> Any:
            output = await self._compute(model.client.forward_backward, request)
            model.loss = output.metrics["loss:sum"]
            return output

        return self._call(request.model_id, request.seq_id, "forward_backward", work)

    def optim_step(self, body: Mapping[str, Any]) -> Future:
        async def work(model: Model) -> Any:
            given = body.get("adam_params") or body.get("optimizer_params") or {}
            client = model.client

            def step() -> dict[str, float]:
                metrics = client.optim_step(given)
                self._steps.add(model.id, client.steps, client.stepped_loss, metrics)
                return metrics

            metrics = await self._compute(step)
            if client.stepped_loss is not None:
                model.losses.add(client.steps, client.stepped_loss)
            return {"metrics": metrics}

        return self._call(body.get("model_id"), body.get("seq_id"), "optim_step", work)

    def load_into(self, body: Mapping[str, Any]) -> Future:
        """The older form of loading: into a client that was just created."""

        async def work(model: Model) -> Any:
            if body.get("seq_id") != 1:
                raise LossInputError(
                    "load_weights has to be the first call of a training client; for another one that continues from a "
                    f"state call {FROM_STATE}"
                )
            _, tensors, state = await self._compute(self._store.load, str(body["path"]))
            await self._compute(model.client.load, tensors, state if body.get("optimizer") else None)
            return {"path": body["path"]}

        return self._call(body.get("model_id"), body.get("seq_id"), "load_weights", work)

    def save(self, body: Mapping[str, Any], kind: str) -> Future:
        async def work(model: Model) -> Any:
            name = body.get("path")
            if name is None and kind == SAMPLER:
                return {"sampling_session_id": (await self._snapshot(model)).id}
            ttl = body.get("ttl_seconds")
            save = partial(
                self._store.save,
                model.client,
                model.id,
                kind,
                str(name),
                base_model=model.base_model,
                ttl_s=None if ttl is None else float(ttl),
                overwrite=bool(body.get("overwrite", False)),
                user_metadata=body.get("user_metadata") or model.user_metadata,
            )
            return {"path": (await self._compute(save)).path}

        return self._call(body.get("model_id"), body.get("seq_id"), f"save_{kind}", work)

    def _call(self, model_id: object, seq_id: object, kind: str, work: Callable[[Model], Awaitable[Any]]) -> Future:
        model = self.model(model_id)
        if not isinstance(seq_id, int) or seq_id < 1:
            raise ValueError(f"seq_id is {seq_id!r}; calls are counted from 1")
        known = self.futures.of_call((model.id, seq_id))
        if known is not None:
            return known
        future = self.futures.new(kind, model.id, (model.id, seq_id))
        model.last_call, model.calls = time.time(), model.calls + 1
        model.queue.put(seq_id, future, lambda: work(model))
        return future

    # Sampling clients

    async def _snapshot(self, model: Model) -> Sampler:
        key = f"{model.id}@{model.client.steps}-{uuid.uuid4().hex[:8]}"
        file = self._snapshots / model.session / f"{key}.safetensors"

        def keep() -> None:
            with saving(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file(model.client.tensors(), file)

        await self._compute(keep)
        name = f"{model.session}:sample:{key}"
        origin = f"{model.id} at its step {model.client.steps}"
        sampler = self._sampler(name, model.base_model, None, key, origin, lambda: (model.options, load_file(file)))
        self._keep(model.session, sampler)
        return sampler

    def _sampler(
        self,
        name: str,
        base_model: str,
        path: str | None,
        key: str,
        origin: str,
        adapter: Callable[[], SavedAdapter | None],
    ) -> Sampler:
        """`key`: of its weights, which samplers may share. `origin`: what they are of, for messages."""
        weights = Weights(key, lambda version: self._published.write(version, adapter()))
        return Sampler(name, base_model, path, origin, weights, adapter)

    async def create_sampler(self, body: Mapping[str, Any]) -> Sampler:
        """Raises LossInputError where there is no such model or state."""
        session = self._session(str(body["session_id"]))
        given = body.get("sampling_session_seq_id") is not None
        unique = number(body, "sampling_session_seq_id") if given else uuid.uuid4().hex
        name = f"{session.id}:sample:{unique}"
        if name in self.samplers:
            return self.samplers[name]
        path = body.get("model_path")
        if path is None:
            self._check_base(body.get("base_model"))
            sampler = self._sampler(name, str(body["base_model"]), None, BASE, "the base model", lambda: None)
        else:
            # Also while the trainer computes; and again when an engine is to have them.
            facts, _, _ = await asyncio.to_thread(self._store.load, str(path))

            def adapter() -> SavedAdapter:
                return facts.options, self._store.load(str(path))[1]

            at = "" if facts.steps is None else f", of step {facts.steps}"
            key, origin = f"{path}@{facts.saved}", f"{path}{at}"
            sampler = self._sampler(name, facts.base_model, str(path), key, origin, adapter)
        self._keep(session.id, sampler)
        return sampler

    def _keep(self, session_id: str, sampler: Sampler) -> None:
        self._session(session_id).samplers.append(sampler.id)
        self.samplers[sampler.id] = sampler

    def sampler(self, name: object) -> Sampler:
        if name not in self.samplers:
            raise UnknownError(f"sampler {name!r} is not known: its session has ended, or the server was started again")
        return self.samplers[str(name)]

    def sample(self, body: Mapping[str, Any]) -> Future:
        sampler = self.sampler(body.get("sampling_session_id"))
        call = (sampler.id, int(body.get("seq_id") or 0))
        known = self.futures.of_call(call)
        if known is not None:
            return known
        future = self.futures.new("asample", None, call)
        future.client = f"{sampler.id} ({sampler.origin})"

        async def work() -> Any:
            request = sampling.request_of(body, self._base.vocabulary, self.limits.context)
            try:
                choices, scores = await self._generation.sampled(sampler.weights, request, future.id)
            except EngineError:
                adapter, prompt = sampler.adapter, request.prompt
                is_finite = partial(self._compute, lambda: self._published.is_finite(adapter(), prompt))
                if await self._overflows.known(sampler.weights.key, sampler.origin, is_finite):
                    raise LossInputError(f"{sampler.origin}: {BROKEN}") from None
                raise
            self.samples.add(sampler.id, request.prompt, choices)
            answer = sampling.answer_of(request, choices, scores)
            if request.targets is not None or request.alternatives:
                more = await self._compute(lambda: self._published.scored(sampler.adapter(), request))
                more.add_to(answer)
            return answer

        self._start(self._session(sampler.id.split(":", 1)[0]), future, work)
        return future

    def cancel(self, request_id: str) -> None:
        """A sample that its client has given up. Other calls run on: later ones rely on them."""
        for session in self.sessions.values():
            if request_id in session.tasks and self.futures.kind_of(request_id) == "asample":
                session.tasks[request_id].cancel()

    # States

    async def states(self, model_id: str | None = None) -> list[Facts]:
        return await asyncio.to_thread(self._store.all, model_id)

    async def facts(self, path: str) -> Facts:
        return await asyncio.to_thread(self._store.facts, path)

    async def expire(self, path: str, ttl_s: float | None) -> None:
        await asyncio.to_thread(self._store.expire, path, ttl_s)

    async def delete(self, path: str) -> None:
        await asyncio.to_thread(self._store.delete, path)

    # Work

    async def _compute(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """In the thread that torch computes in."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool.thread, partial(function, *arguments, **named))

    def _start(self, session: Session, future: Future, work: Callable[[], Awaitable[Any]]) -> None:
        task = asyncio.create_task(future.run(work))
        session.tasks[future.id] = task
        task.add_done_callback(lambda _: session.tasks.pop(future.id, None))

    async def close(self) -> None:
        self._base.is_stopping = True
        for session in list(self.sessions):
            await self.finish(session)
        await self.pool.close()
