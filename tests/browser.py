"""A headless Chromium, spoken to by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
PATIENCE_S = 30.0


def installed() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page, and what it complained about."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(facts["exceptionDetails"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(facts["entry"]))
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(facts["args"]))

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def goto(self, url: str) -> None:
        # Another fragment of the same page does not load it.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value, once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression}: {self.text()}, complaints: {self.complaints}"
            time.sleep(0.03)
        return value

    def text(self) -> str:
        return str(self.evaluate("document.body?.innerText ?? ''"))

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def picture(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def tab(program: str, profile: Path) -> Iterator[Tab]:
    """`profile`: an empty folder."""
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    # Nothing of the machine's own: neither a proxy nor requests of the browser's.
    command += ["--no-proxy-server", "--disable-background-networking", "--disable-component-update"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_S
        while not file.exists() or not file.read_text().strip():
            assert process.poll() is None, f"{program} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{program} did not start within {START_S:.0f} s"
            time.sleep(0.05)
        port = file.read_text().split("\n")[0]
        opened = httpx.put(f"http://127.0.0.1:{port}/json/new?about:blank", timeout=PATIENCE_S).json()
        with connect(opened["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
