"""One question to a run's orchestrator. Standard library only."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode, urlsplit

from primerl.run_key import run_key_header


class UnansweredError(Exception):
    """Nobody answered in time, or not as an orchestrator does. The message says how it failed."""


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
