"""vLLM's server as a child of this process: started, watched, ended with all that it has started.

    VllmServer(config, installation) -- url, wait(seconds), stop()

`wait` has the meaning that it has of the embedded engine: whether the engine was stopped, or an error with the reason.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING

from primerl.inference.backend import EngineEndedError
from primerl.inference.vllm import as_numbers, flags
from primerl.inference.vllm.installation import Installation
from primerl.net.addresses import url_of
from primerl.net.requests import open_url

if TYPE_CHECKING:
    from primerl.inference.settings import InferenceConfig

log = logging.getLogger("primerl.inference")

STOP_S = 7.0
"""vLLM has this long to end by itself; the launcher, which kills after ten seconds, should not have to."""
ABORT_S = 2.0
HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 5.0
ILL_S = 60.0
"""A server that has not answered for this long is given up."""
GONE_S = 5.0
"""One that says that its engine process is gone, or does not listen any more, should have ended by then; it waits for
calls that will never be answered."""
PORT_ATTEMPTS = 3
LOG_LINES = 20
# The last exception, or refusal of an option, that is not about another one.
CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt|error): .+)$")
NO_CAUSE = ("See root cause above", "EngineDeadError", "Engine core initialization failed")
PORT_TAKEN = "Address already in use"


class VllmServer:
    def __init__(self, config: InferenceConfig, installation: Installation) -> None:
        """Starts the server; it is ready when it answers. Raises ValueError for settings that it cannot have."""
        flags.check(config.vllm)
        self._config = config
        self._installation = installation
        model = Path(config.model.path)
        self._as_numbers = as_numbers.folder_for(model) if config.lora is None and as_numbers.applies(model) else None
        self._attempts_left = PORT_ATTEMPTS if config.port == 0 else 1
        self._watched_since: float | None = None
        self._healthy_at = 0.0
        self._looked_at = 0.0
        self._start()

    def _start(self) -> None:
        self._attempts_left -= 1
        self.port = self._config.port or free_port(self._config.host)
        self.last_lines: collections.deque[str] = collections.deque(maxlen=400)
        folder = None if self._as_numbers is None else self._as_numbers.name
        command = flags.command(self._config, self._installation, self.port, folder)
        log.info("starting %s: %s", self._installation.describe(), " ".join(command))
        self._process = subprocess.Popen(
            command,
            env=flags.environment(self._config, self._installation),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A process group of its own: only we get a Ctrl-C, and all of it can be killed.
            process_group=0,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Copies the server's output to our own log; the end is kept, to report why the server ended."""
        with output:
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                self.last_lines.append(text)
                with contextlib.suppress(OSError, ValueError):  # our log has no reader any more
                    print(text, file=sys.stderr, flush=True)

    @property
    def url(self) -> str:
        return url_of(self._config.host, self.port)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> bool:
        """Waits that long; never True, for only `stop` ends it on request. Raises EngineEndedError once it has ended,
        or, after `watch`, has not been healthy for a minute."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._look_after()
            return False
        self._reader.join(2.0)
        if (
            self._attempts_left > 0
            and self._watched_since is None
            and any(PORT_TAKEN in line for line in self.last_lines)
        ):
            log.info("port %d was taken meanwhile; starting at another", self.port)
            self._start()
            return False
        raise self._ended(self._describe_end(code), signal.Signals(-code) if code < 0 else signal.SIGABRT)

    def watch(self) -> None:
        """The server is ready; from now on it has to be healthy."""
        self._watched_since = self._healthy_at = time.monotonic()

    def _look_after(self) -> None:
        now = time.monotonic()
        if self._watched_since is None or now - self._looked_at < HEALTH_EVERY_S:
            return
        self._looked_at = now
        try:
            with open_url(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S):
                self._healthy_at = time.monotonic()
        except (OSError, http.client.HTTPException) as error:
            if now - self._healthy_at > (GONE_S if _is_gone(error) else ILL_S):
                raise self._ended(
                    f"vLLM's server has not been healthy for {now - self._healthy_at:.0f} s: {error}{self._said()}",
                    signal.SIGABRT,
                ) from None

    def _ended(self, message: str, ends_by: signal.Signals) -> EngineEndedError:
        """One that has served is started again by the launcher; what is left of it goes first."""
        if self._watched_since is None:
            return EngineEndedError(message)
        self.kill()
        return EngineEndedError(message, ends_by)

    def _describe_end(self, code: int) -> str:
        how = f"exited with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"vLLM's server {how}{self._said()}"

    def _said(self) -> str:
        """The server's last error, and the end of its log."""
        cause = next((found[1] for line in reversed(self.last_lines) if (found := _cause(line))), None)
        lines = "\n".join(f"  {line}" for line in list(self.last_lines)[-LOG_LINES:])
        return f"{f': {cause}' if cause else ''}\nthe end of its log:\n{lines}"

    def stop(self) -> None:
        """Ends it and all that it has started: requests first, since they may keep it from ending."""
        if self._process.poll() is None:
            self._abort_requests()
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                log.warning("vLLM's server did not end within %.0f s of SIGTERM; it is killed", STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends it and all that it has started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(2.0)
        if self._as_numbers is not None:
            self._as_numbers.cleanup()

    def _abort_requests(self) -> None:
        request = urllib.request.Request(
            f"{self.url}/abort_requests", b"{}", {"Content-Type": "application/json"}, method="POST"
        )
        # It may not listen yet, or not answer any more.
        with contextlib.suppress(OSError, http.client.HTTPException), open_url(request, timeout=ABORT_S):
            pass


def _cause(line: str) -> re.Match[str] | None:
    return None if any(words in line for words in NO_CAUSE) else CAUSE.search(line)


def _is_gone(error: Exception) -> bool:
    """Whether the server itself reports its end, or no longer listens."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(error, urllib.error.HTTPError) or isinstance(reason, ConnectionRefusedError)


def free_port(host: str) -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
