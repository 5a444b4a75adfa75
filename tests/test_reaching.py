"""Dry runs of engines and of runs on several machines: who is reached, and what is reported of who is not."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from primerl.config.errors.fail import ConfigError
from primerl.launch import reaching

KEY = "the-runs-key"


class Orchestrator(http.server.ThreadingHTTPServer):
    """Answers as one does, and goes to the address that it is asked to reach."""

    daemon_threads = True
    firewall = False


class Answers(http.server.BaseHTTPRequestHandler):
    server: Orchestrator

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" or self.has_key() else 401, {})

    def do_POST(self) -> None:
        url = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["url"]
        assert self.path == "/engines/reach"
        assert self.has_key()
        if self.server.firewall:
            return self.answer(200, {"reached": False, "why": "connection timed out"})
        with urllib.request.urlopen(f"{url}/health", timeout=10) as found:
            return self.answer(200, {"reached": found.status == 200})

    def has_key(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {KEY}"

    def answer(self, status: int, content: dict[str, object]) -> None:
        self.send_response(status)
        body = json.dumps(content).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    monkeypatch.setenv("PRIMERL_API_KEY", KEY)
    with Orchestrator(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Orchestrator) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def unused_port() -> int:
    with unserved() as port:
        return port


@contextmanager
def unserved() -> Iterator[int]:
    """A port that refuses connections, held so that no other program gets it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield int(one.getsockname()[1])


def test_both_ways_are_tried_and_the_port_is_free_again(orchestrator: Orchestrator) -> None:
    port = unused_port()
    for _ in range(2):
        said = reaching.check(url_of(orchestrator), "127.0.0.1", port)
        assert (
            said == f"{url_of(orchestrator)} is reached from here, and reaches this machine at http://127.0.0.1:{port}"
        )
    assert "reaches this machine at http://127.0.0.1:" in reaching.check(url_of(orchestrator), "0.0.0.0", 0)


def test_a_way_that_is_closed_is_named(orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url_of(orchestrator)
    orchestrator.firewall = True
    with pytest.raises(ConfigError, match=r"does not reach this machine at http://.*: connection timed out; set host"):
        reaching.check(url, "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"port: 127\.0\.0\.1:\d+ cannot be listened on"):
        reaching.check(url, "127.0.0.1", orchestrator.server_address[1])
    monkeypatch.setenv("PRIMERL_API_KEY", "another")
    with pytest.raises(ConfigError, match="refuses this machine's key; set PRIMERL_API_KEY"):
        reaching.check(url, "127.0.0.1", 0)
    with unserved() as port:
        unused = f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=re.escape(f"join: no orchestrator answers at {unused}")):
            reaching.check(unused, "127.0.0.1", 0)


def test_each_engine_elsewhere_is_asked(orchestrator: Orchestrator) -> None:
    with unserved() as port:
        unused = f"http://127.0.0.1:{port}"
        there, absent = reaching.engines([url_of(orchestrator), unused])
    assert there == f"the engine at {url_of(orchestrator)} is reached from here"
    assert absent.startswith(f"the engine at {unused} is not reached from here: ")
    assert reaching.engines([]) == []
