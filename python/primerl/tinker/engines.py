"""Engines that sample, each a process of its own, and which weights each has proved.

A sampler names weights: the base model's, or a saved adapter's. An engine holds those of one sampler at a time, merged
into whole weights; a request waits for an engine that holds its sampler's, or for one without requests, which loads
them. Nothing is answered by weights whose digest the engine has not proved, and each answer's tokens are checked
against the label of those weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

log = logging.getLogger("primerl.tinker")

LOAD_S = 300.0
ANSWER_S = 3600.0
"""The longest a sample may take; a client that gives up earlier ends its request."""
PATIENCE_S = 5.0
"""After which requests for weights that an engine holds queue behind those for others."""
AVOIDED_S = 1.0
"""For how long an engine that did not answer is not asked: one that was killed is started again meanwhile."""
TRIED_FOR_S = 300.0
"""For how long a request that no engine has answered is tried again."""


class EngineError(Exception):
    """An engine failed, or did not prove its weights. The message names it."""


@dataclass(frozen=True)
class Weights:
    """The weights of a sampler."""

    key: str
    write: Callable[[int], Path]
    """Writes them as this version, into a folder that is returned; called by the thread that computes."""


@dataclass
class Engine:
    name: str
    url: str | None = None
    holds: str | None = None
    digest: str | None = None
    busy: int = 0
    is_loading: bool = False
    used: float = 0.0
    loads: int = 0
    avoided_until: float = 0.0


@dataclass
class Pool:
    """Used by one event loop."""

    names: list[str]
    model: str
    """The name under which engines serve it."""
    thread: Executor
    """The one thread that torch computes in."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all engines have joined."""

    def __post_init__(self) -> None:
        self.engines = {name: Engine(name) for name in self.names}
        self._changed = asyncio.Condition()
        self._waiting: list[tuple[float, str]] = []
        self._versions = 0
        # Never through a proxy.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._http = httpx.AsyncClient(trust_env=False, timeout=ANSWER_S, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def joined(self, name: str, url: str) -> None:
        """An engine has been started, or started again: it holds the model folder's weights, unproved."""
        async with self._changed:
            engine = self.engines[name]
            # Requests to the process before end by themselves.
            engine.url, engine.holds, engine.digest, engine.avoided_until = url, None, None, 0.0
            if all(one.url for one in self.engines.values()):
                self.ready.set()
            self._changed.notify_all()

    async def lost(self, name: str) -> None:
        async with self._changed:
            self.engines[name].url = None
            self._changed.notify_all()

    # Generation

    async def generate(
        self, weights: Weights, body: Mapping[str, Any], until: Callable[[list[int]], int | None] | None = None
    ) -> dict[str, Any]:
        """The engine's answer. `until`: of one sequence, called with the tokens so far; a number of tokens ends it
        there.

        Raises EngineError after several engines have failed.
        """
        deadline = time.monotonic() + TRIED_FOR_S
        while True:
            async with self._engine(weights) as engine:
                try:
                    if engine.is_loading:
                        await self._load(engine, weights)
                    return await self._asked(engine, dict(body) | {"model": self.model}, until)
                except (httpx.HTTPError, OSError) as error:
                    engine.avoided_until, engine.holds, engine.digest = time.monotonic() + AVOIDED_S, None, None
                    problem = f"engine {engine.name} did not answer ({type(error).__name__}: {error})"
            if time.monotonic() > deadline:
                raise EngineError(f"{problem}, nor did any other within {TRIED_FOR_S:g} s")
            log.warning("%s; its request is tried again", problem)

    async def _asked(
        self, engine: Engine, body: dict[str, Any], until: Callable[[list[int]], int | None] | None
    ) -> dict[str, Any]:
        url, digest = f"{engine.url}/inference/v1/generate", engine.digest
        if until is None:
            answer = await self._http.post(url, json=body)
            if answer.status_code != 200:
                raise EngineError(f"engine {engine.name} refused the request: {answer.text[:500]}")
            found: dict[str, Any] = answer.json()
        else:
            found = await self._streamed(engine, url, body, until)
        for choice in found["choices"]:
            spans = {span["version"] for span in choice.get("weight_versions") or []}
            if spans - {digest}:
                raise EngineError(f"engine {engine.name} answered with weights {spans}, not {digest}")
        return found

    async def _streamed(
        self, engine: Engine, url: str, body: dict[str, Any], until: Callable[[list[int]], int | None]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"token_ids": [], "logprobs": {"content": []}, "finish_reason": None}
        found: dict[str, Any] = {"choices": [choice], "prompt_logprobs": None}
        async with self._http.stream("POST", url, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise EngineError(f"engine {engine.name} refused the request: {text[:500]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise EngineError(f"engine {engine.name}: {event['error']}")
                for part in event.get("choices", []):
                    choice["token_ids"] += part["token_ids"]
                    choice["logprobs"]["content"] += (part.get("logprobs") or {"content": []})["content"]
                    choice["finish_reason"] = part.get("finish_reason")
                    choice["weight_versions"] = part.get("weight_versions")
                    end = until(choice["token_ids"])
                    if end is not None:
                        # Leaving ends it in the engine.
                        choice["token_ids"] = choice["token_ids"][:end]
                        choice["logprobs"]["content"] = choice["logprobs"]["content"][:end]
                        choice["finish_reason"] = "stop"
                        return found
        return found

    # Weights

    @contextlib.asynccontextmanager
    async def _engine(self, weights: Weights) -> AsyncIterator[Engine]:
        """One that has proved these weights, or is about to load them; its weights stay meanwhile."""
        engine = await self._taken(weights.key)
        try:
            yield engine
        finally:
            async with self._changed:
                engine.busy -= 1
                if engine.is_loading:
                    # It failed: only this request was there.
                    engine.is_loading, engine.holds = False, None
                engine.used = time.monotonic()
                self._changed.notify_all()

    async def _taken(self, key: str) -> Engine:
        me = (time.monotonic(), key)
        async with self._changed:
            self._waiting.append(me)
            try:
                while (engine := self._chosen(me)) is None:
                    # An engine that was avoided may be asked again without anyone's notice.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), AVOIDED_S)
            finally:
                self._waiting.remove(me)
            return engine

    def _chosen(self, me: tuple[float, str]) -> Engine | None:
        since, key = me
        now = time.monotonic()
        there = [engine for engine in self.engines.values() if engine.url and engine.avoided_until <= now]
        holding = [engine for engine in there if engine.holds == key and not engine.is_loading]
        others = [at for at, other in self._waiting if other != key and at < since]
        if holding and not (others and now - min(others) > PATIENCE_S):
            engine = min(holding, key=lambda one: one.busy)
            engine.busy += 1
            return engine
        free = [engine for engine in there if not engine.busy and not engine.is_loading]
        if not free or any(engine.holds == key for engine in there if engine.is_loading):
            return None
        engine = min(free, key=lambda one: (one.holds is not None, one.used))
        engine.is_loading, engine.holds, engine.busy = True, key, 1
        return engine

    async def _load(self, engine: Engine, weights: Weights) -> None:
        self._versions += 1
        try:
            loop = asyncio.get_running_loop()
            folder = await loop.run_in_executor(self.thread, weights.write, self._versions)
            try:
                digest = str(json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["digest"])
                await self._send(engine, folder, digest)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except BaseException:
            engine.holds = engine.digest = None
            raise
        async with self._changed:
            engine.holds, engine.digest, engine.is_loading = weights.key, digest, False
            engine.loads += 1
            self._changed.notify_all()

    async def _send(self, engine: Engine, folder: Path, digest: str) -> None:
        """Raises EngineError where the engine does not prove them."""
        await self._post(engine, "/pause?mode=keep&clear_cache=true")
        await self._post(engine, "/start_weight_update")
        await self._post(engine, "/update_weights", {"update_info": {"path": str(folder)}})
        await self._post(engine, "/finish_weight_update", {"weight_version": digest})
        await self._post(engine, "/resume")
        proofs = await self._post(engine, "/collective_rpc", {"method": "primerl_weight_digest", "args": []})
        held = {proof["digest"] for proof in proofs["results"]}
        if held != {digest}:
            raise EngineError(f"engine {engine.name} holds weights of the digest {held}, not {digest}")

    async def _post(self, engine: Engine, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = await self._http.post(f"{engine.url}{path}", json=body, timeout=LOAD_S)
        if answer.status_code != 200:
            raise EngineError(f"engine {engine.name} refused {path}: {answer.text[:500]}")
        return dict(answer.json() or {})
