"""Whether engines and an orchestrator on several machines reach each other, before either works: for dry runs."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from primerl.config.errors.fail import ConfigError
from primerl.net.addresses import UnreachableError, told_to
from primerl.net.requests import UnansweredError, ask, open_url, tell

ASK_S = 10.0
UNAUTHORIZED = 401


class _Answers(http.server.BaseHTTPRequestHandler):
    """As an engine's /health."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[str]:
    """The URL by which it listens. Raises OSError."""
    made = _Server6 if ":" in host else _Server
    with made((host, port), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, name="reaching", daemon=True)
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def engines(urls: Sequence[str]) -> list[str]:
    """Which of the engines elsewhere answer now, a sentence each. They may be started later, so none is an error."""
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        return list(pool.map(_engine, urls))


def _engine(url: str) -> str:
    try:
        with open_url(f"{url.rstrip('/')}/health", timeout=ASK_S):
            return f"the engine at {url} is reached from here"
    except (OSError, ValueError) as error:
        return f"the engine at {url} is not reached from here: {error}; start it before the run, or open its port"


def check(orchestrator: str, host: str, port: int) -> str:
    """What was seen, in words. `host`, `port`: where the engine is to listen.

    Raises ConfigError where one of the two does not reach the other, or the key is another run's.
    """
    try:
        status, _ = ask(orchestrator, "/status", within_s=ASK_S)
    except UnansweredError as error:
        raise ConfigError.at("join", f"no orchestrator answers at {orchestrator}: {error}") from None
    if status == UNAUTHORIZED:
        raise ConfigError.at(
            "join", f"{orchestrator} refuses this machine's key; set PRIMERL_API_KEY to the key of that run"
        )
    try:
        with _listening(host, port) as own:
            url = told_to(own, orchestrator)
            status, said = tell(orchestrator, "/engines/reach", {"url": url}, within_s=ASK_S)
    except UnreachableError as error:
        raise ConfigError.like(error) from None
    except UnansweredError as error:
        raise ConfigError.at("join", f"{orchestrator} has stopped answering: {error}") from None
    except OSError as error:
        raise ConfigError.at("port", f"{host}:{port} cannot be listened on ({error}); choose another") from None
    if not said.get("reached"):
        why = said.get("why") or said.get("error", {}).get("message") or f"status {status}"
        raise ConfigError.at(
            "host",
            f"the orchestrator at {orchestrator} does not reach this machine at {url}: {why}; set host to an "
            "address that it reaches, and open the port in the firewalls between them",
        )
    return f"{orchestrator} is reached from here, and reaches this machine at {url}"
