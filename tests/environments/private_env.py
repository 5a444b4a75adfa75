"""A taskset whose reward is told by a service that is reached over the worker's tailnet only."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import verifiers.v1 as vf

__all__ = ["PrivateTaskset"]


class PrivateConfig(vf.TasksetConfig):
    gateway: str = ""
    """URL of the orchestrator, which no proxy may stand before."""


class PrivateData(vf.TaskData):
    gateway: str


def by_socks(host: str) -> bytes:
    """What a client that speaks SOCKS5 gets, which resolves no name itself."""
    proxy = urlsplit(os.environ["PRIMERL_TAILNET_SOCKS5"])
    assert proxy.scheme == "socks5h"
    with socket.create_connection((proxy.hostname, proxy.port), 30) as connection:
        answers = connection.makefile("rb")
        connection.sendall(b"\x05\x01\x00")
        assert answers.read(2) == b"\x05\x00"
        connection.sendall(b"\x05\x01\x00\x03" + bytes([len(host)]) + host.encode() + struct.pack(">H", 80))
        assert answers.read(10)[:2] == b"\x05\x00"
        connection.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        return answers.read().rsplit(b"\r\n\r\n", 1)[1]


def asked() -> list[str]:
    """The service's word, as clients of several kinds get it."""
    with httpx.Client() as client:
        by_httpx = client.get("http://private.internal/").text
    with urllib.request.urlopen("http://private.internal/", timeout=30) as answer:
        by_urllib = answer.read().decode()
    curl = ["curl", "--silent", "--show-error", "--fail", "--max-time", "30", "http://private.internal/"]
    by_curl = subprocess.run(curl, check=True, capture_output=True, text=True).stdout
    return [by_httpx, by_urllib, by_curl, by_socks("private.internal").decode()]


class PrivateTask(vf.Task[PrivateData]):
    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        assert "TAILSCALE_AUTH_KEY" not in os.environ
        words = await asyncio.to_thread(asked)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{self.data.gateway}/envs/config")).status_code == 200
        assert words == ["4"] * 4, words
        return float(words[0])


class PrivateTaskset(vf.Taskset[PrivateTask, PrivateConfig]):
    def load(self) -> Iterator[Any]:
        yield PrivateTask(PrivateData(prompt="speak", gateway=self.config.gateway), self.config.task)
