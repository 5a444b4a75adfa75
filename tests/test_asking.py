"""One question to an orchestrator, or to what stands where one is looked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from primerl.net.requests import UnansweredError, ask


@contextmanager
def answering(status: int, body: bytes, asked: list[str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b'{"run": {}}', {"run": {}}),
        (404, b'{"error": {"message": "no such environment"}}', {"error": {"message": "no such environment"}}),
        (401, b"", {}),
        (502, b"<html>Bad Gateway</html>", {}),
    ],
)
def test_a_refusal_may_say_nothing(status: int, body: bytes, told: dict[str, object]) -> None:
    asked: list[str] = []
    with answering(status, body, asked) as url:
        assert ask(url, "/envs/config", within_s=60.0, environment="a b", role="eval") == (status, told)
    assert asked == ["/envs/config?environment=a+b&role=eval"]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff"])
def test_what_answers_is_an_orchestrator(body: bytes) -> None:
    with answering(200, body, []) as url, pytest.raises(UnansweredError, match="is no orchestrator"):
        ask(url, "/status", within_s=60.0)
    with pytest.raises(UnansweredError, match="refused"):
        ask(url, "/status", within_s=60.0)
