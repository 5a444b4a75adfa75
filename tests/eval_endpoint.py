"""An endpoint that `primerl eval` measures in tests, and the command."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from primerl.config.schema.evaluation import EvalConfig

KEY = "sk-a-key-that-nobody-else-has"
TASK = {"split": "eval", "num_examples": 4, "letters": "a-j", "min_length": 3, "max_length": 6}
ENVIRONMENT = ["--env", json.dumps([{"id": "reverse-text", "taskset": TASK}]), "--max-tokens", "16"]


@dataclass
class Endpoint:
    """An OpenAI-compatible server that reverses what it is asked to, and holds what it is told to hold."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    answers: int = 1 << 30
    """So many requests are answered; the others wait for `open`."""
    open: threading.Event = field(default_factory=threading.Event)
    status: int = 200
    good: int = 0
    """So many requests are answered well before `status` counts."""

    def respond(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        if handler.headers.get("Authorization") != f"Bearer {KEY}":
            return 401, {"error": {"message": f"no such key: {handler.headers.get('Authorization')}"}}
        if handler.command == "GET":
            return 200, {"data": [{"id": "served"}]}
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        self.asked.append(question)
        if len(self.asked) > self.answers:
            self.open.wait(120)
        if self.status != 200 and len(self.asked) > self.good:
            return self.status, {"error": {"message": f"down, and your key was {KEY}"}}
        answer = {"role": "assistant", "content": f"<r>{question.removeprefix('Reverse: ')[::-1]}</r>"}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        choice = {"index": 0, "message": answer, "finish_reason": "stop"}
        return 200, {"id": "1", "object": "chat.completion", "model": "served", "choices": [choice], "usage": usage}


@contextmanager
def serving(served: Endpoint, context: ssl.SSLContext | None = None) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, content = served.respond(self)
            body = json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # whoever asked was killed
                self.close_connection = True

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        served.url = served.url.replace("http://", "https://")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.open.set()
        server.shutdown()
        server.server_close()


def command(output: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "primerl", "eval", *ENVIRONMENT, "--output-dir", str(output), *more]


def evaluate(output: Path, *more: str, key: str = KEY, trusted: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_with_key(command(output, *more), key=key, trusted=trusted)


def run_with_key(words: list[str], *, key: str = KEY, trusted: Path | None = None) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PRIMERL_TEST_KEY": key}
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        variables.pop(name, None)
    if trusted is not None:
        variables["SSL_CERT_FILE"] = str(trusted)
    return subprocess.run(words, capture_output=True, text=True, timeout=240, env=variables)


def of_endpoint(served: Endpoint) -> list[str]:
    return ["--model", "served", "--base-url", served.url, "--api-key-env", "PRIMERL_TEST_KEY"]


def config(**values: Any) -> EvalConfig:
    return EvalConfig.model_validate({"model": "m", "base_url": "http://e:1/v1", "env": [{"id": "a"}], **values})
