"""One question to a run's orchestrator. Standard library only."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode, urlsplit

from primerl.run_key import run_key_header


class UnansweredError(Exception):
    """Nobody answered in time, or not with JSON. The message says how it failed."""


def ask(url: str, path: str, *, within_s: float, **query: object) -> tuple[int, Any]:
    """`GET path`: the HTTP status, and the JSON. Raises UnansweredError."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=within_s)
    try:
        connection.request("GET", f"{path}?{urlencode(query)}" if query else path, headers=run_key_header())
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnansweredError(str(error)) from None
    finally:
        connection.close()
