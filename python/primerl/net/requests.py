"""Requests to the run's own processes: never through a proxy, whatever the user's variables say. Standard library only.

A proxy is for the world outside. It cannot reach this machine's loopback, and what it answers in place of an engine
looks like an engine that never gets ready.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from primerl.run_key import run_key_header

# One question to a run's orchestrator. Standard library only.


class UnansweredError(Exception):
    """There was no answer in time, or not an orchestrator's. The message says how it failed."""


def ask(url: str, path: str, *, within_s: float, **query: object) -> tuple[int, dict[str, Any]]:
    """`GET path`: the HTTP status, and the JSON object; empty where a refusal has none, as a proxy's may.

    Raises UnansweredError.
    """
    return _said(url, "GET", f"{path}?{urlencode(query)}" if query else path, None, within_s)


def tell(url: str, path: str, body: dict[str, Any], *, within_s: float) -> tuple[int, dict[str, Any]]:
    """`POST path` with JSON, and the same of the answer. Raises UnansweredError."""
    return _said(url, "POST", path, json.dumps(body), within_s)


def _said(url: str, method: str, path: str, body: str | None, within_s: float) -> tuple[int, dict[str, Any]]:
    headers = {**run_key_header(url), **({} if body is None else {"Content-Type": "application/json"})}
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=within_s)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnansweredError(str(error) or type(error).__name__) from None
    finally:
        connection.close()
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return answer.status, found
    if answer.status == http.client.OK:
        raise UnansweredError("what answers is no orchestrator: it sends no JSON object")
    return answer.status, {}


LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def open_url(request: str | urllib.request.Request, timeout: float) -> Any:
    """`urllib.request.urlopen` without proxies; it raises the same errors."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout)


def without_proxy(environ: Mapping[str, str], *urls: str) -> dict[str, str]:
    """What `NO_PROXY` and `no_proxy` have to be for libraries (httpx in the clients of models) to reach loopback and
    the hosts of `urls` directly: the user's own list, and these. Empty where there is no proxy."""
    if not any(environ.get(spelt) for name in PROXIES for spelt in (name, name.lower())):
        return {}
    # Where both are set, libraries read one of the two, and not all the same.
    listed = [host.strip() for name in ("no_proxy", "NO_PROXY") for host in environ.get(name, "").split(",")]
    hosts = [*listed, *LOOPBACK, *(urlsplit(url).hostname or "" for url in urls)]
    joined = "*" if "*" in listed else ",".join(dict.fromkeys(filter(None, hosts)))
    return {"NO_PROXY": joined, "no_proxy": joined}


def unusable_proxies(environ: Mapping[str, str]) -> list[str]:
    """Variables that name a SOCKS proxy where `socksio` is missing. httpx then refuses to make any client, also one
    that would not use the proxy."""
    if importlib.util.find_spec("socksio") is not None:
        return []
    spelt = [spelling for name in PROXIES for spelling in (name, name.lower())]
    return [name for name in spelt if urlsplit(environ.get(name, "")).scheme.lower().startswith("socks")]
