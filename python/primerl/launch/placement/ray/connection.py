"""The launcher's half of the driver: a process that it asks, and that tells what happens on the nodes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from primerl.launch.placement.protocol import PlacementError

CONNECT_S = 30.0
"""Ray itself may wait for minutes for a cluster that does not answer."""
ANSWER_S = 30.0
END_S = 10.0
MODULE = "primerl.launch.placement.ray.driver"


class Connection:
    """Raises PlacementError where there is no cluster."""

    def __init__(self, address: str, namespace: str | None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - Ray writes there as long as the driver runs
        self._driver = subprocess.Popen(
            [sys.executable, "-m", MODULE, address, namespace or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._received = b""
        self._waiting: list[dict[str, Any]] = []
        self.is_gone = False
        first = self._first(address)
        self.own = str(first["node"])
        self.ray = str(first["ray"])
        self.nodes: list[dict[str, Any]] = first["nodes"]

    def _first(self, address: str) -> dict[str, Any]:
        found = self._answer("connected", CONNECT_S)
        if found is not None and "connected" in found:
            return dict(found["connected"])
        why = f"no answer within {CONNECT_S:.0f} s" if found is None else str(found.get("failed"))
        if found is None and self.is_gone:
            why = f"the process that connects has ended: {self.last_words()}"
        self.kill()
        raise PlacementError.at(
            "ray.address",
            f"no Ray cluster can be reached by {address!r}: {why}; run this on a node of the cluster "
            "(`ray status` answers there) or within `ray job submit`, with the cluster's version of ray and of Python",
        )

    def fileno(self) -> int:
        assert self._driver.stdout is not None
        return self._driver.stdout.fileno()

    def tell(self, **what: Any) -> None:
        """Nothing, where the driver is gone: `poll` notices."""
        assert self._driver.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._driver.stdin.write(json.dumps(what).encode() + b"\n")
            self._driver.stdin.flush()

    def ask_nodes(self) -> list[dict[str, Any]]:
        """As they are now. An empty list where the driver does not answer."""
        self.tell(nodes=True)
        found = self._answer("nodes", ANSWER_S)
        self.nodes = [] if found is None else found["nodes"]
        return self.nodes

    def ask_port(self, seat: str) -> int | None:
        self.tell(port=seat)
        found = self._answer("port", ANSWER_S)
        return None if found is None else int(found["port"])

    def ask(
        self, key: str, limit_s: float, check: Callable[[], None], say: Callable[[str], None], **what: Any
    ) -> dict[str, Any] | None:
        """Tells it something, and waits for the message with that key, or for a refusal. `check` may raise; `say` gets
        what Ray waits for."""
        self.tell(**what)
        return self._answer(key, limit_s, check, say)

    def _answer(
        self,
        key: str,
        limit_s: float,
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any] | None:
        deadline, later = time.monotonic() + limit_s, []
        try:
            while time.monotonic() < deadline and not self.is_gone:
                check()
                for index, message in enumerate(messages := self.poll(0.2)):
                    if key in message or "failed" in message or "refused" in message:
                        later += messages[index + 1 :]
                        return message
                    if "waits" in message:
                        say(f"waiting for nodes that others use (Ray says {message['state']})")
                    else:
                        later.append(message)
            return None
        finally:
            self._waiting += later

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """What it has told, waiting up to that long for the first."""
        if self._waiting:
            found, self._waiting = self._waiting, []
            return found
        if self.is_gone:
            return []
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return []
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            self.is_gone = True
            return []
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        """The last line that the driver, or Ray within it, has written."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"code {self._driver.returncode}" + (f", {lines[-1][:300]}" if lines else "")

    def end(self) -> None:
        """Gives back what was reserved."""
        self.tell(end=True)
        assert self._driver.stdin is not None
        with contextlib.suppress(OSError):
            self._driver.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(END_S)
        self.kill()

    def kill(self) -> None:
        self.is_gone = True
        if self._driver.poll() is None:
            self._driver.kill()
        self._driver.wait()
        for stream in (self._driver.stdin, self._driver.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
