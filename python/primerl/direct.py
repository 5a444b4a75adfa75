"""Requests to the run's own processes: never through a proxy, whatever the user's variables say. Standard library only.

A proxy is for the world outside. It cannot reach this machine's loopback, and what it answers in place of an engine
looks like an engine that never gets ready.
"""

from __future__ import annotations

import importlib.util
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

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
