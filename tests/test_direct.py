"""The run's own processes are asked directly, whatever proxy the user has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from primerl.inference import server
from primerl.net import requests
from test_asking import answering


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One that nobody serves."""
    for name in ("no_proxy", "NO_PROXY", *requests.PROXIES, *map(str.lower, requests.PROXIES)):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, url)
        yield url


def test_an_engine_is_asked_directly(proxy: str) -> None:
    with answering(200, b"{}", []) as url, requests.open_url(f"{url}/health", timeout=30) as response:
        assert response.status == 200
    with answering(200, b"{}", []) as url, pytest.raises(ValueError, match="501"):
        server._post(url, {})  # the double knows GET alone: it was reached


def test_clients_of_models_reach_the_run_directly(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx takes a proxy for loopback as well; the openai package is made of it."""
    with answering(200, b"{}", []) as url:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        for name, value in requests.without_proxy({"HTTP_PROXY": proxy}, url).items():
            monkeypatch.setenv(name, value)
        assert httpx.get(url).status_code == 200


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"NO_PROXY": "a"}, None),
        ({"HTTP_PROXY": ""}, None),
        ({"http_proxy": "http://p"}, "127.0.0.1,localhost,::1,node7"),
        ({"ALL_PROXY": "http://p", "NO_PROXY": "a, .b", "no_proxy": "c,a"}, "c,a,.b,127.0.0.1,localhost,::1,node7"),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "*"}, "*"),
    ],
)
def test_what_the_user_has_is_kept(environ: dict[str, str], expected: str | None) -> None:
    wanted: dict[str, Any] = {} if expected is None else {"NO_PROXY": expected, "no_proxy": expected}
    assert requests.without_proxy(environ, "http://node7:9") == wanted


def test_a_socks_proxy_that_no_client_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"ALL_PROXY": "socks5://p:1", "http_proxy": "http://p:1", "all_proxy": "SOCKS5H://p:1"}
    monkeypatch.setattr(requests.importlib.util, "find_spec", lambda name: None)
    assert requests.unusable_proxies(environ) == ["ALL_PROXY", "all_proxy"]
    monkeypatch.setattr(requests.importlib.util, "find_spec", lambda name: name)
    assert requests.unusable_proxies(environ) == []
