"""Servers that monitors talk to in tests: they record what they got, over real HTTP."""

from __future__ import annotations

import base64
import gzip
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Recording(ThreadingHTTPServer):
    """`key`: the only one it knows. `is_down`: every call is answered with 503."""

    daemon_threads = True
    key = "k" * 40

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.is_down = False
        self.lock = threading.RLock()
        self.calls: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        raise NotImplementedError

    @contextmanager
    def serving(self) -> Iterator[Recording]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recording

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionAbortedError("the client was killed while it wrote")
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        with self.server.lock:
            if self.server.is_down:
                code, answer = 503, {"error": "down"}
            else:
                self.server.calls.append((self.command, self.path, dict(self.headers), body))
                code, answer = self.server.answer(self.command, self.path, dict(self.headers), body)
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = handle_any  # noqa: N815 (http.server's names)

    def log_message(self, *_: Any) -> None:
        """Nothing: the calls are kept."""


class PrimeServer(Recording):
    """The platform's calls for external training runs."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        if path.startswith("/storage/"):
            return 200, {}
        if headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"detail": "unknown key"}
        if path == "/rft/external-runs":
            runs = sum(call[1] == path for call in self.calls)
            return 201, {"run": {"id": f"run-{runs}"}}
        if path == "/rft/samples/presign":
            step = json.loads(body)["step"]
            return 200, {"data": {"presignedUrl": f"{self.url}/storage/step-{step}", "s3Key": f"step-{step}"}}
        return 200, {}

    def bodies(self, path: str) -> list[dict[str, Any]]:
        with self.lock:
            return [json.loads(body) for _, called, _, body in self.calls if called == f"/rft{path}"]


class WandbServer(Recording):
    """As much of W&B's server as its client needs: runs that can be gone on with, rows of history, files."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.runs: dict[str, dict[str, Any]] = {}

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        given = base64.b64encode(f"api:{self.key}".encode()).decode()
        if path.startswith(("/graphql", "/files/")) and headers.get("Authorization") != f"Basic {given}":
            return 401, {"errors": [{"message": "user is not logged in"}]}
        if path == "/graphql":
            query = json.loads(body)
            name = query.get("operationName") or query["query"].split()[1].partition("(")[0]
            return 200, {"data": self.graphql(name, query.get("variables") or {})}
        if path.endswith("/file_stream"):
            self.stream(path.split("/")[4], json.loads(body or b"{}"))
        return 200, {}

    def graphql(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "e", "name": "me"}
        project = {"id": "p", "name": given.get("project"), "entity": entity}
        if name == "RunResumeStatus":
            return {"model": {**project, "bucket": self.bucket(given["name"])}}
        if name == "UpsertBucket":
            run = self.runs.setdefault(given["name"], {**given, "history": [], "config": {}, "exit_code": None})
            run["config"].update(json.loads(given.get("config") or "{}"))
            return {"upsertBucket": {"bucket": {**self.bucket(given["name"]), "project": project}, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if name == "ArtifactType":
            return {"project": {"artifact": None}}
        if name == "CreateArtifact":
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s"}}}}
        viewer = {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"features": []}}

    def bucket(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        history = run["history"]
        counts = {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(history)}
        tail = {"historyTail": json.dumps(history[-1:]), "eventsTail": "[]", "summaryMetrics": "{}"}
        shown = {"id": "b", "name": name, "displayName": run.get("displayName"), "config": json.dumps(run["config"])}
        return {**shown, **counts, **tail, "tags": [], "notes": "", "wandbConfig": '{"t": 1}', "sweepName": None}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.runs[name]
        added = body.get("files", {}).get("wandb-history.jsonl")
        if added:
            run["history"][added["offset"] :] = added["content"]
        if body.get("complete"):
            run["exit_code"] = body.get("exitcode")

    def history(self) -> list[dict[str, Any]]:
        """Rows of the one run."""
        with self.lock:
            (run,) = self.runs.values()
            return [json.loads(row) for row in run["history"]]
