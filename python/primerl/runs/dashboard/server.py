"""The dashboard's HTTP server. Standard library only; it serves a few people at a time.

```text
/                              the dashboard; /assets/... and /page/assets/... its files (no data: no key is needed)
/api/runs                      the list
/api/curves                    ?runs=ID,ID&names=a,b&from=&to=&points=
/api/compare                   ?runs=ID,ID
/api/rollouts                  ?runs=ID,ID&environment=&example=&of=ID&limit=
/api/runs/ID/rollouts/N[/turns/K], /api/runs/ID/page    of one run: as the page answers; where its page is
```
On loopback no key is asked for, and only requests for this machine by its own names are answered: a name of another
site that was made to lead here gets nothing. On any other address every request for data needs the key.
"""

from __future__ import annotations

import hmac
import json
import re
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from primerl._core import page_files
from primerl.net.addresses import is_loopback, is_own_name, url_of
from primerl.process.redaction import redact
from primerl.runs.dashboard.sources import SourceError
from primerl.runs.dashboard.told import MOST_NAMES, MOST_ROLLOUTS, MOST_RUNS, Board
from primerl.runs.listings import UnknownExampleError
from primerl.runs.registry import UnknownRunError
from primerl.runs.state import StateError

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
OF_A_RUN = re.compile(r"/api/runs/([0-9a-f]+)(/rollouts/\d+(?:/turns/\d+)?|/page)")
MOST_POINTS = 1000
LARGEST = 2**63 - 1


class RefusedError(Exception):
    """A request is answered with this status and this message."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Query:
    """The query of a request: every key is known, and every value is checked before anything is read."""

    def __init__(self, text: str, *allowed: str) -> None:
        try:
            found = parse_qs(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=20)
        except ValueError as error:
            raise RefusedError(400, "invalid_query", f"the query cannot be read: {error}") from None
        for key, values in found.items():
            if key not in allowed or len(values) > 1:
                problem = "is given twice" if key in allowed else f"is unknown; expected {', '.join(allowed) or 'none'}"
                raise RefusedError(400, "invalid_query", f"{key!r} {problem}", key)
        self._values = {key: values[0] for key, values in found.items()}

    def text(self, key: str) -> str:
        return self._values.get(key, "")

    def names(self, key: str, most: int) -> list[str]:
        found = list(dict.fromkeys(filter(None, self.text(key).split(","))))
        if len(found) > most:
            raise RefusedError(
                400, "invalid_query", f"{key}: {len(found)} are asked for, at most {most} are shown", key
            )
        return found

    def number(self, key: str, default: int | None, most: int = LARGEST, least: int = 0) -> int | None:
        text = self.text(key)
        if text == "":
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise RefusedError(400, "invalid_query", f"{key}: {text!r} is not a number from {least} to {most}", key)
        return int(text)


class Dashboard:
    """Serves from the moment it is made. Raises OSError if the address cannot be bound."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, key: str | None = None) -> None:
        self.board = Board()
        self.key = key
        self.is_local = is_loopback(host)
        self.policy = page_files()[1]
        self.assets = _assets()
        handler = type("Handler", (_Handler,), {"dashboard": self})
        self._server = _Server((host, port), handler)
        self.url = url_of(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="dashboard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.board.close()

    def answer(self, path: str, query: str) -> Any:
        """JSON of a path of the API, as a value or as text. Raises RefusedError."""
        if found := OF_A_RUN.fullmatch(path):
            return self._of_a_run(found[1], found[2], query)
        answers: dict[str, Callable[[str], Any]] = {
            "/api/runs": self._runs,
            "/api/curves": self._curves,
            "/api/compare": self._compare,
            "/api/rollouts": self._rollouts,
        }
        if path not in answers:
            raise RefusedError(404, "not_found", f"there is no {path}")
        return answers[path](query)

    def _runs(self, query: str) -> Any:
        Query(query)
        return {"runs": self.board.runs()}

    def _curves(self, query: str) -> Any:
        asked = Query(query, "runs", "names", "from", "to", "points")
        return self.board.curves(
            self.board.chosen(asked.names("runs", MOST_RUNS)),
            asked.names("names", MOST_NAMES),
            first=asked.number("from", 0) or 0,
            last=LARGEST if (last := asked.number("to", LARGEST)) is None else last,
            points=asked.number("points", 400, MOST_POINTS, 3) or MOST_POINTS,
        )

    def _compare(self, query: str) -> Any:
        return self.board.compared(self.board.chosen(Query(query, "runs").names("runs", MOST_RUNS)))

    def _rollouts(self, query: str) -> Any:
        asked = Query(query, "runs", "environment", "example", "of", "limit")
        of = self.board.chosen(asked.names("of", 1))
        return self.board.rollouts(
            self.board.chosen(asked.names("runs", MOST_RUNS)),
            environment=asked.text("environment"),
            example=asked.number("example", None, 2**32 - 1),
            of=of[0] if of else None,
            limit=asked.number("limit", 20, MOST_ROLLOUTS, 1) or 1,
        )

    def _of_a_run(self, run_id: str, what: str, query: str) -> Any:
        (run,) = self.board.chosen([run_id])
        if what == "/page":
            Query(query)
            if not self.is_local:
                problem = f"its page is served on the dashboard's machine alone: `primerl page {run_id}` there"
                raise RefusedError(409, "page_is_local", problem)
            return {"url": f"{self.board.sources.page_url(run.output_dir)}/"}
        asked = Query(query, "from", "limit")
        search = "&".join(f"{key}={asked.number(key, 0)}" for key in ("from", "limit") if asked.text(key))
        return self.board.sources.ask(run.output_dir, f"/page{what}?{search}".rstrip("?"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Header and body are two writes: the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True
    timeout = 60
    dashboard: Dashboard

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        try:
            if self.dashboard.is_local and not is_own_name(self.headers.get("Host", "")):
                raise RefusedError(403, "foreign_host", "the dashboard serves this machine only; open it as 127.0.0.1")
            if (asset := self.dashboard.assets.get(path)) is not None:
                return self._send(200, *asset)
            self._check_key()
            value = self.dashboard.answer(path, query)
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        except RefusedError as error:
            return self._refuse(error)
        except (UnknownRunError, SourceError) as error:
            return self._refuse(RefusedError(404, "run_unreadable", str(error)))
        except UnknownExampleError as error:
            return self._refuse(RefusedError(404, "unknown_example", str(error), "example"))
        except StateError as error:
            return self._refuse(RefusedError(503, "list_unreadable", str(error)))
        except ConnectionError:
            return None
        except Exception as error:  # noqa: BLE001 - one answer fails; the dashboard continues
            self.log_error("%s: %r", self.path, error)
            return self._refuse(RefusedError(500, "internal", f"the dashboard failed: {type(error).__name__}: {error}"))
        return self._send(200, "application/json", redact(text))

    def _check_key(self) -> None:
        if self.dashboard.key is None:
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.dashboard.key.encode()):
            raise RefusedError(
                401, "key_missing", "the dashboard's key is missing or wrong; it was printed with its address"
            )

    def _refuse(self, error: RefusedError) -> None:
        body = {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": error.param}
        self._send(error.status, "application/json", redact(json.dumps({"error": body})))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind if "charset" in kind else f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.dashboard.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cache-Control", "no-store" if kind == "application/json" else "no-cache"),
        ):
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:  # the browser has left
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Requests are not printed."""

    def log_error(self, text: str, *arguments: object) -> None:
        if "Request timed out" not in text:
            super().log_message("%s", redact(text % arguments))


def _assets() -> dict[str, tuple[str, str]]:
    """Content type and text, by path."""
    found = {f"/page/assets/{name}": asset for name, asset in page_files()[0].items()}
    for file in files("primerl.runs.dashboard").joinpath("web").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[f"/assets/{file.name}"] = (kind, file.read_text(encoding="utf-8"))
    found["/"] = found.pop("/assets/index.html")
    return found
