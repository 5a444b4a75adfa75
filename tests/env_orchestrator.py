"""A small orchestrator for tests of the env worker: the env-worker calls and a chat endpoint, over real HTTP.

It keeps the protocol and nothing else: tests hand out leases by [`Orchestrator.add`], and wait for what the worker
does. It runs an event loop on a thread of its own; all waits have a deadline and wake on change.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack
from aiohttp import web

Reply = Callable[["Chat"], Awaitable[web.Response]]


@dataclass
class Chat:
    """One chat request."""

    rollout: int
    session: str
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def last(self) -> str:
        return str(self.body["messages"][-1]["content"])


def completion(message: str | dict[str, Any], finish_reason: str = "stop") -> web.Response:
    content = {"role": "assistant", "content": message} if isinstance(message, str) else message
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [{"index": 0, "message": content, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    return web.json_response(body)


def refusal(status: int, message: str, code: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "error", "param": None, "code": code}}, status=status
    )


async def echo(chat: Chat) -> web.Response:
    return completion(chat.last)


def key_of(rollout: int) -> str:
    """The API key of a rollout's lease."""
    return f"key-of-{rollout}"


@dataclass
class Orchestrator:
    heartbeat_s: float = 0.2
    long_poll_s: float = 1.0
    reply: Reply = echo
    url: str = ""
    registrations: list[dict[str, Any]] = field(default_factory=list)
    heartbeats: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    leased: dict[int, int] = field(default_factory=dict)
    """Worker of each rollout handed out."""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    chats: list[Chat] = field(default_factory=list)
    together: int = 0
    """Chats are answered when so many are open, or when no other rollout is offered."""
    most_open: int = 0
    """Chats that were open at a time."""
    hung_up: list[int] = field(default_factory=list)
    """Rollouts whose chat request was dropped by the worker before it was answered."""
    finished: bool = False
    whole_groups: bool = False
    """As the worker that registered last has asked."""
    refuse: web.Response | None = None
    blocked: str | None = None
    """Why workers that were forgotten have to end: what blocks them."""
    config: dict[str, Any] = field(default_factory=dict)
    """What workers that join are told."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._workers: set[int] = set()
        self._numbers = itertools.count(1)
        self._waiting: list[dict[str, Any]] = []
        self._cancel: set[int] = set()
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._open = 0
        self._come = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # What tests do

    def __enter__(self) -> Orchestrator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listens, on the same port as before where there was one."""
        self._runner = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def stop(self) -> None:
        """Cuts every connection."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)

    def forget_workers(self) -> None:
        with self._changed:
            self._workers.clear()

    def add_group(self, size: int, example: int = 0, deadline_s: float = 30.0) -> list[int]:
        """Offers a whole group, which goes out in one answer; returns the numbers of its rollouts."""
        rollouts = [next(self._numbers) for _ in range(size)]
        self._waiting += [self._offer(rollout, rollouts[0], example, deadline_s) for rollout in rollouts]
        self._loop.call_soon_threadsafe(self._wake.set)
        return rollouts

    def add(self, example: int = 0, deadline_s: float = 30.0, sampling: dict[str, Any] | None = None) -> int:
        """Offers a rollout; returns its number."""
        rollout = next(self._numbers)
        self._waiting.append(self._offer(rollout, rollout, example, deadline_s, sampling))
        self._loop.call_soon_threadsafe(self._wake.set)
        return rollout

    def _offer(
        self, rollout: int, group: int, example: int, deadline_s: float, sampling: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "rollout": rollout,
            "group": group,
            "example": example,
            "base_url": f"{self.url}/rollouts/{rollout}/v1",
            "api_key": key_of(rollout),
            "sampling": sampling or {"temperature": 1.0, "max_tokens": 28},
            "deadline_s": deadline_s,
        }

    def cancel(self, rollout: int) -> None:
        self._cancel.add(rollout)

    def finish(self) -> None:
        self.finished = True
        self._loop.call_soon_threadsafe(self._wake.set)

    def wait(self, what: str, condition: Callable[[], bool], timeout: float = 90.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout), f"no {what} within {timeout} s"

    def result(self, rollout: int, timeout: float = 90.0) -> dict[str, Any]:
        self.wait(f"result of rollout {rollout}", lambda: rollout in self.results, timeout)
        return self.results[rollout]

    # The server

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        for name in ("register", "lease", "heartbeat", "result", "leave"):
            app.router.add_post(f"/envs/{name}", self._handler(getattr(self, f"_{name}")))
        app.router.add_get("/envs/config", self._config)
        app.router.add_post("/rollouts/{rollout}/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        return runner

    async def _settle(self) -> None:
        """Ends what the server has left: handlers that never answer, and sockets that are closed in the next round."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)

    def _handler(self, answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            assert request.content_type == "application/msgpack"
            body = msgpack.unpackb(await request.read())
            if self.refuse is not None:
                return refusal(self.refuse.status, self.refuse.text or "", "refused")
            with self._changed:
                if "worker" in body and body["worker"] not in self._workers:
                    if self.blocked is not None:
                        return refusal(410, self.blocked, "worker_blocked")
                    return refusal(410, f"worker {body['worker']} is unknown", "worker_unknown")
            packed = msgpack.packb(await answer(body))
            with self._changed:
                self._changed.notify_all()
            return web.Response(body=packed, content_type="application/msgpack")

        return handle

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(self.config)

    async def _register(self, body: dict[str, Any]) -> dict[str, Any]:
        worker = next(self._numbers)
        with self._changed:
            self._workers.add(worker)
            self.registrations.append(body)
            self.whole_groups = body["whole_groups"]
        return {"worker": worker, "environment": 0, "model": "policy", "heartbeat_s": self.heartbeat_s}

    async def _lease(self, body: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self.long_poll_s
        while not self._waiting and not self.finished and (left := deadline - time.monotonic()) > 0:
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)
        # A worker that was forgotten while it waited gets nothing.
        max_given = body["max"] if body["worker"] in self._workers else 0
        if max_given and self.whole_groups and self._waiting:
            # The rest of the last one's group too, even if that is more than was asked for.
            groups = {lease["group"] for lease in self._waiting[:max_given]}
            max_given = sum(lease["group"] in groups for lease in self._waiting)
        given, self._waiting = self._waiting[:max_given], self._waiting[max_given:]
        with self._changed:
            self.leased.update({lease["rollout"]: body["worker"] for lease in given})
        return {"rollouts": given, "finished": self.finished and not given, "reason": "" if given else "nothing to do"}

    async def _heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self.heartbeats.append((time.monotonic(), body))
        return {"cancel": sorted(self._cancel & set(body["running"])), "finished": self.finished}

    async def _result(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            accepted = body["rollout"] not in self.results
            self.results.setdefault(body["rollout"], body["outcome"])
        return {"accepted": accepted}

    async def _leave(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._workers.discard(body["worker"])
            self.left.append(body["worker"])
        return {}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        rollout = int(request.match_info["rollout"])
        if request.headers.get("Authorization") != f"Bearer {key_of(rollout)}":
            return refusal(401, "the key is not this rollout's", "invalid_api_key")
        session = request.headers.get("X-Session-ID", "")
        chat = Chat(rollout, session, json.loads(await request.read()), dict(request.headers))
        with self._changed:
            self.chats.append(chat)
            self._changed.notify_all()
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            await self._others()
            return await self.reply(chat)
        except asyncio.CancelledError:
            with self._changed:
                self.hung_up.append(rollout)
                self._changed.notify_all()
            raise
        finally:
            self._open -= 1

    async def _others(self) -> None:
        if self._open >= self.together or not self._waiting:
            self._come.set()
            self._come = asyncio.Event()
        else:
            await self._come.wait()
