"""An env worker as a node of the user's tailnet: `tailscaled` alongside it, without root and without a network device.

    start   tailscaled in userspace mode; its state is in memory, so the node is ephemeral and leaves with the daemon
    log in  `tailscale up`, which reads the key from its standard input: no command line and no file has it
    use     HTTP_PROXY and its like, of this process and all that it starts, name the daemon's proxy; NO_PROXY names
            the gateway, which is never reached through it
    watch   a daemon that ends also ends the worker (`NODE_LOST`), and the launcher starts both again

The daemon lives as long as the worker: it is asked to end when the worker ends, and by the kernel when it is killed.
Standard library only, since the interpreter may be an environment's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from primerl.launch.supervise.plain_start import die_with_parent
from primerl.launch.supervise.trees import MARK

log = logging.getLogger("primerl.envs")

PROGRAMS = ("tailscaled", "tailscale")
KEY_VARIABLE = "TAILSCALE_AUTH_KEY"
SOCKS_VARIABLE = "PRIMERL_TAILNET_SOCKS5"
"""Where the daemon speaks SOCKS5, for what is no HTTP. Not ALL_PROXY: with SOCKS there httpx, and so every client of a
model, refuses to be made unless `socksio` is installed."""
NODE_LOST = 3
"""Exit code of a worker whose daemon ended."""
# Daemons are often installed outside of a user's PATH.
MORE_FOLDERS = ("/usr/local/bin", "/usr/local/sbin", "/usr/sbin")
# A socket's path has room for 107 bytes, and the null at its end.
LONGEST_SOCKET = 100
POLL_S = 0.05
# For `tailscaled` to log its node out.
STOP_S = 3.0
# From the daemon's end until the worker is gone, whatever its environment blocks.
LAST_WORDS_S = 10.0
LOG_LINES = 12
# What the daemon needs of the worker's environment, in which the user's secrets are.
DAEMON_VARIABLES = ("HOME", "PATH", "TMPDIR", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", MARK)
PROXY_VARIABLES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY")


class TailnetError(Exception):
    """The node could not join; the message names it, why, and what to do."""


@dataclass(frozen=True)
class TailnetConfig:
    """An env worker's node in a tailnet."""

    name: str
    """Name of the node."""
    log: str
    """File that the log of its `tailscaled` is appended to."""
    login_s: float
    """How long it has to join, seconds."""


def program(name: str) -> str | None:
    """Path of one of Tailscale's programs; None where it is not installed."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *MORE_FOLDERS]))


class Node:
    """A daemon that has joined; `port`: of its proxy, on the loopback interface, HTTP and SOCKS5 alike."""

    def __init__(self, config: TailnetConfig, daemon: subprocess.Popen[bytes], port: int) -> None:
        self.config = config
        self.port = port
        self.lost: str | None = None
        """Why it is no longer a node."""
        self._daemon = daemon
        self._leaving = threading.Event()
        self._on_loss: Callable[[str], None] | None = None
        self._watcher = threading.Thread(target=self._watch, name="tailnet", daemon=True)
        self._watcher.start()

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """`tell` is called on another thread, once, also where it is lost already."""
        self._on_loss = tell
        if self.lost is not None:
            tell(self.lost)

    def leave(self) -> None:
        """Ends the daemon, which logs its node out."""
        self._leaving.set()
        end(self._daemon)

    def _watch(self) -> None:
        code = self._daemon.wait()
        if self._leaving.is_set():
            return
        self.lost = (
            f"node {self.config.name} has left the tailnet: tailscaled {describe(code)}; its log is {self.config.log}"
        )
        log.error("%s", self.lost)
        if self._on_loss is not None:
            self._on_loss(self.lost)
        # An environment may block the worker's event loop, or still be loading. This thread ends with the process.
        time.sleep(LAST_WORDS_S)
        print(f"error: {self.lost}", file=sys.stderr, flush=True)
        os._exit(NODE_LOST)


def proxy_variables(port: int, orchestrator_url: str) -> dict[str, str]:
    """Environment of a worker and all that it starts, with the daemon's proxy at that port."""
    # Replaces the user's proxies: the daemon itself connects to whatever is not in the tailnet.
    direct = dict.fromkeys(["127.0.0.1", "localhost", "::1", urlsplit(orchestrator_url).hostname or "localhost"])
    found = dict.fromkeys(PROXY_VARIABLES, f"http://127.0.0.1:{port}") | {"NO_PROXY": ",".join(direct)}
    found |= {name.lower(): value for name, value in found.items()}
    return found | {SOCKS_VARIABLE: f"socks5h://127.0.0.1:{port}"}


def join(config: TailnetConfig) -> Node:
    """Starts a daemon and logs it in. On the main thread, before there are others: the kernel ties the daemon's life to
    the thread that starts it. Takes the key out of this process's environment.

    Raises:
        TailnetError: the programs are missing, the key is refused, or the login did not end in time.
        SystemExit: SIGTERM came meanwhile.
    """
    key = os.environ.pop(KEY_VARIABLE, "")
    daemon, client = (program(name) for name in PROGRAMS)
    if daemon is None or client is None or not key:
        missing = KEY_VARIABLE if daemon and client else "tailscale or tailscaled, which have to be on PATH"
        raise TailnetError(f"node {config.name} cannot join the tailnet: there is no {missing}")
    deadline = time.monotonic() + config.login_s
    with _orderly_stop(), _short_folder() as folder, _reserved_port() as port:
        opened = os.fspath(folder / "tailscaled.sock")
        process = _started(daemon, config, folder, opened, port)
        try:
            _wait_for_socket(process, opened, config, deadline)
            _log_in(client, opened, key, config, deadline)
        except BaseException:
            end(process)
            raise
    log.info("joined the tailnet as %s; the proxy is at 127.0.0.1:%d", config.name, port)
    return Node(config, process, port)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def describe(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def tail(file: str) -> str:
    """The end of the daemon's log, set off from the worker's own."""
    try:
        lines = Path(file).read_text(errors="replace", encoding="utf-8").splitlines()[-LOG_LINES:]
    except OSError:
        lines = ["(no log)"]
    return "\n".join(f"  | {line}" for line in lines)


def _started(daemon: str, config: TailnetConfig, folder: Path, opened: str, port: int) -> subprocess.Popen[bytes]:
    worker = os.getpid()
    Path(config.log).parent.mkdir(parents=True, exist_ok=True)
    with open(config.log, "ab") as output:
        return subprocess.Popen(
            [
                daemon,
                "--tun=userspace-networking",
                "--state=mem:",
                "--port=0",  # else the variable PORT would be taken for it
                f"--socket={opened}",
                f"--socks5-server=127.0.0.1:{port}",
                f"--outbound-http-proxy-listen=127.0.0.1:{port}",
            ],
            env={**_of_daemon(os.environ), "TS_LOGS_DIR": os.fspath(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A signal to the worker's group is for the worker, which ends the daemon after its last words.
            start_new_session=sys.platform.startswith("linux"),
            preexec_fn=lambda: die_with_parent(worker, signal.SIGTERM),
        )


def _of_daemon(variables: Mapping[str, str]) -> dict[str, str]:
    """Proxies that the machine itself needs count for the daemon."""
    wanted = {*DAEMON_VARIABLES, *PROXY_VARIABLES, "NO_PROXY"}
    return {name: value for name, value in variables.items() if name in wanted or name.upper() in wanted}


def _wait_for_socket(process: subprocess.Popen[bytes], opened: str, config: TailnetConfig, deadline: float) -> None:
    while True:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(opened)
            return
        if process.poll() is not None:
            raise TailnetError(
                f"node {config.name} cannot join the tailnet: tailscaled {describe(process.returncode)}; its log is "
                f"{config.log}"
            )
        if time.monotonic() > deadline:
            raise _too_late(config, "tailscaled does not answer")
        time.sleep(POLL_S)


def _log_in(client: str, opened: str, key: str, config: TailnetConfig, deadline: float) -> None:
    # Who is in the tailnet could otherwise reach, through the node, all that listens on this machine's loopback.
    settings = ["--shields-up", "--accept-routes"]
    command = [client, f"--socket={opened}", "up", "--auth-key=file:/dev/stdin", f"--hostname={config.name}", *settings]
    is_late = False
    try:
        done = subprocess.run(
            command,
            input=key.encode(),
            env=_of_daemon(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(POLL_S, deadline - time.monotonic()),
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code, is_late = late.stdout or b"", -1, True
    said = output.decode(errors="replace").replace(key, "<secret>")
    with open(config.log, "a", encoding="utf-8") as file:
        file.write("".join(f"tailscale up: {line}\n" for line in said.splitlines()))
    last = (said.strip().splitlines() or ["no word"])[-1]
    if is_late:
        raise _too_late(config, f"`tailscale up` still waits ({last})")
    if code:
        raise TailnetError(
            f"node {config.name} could not join the tailnet: `tailscale up` {describe(code)} ({last}); check that the "
            "key has not expired or been revoked, and that it is reusable, as each env worker joins with it; the "
            f"daemon's log is {config.log}"
        )


def _too_late(config: TailnetConfig, state: str) -> TailnetError:
    return TailnetError(
        f"node {config.name} did not join the tailnet within tailscale.login_s = {config.login_s:g} s: {state}; check "
        "that this machine reaches https://controlplane.tailscale.com, and that the key is pre-approved where the "
        f"tailnet approves devices; raise it where the login is only slow; the daemon's log is {config.log}"
    )


@contextlib.contextmanager
def _orderly_stop() -> Iterator[None]:
    """SIGTERM, which would end a process that still starts at once, leaves nothing behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _short_folder() -> Iterator[Path]:
    """Private, and only until the node has joined: its daemon gets no request after that."""
    usual = tempfile.gettempdir()
    length = len(os.fsencode(usual)) + len("/primerl-node-xxxxxxxx/tailscaled.sock")
    base = usual if length <= LONGEST_SOCKET else "/tmp"
    with tempfile.TemporaryDirectory(prefix="primerl-node-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port, which Linux gives to no other process until the daemon listens on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if not sys.platform.startswith("linux"):
            holder.close()
        yield port
