"""A chat program that plays a seat inside the worker's process: ask the model, run the tools it called, ask again.

verifiers' own chat harness starts a Python process for every segment, which costs three hundred times the CPU.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import RolloutError
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from primerl.envs.generations.interception import ContextFullError, TurnRefusedError, session_of, take_turn
from primerl.envs.interface import is_overflow

HARNESS_ID = "primerl-chat"

__all__ = ["ChatHarness"]

Complete = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Chat request -> assistant message; raises TurnRefusedError where the conversation has ended in order."""


class TurnFailedError(Exception):
    """The turn failed; verifiers knows the cause."""


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]
    root: str = ""
    """Base URL that the worker gave the seats without an endpoint of their own."""


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        session = session_of(trace.id, self.config.root)

        async def complete(body: dict[str, Any]) -> dict[str, Any]:
            if session is None:
                return await _ask_server(endpoint, secret, body)
            return await take_turn(session, body)

        body = {"model": ctx.model, "messages": self._messages(data)}
        try:
            if mcp_urls:
                await _converse_with_tools(complete, body, mcp_urls)
            else:
                await complete(body)
        except TurnRefusedError:
            pass
        except RolloutError as error:
            # A full context ends the conversation, which is scored, as in verifiers' own chat harness.
            if not isinstance(error.__cause__, ContextFullError):
                return ProgramResult(1, "", str(error)[-2000:])
        except TurnFailedError as error:
            return ProgramResult(1, "", str(error)[-2000:])
        return ProgramResult(0, "", "")

    def _messages(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        return messages


async def _converse_with_tools(complete: Complete, body: dict[str, Any], mcp_urls: dict[str, str]) -> None:
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    async with AsyncExitStack() as stack:
        servers_config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        body["tools"], dispatch, servers = await connect_mcp(servers_config, stack, set())
        while True:
            message = await complete(body)
            body["messages"].append({key: value for key, value in message.items() if value is not None})
            if not message.get("tool_calls"):
                return
            for call in message["tool_calls"]:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                try:
                    content = await call_mcp(servers, dispatch, name, json.loads(arguments or "{}"))
                except (KeyError, ValueError) as error:
                    content = f"error: {error!r}"  # the model's mistake goes back to the model
                body["messages"].append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


# One for each event loop: a client dies with its loop.
_http: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


async def _ask_server(endpoint: str, secret: str, body: dict[str, Any]) -> dict[str, Any]:
    """A turn through verifiers' own server."""
    loop = asyncio.get_running_loop()
    if loop not in _http:
        connector = aiohttp.TCPConnector(limit=0)
        _http[loop] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    headers = {"Authorization": f"Bearer {secret}"}
    try:
        async with _http[loop].post(f"{endpoint}/chat/completions", json=body, headers=headers) as reply:
            text = await reply.text()
            if reply.status < 400:
                message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
                return message
    except aiohttp.ClientError as error:
        raise TurnFailedError(f"{type(error).__name__}: {error}") from error
    if is_overflow(reply.status, text):
        raise TurnRefusedError(text)
    raise TurnFailedError(text)


async def close_http() -> None:
    """Closes this event loop's connections; before the loop ends."""
    session = _http.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()
