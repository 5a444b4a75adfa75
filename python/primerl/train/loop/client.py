"""The client of the orchestrator's trainer endpoints, with deadlines that keep a wait from becoming a hang.

A trainer identifies itself, so that the orchestrator gives a run to one trainer at a time; all of its ranks send the
same identity.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from primerl.train.distributed.ranks import Ranks

log = logging.getLogger(__name__)


LAUNCHER_MARK = "PRIMERL_RUN_MARK"
"""Variable that the launcher sets; a launcher ends its processes when it ends."""
STAT_START_TIME = 19
"""Index of the start time among the fields of /proc/PID/stat after the process's name."""

FINISHED = "finished"
"""What the last heartbeat says the trainer does."""
MSGPACK = "application/msgpack"
_REQUEST_TIMEOUT_S = 30.0
"""Longer than the orchestrator's long poll: after it, the connection is dead or the process hangs."""
_LONG_S = 10.0
"""After this time a heartbeat says how long the trainer has been doing the same thing."""
_KEPT_S = 60.0
"""A connection that was idle for longer may have been closed by the other side: a new one is opened."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_REMIND_S = 30.0
"""Between two lines about an orchestrator that does not answer."""

Identity = dict[str, object]


def own_identity() -> Identity:
    """This process's identity: a new id, its process number and machine. On Linux also its boot, PID namespace and
    start time, from which an orchestrator on the same machine sees that it has ended."""
    identity: Identity = {"id": uuid.uuid4().hex, "pid": os.getpid(), "host": socket.gethostname()}
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        numbers = os.readlink("/proc/self/ns/pid")
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        identity |= {"place": f"{boot} {numbers}", "began": int(fields[STAT_START_TIME])}
    except (OSError, ValueError, IndexError):
        pass  # not Linux: only missing heartbeats show that it has ended
    if LAUNCHER_MARK in os.environ:
        identity["launcher"] = os.environ[LAUNCHER_MARK]
    return identity


def begin(ranks: Ranks, client: OrchestratorClient) -> Identity:
    """Registers this trainer for the run; the leading rank asks for all. Waits while it is unknown whether the trainer
    that has the run is still alive.

    Raises OrchestratorError on all ranks if the run has another trainer, which the message names.
    """
    identity, refusal = own_identity(), ""
    if ranks.leads:
        try:
            client.begin(identity)
        except OrchestratorError as error:
            refusal = str(error)
    agreed: tuple[Identity, str] = ranks.agree((identity, refusal))
    identity, refusal = agreed
    if refusal:
        raise OrchestratorError(refusal)
    client.identity = identity
    return identity


class OrchestratorError(Exception):
    """The orchestrator cannot be reached, or refused a request. The message holds its reason."""


class BatchTimeout(Exception):  # noqa: N818 (named as the wait it ends)
    """No batch came in time; the message says what the orchestrator was waiting for."""


class ManifestRefused(OrchestratorError):  # noqa: N818 (named as what happened)
    """The orchestrator cannot read the published weights, or finds them damaged."""


class PublishAgain(Exception):  # noqa: N818 (a request, not an error)
    """No engine can load the policy that is trained on, from where it was published. The message says why."""


class NoMoreBatches(Exception):  # noqa: N818 (an end, not an error)
    """The orchestrator has finished, or is stopping."""


class OrchestratorClient:
    """One persistent connection. Not thread-safe: each thread uses a client of its own.

    `request_timeout_s` bounds one request; failed ones are repeated for `unreachable_after_s` (0: never).
    """

    def __init__(
        self,
        url: str,
        unreachable_after_s: float,
        request_timeout_s: float | None = None,
        identity: dict[str, object] | None = None,
    ) -> None:
        """`identity`: sent with every request."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"orchestrator_url is {url!r}; it must look like http://127.0.0.1:8000")
        self.url = url
        self.unreachable_after_s = unreachable_after_s
        self.identity = identity
        self._prefix = parts.path.rstrip("/")
        timeout = request_timeout_s or min(_REQUEST_TIMEOUT_S, unreachable_after_s)
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
        self._used = time.monotonic()
        self._leaving = threading.Event()

    def leave(self) -> None:
        """Called from another thread when the run is over for this process: failed requests are no longer repeated."""
        self._leaving.set()

    @property
    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    def close(self) -> None:
        self._connection.close()

    def begin(self, identity: dict[str, object]) -> None:
        """Register for the run, before anything else. Waits while the orchestrator does not know whether the trainer
        that has the run is still alive, which it finds out before that one's silence would end the run.

        Raises OrchestratorError if the run has another trainer, which the message names.
        """
        while True:
            status, body = self._post("/trainer/begin", {"trainer": identity})
            if status != 202:
                return self._check("/trainer/begin", status, body)
            log.info("waiting for %s", _fields(body).get("waiting_for", "no reason given"))

    def batch(self, step: int, rank: int, deadline_s: float, waiting: Callable[[str], None]) -> bytes | bytearray:
        """The batch of `step` for data rank `rank`, as bytes for `data.decode_batch`.

        Args:
            deadline_s: how long the orchestrator may keep answering that the batch is not ready.
            waiting: called with what the orchestrator waits for, each time it answers.

        Raises:
            NoMoreBatches: the run is over.
            PublishAgain: engines need the weights of policy `step` - 1, and can no longer load them.
            BatchTimeout: `deadline_s` passed.
            OrchestratorError: no answer, or a refusal.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            status, body = self._post("/trainer/batch", {"step": step, "rank": rank})
            if status == 200:
                return body
            if status == 410:
                raise NoMoreBatches(_message(body))
            if status != 202:
                raise OrchestratorError(f"{self.url} refused batch {step} ({status}): {_message(body)}")
            answer = _fields(body)
            broken = answer.get("publish_again")
            if broken is not None and broken["version"] == step - 1:
                raise PublishAgain(broken["why"])
            reason = str(answer.get("waiting_for", "no reason given"))
            waiting(reason)
            if time.monotonic() > deadline:
                raise BatchTimeout(f"batch {step} did not come within {deadline_s:g} s; waiting for: {reason}")

    def batch_ahead(self, step: int, rank: int) -> bytes | bytearray | None:
        """The batch of `step` if it is ready, else None, whatever the reason. Does not wait, and is not repeated."""
        try:
            status, body = self._post("/trainer/batch", {"step": step, "rank": rank, "ahead": True}, repeat_for_s=0.0)
        except OrchestratorError as error:
            log.debug("batch %d ahead of its step: %s", step, error)
            return None
        return body if status == 200 else None

    def weights(self, version: int, manifest: str) -> None:
        """Report that policy `version` is published.

        Raises:
            ManifestRefused: the files are not there, or not what the manifest says.
            NoMoreBatches: the run is over.
            OrchestratorError: no answer, or another refusal.
        """
        path = "/trainer/weights"
        status, body = self._post(path, {"version": version, "manifest": manifest})
        if status == 410:
            raise NoMoreBatches(_message(body))
        if status == 400 and _error_of(body).get("param") == "manifest":
            raise ManifestRefused(f"{self.url}{path} refused ({status}): {_message(body)}")
        self._check(path, status, body)

    def resume(self, step: int) -> None:
        """Report that training resumes after `step` (0: from the start). Raises OrchestratorError."""
        self._accepted("/trainer/resume", {"step": step})

    def checkpoint(self, step: int, saved: int | None) -> None:
        """Report that batches up to `step` will not be requested again, and that the checkpoint of step `saved`, if
        any, is on disk, next to which the orchestrator keeps the run's state.

        A failure is only logged: the next report includes this one, and after the last one the orchestrator may be
        gone.
        """
        try:
            self._accepted("/trainer/checkpoint", {"step": step, "saved": saved}, repeat_for_s=0.0)
        except OrchestratorError as error:
            log.info("checkpoint of step %d: %s", step, error)

    def heartbeat(self, step: int, doing: str, *, leaving: bool = False) -> None:
        """Report that this process is alive, and what it does; `leaving`: that no heartbeat will follow.

        Raises OrchestratorError.
        """
        self._accepted("/trainer/heartbeat", {"step": step, "doing": doing, "leaving": leaving})

    def _accepted(self, path: str, fields: dict[str, object], repeat_for_s: float | None = None) -> None:
        self._check(path, *self._post(path, fields, repeat_for_s))

    def _check(self, path: str, status: int, body: bytes | bytearray) -> None:
        if status != 200:
            raise OrchestratorError(f"{self.url}{path} refused ({status}): {_message(body)}")

    def _post(
        self, path: str, fields: dict[str, object], repeat_for_s: float | None = None
    ) -> tuple[int, bytes | bytearray]:
        """Status and body of an answer that is final for this request; transport failures and 5xx are tried again
        until the orchestrator has been silent for `unreachable_after_s`. Every endpoint here may be repeated."""
        import msgpack  # neither is needed without an orchestrator

        from primerl.run_key import run_key_header

        request = msgpack.packb(fields if self.identity is None else {"trainer": self.identity, **fields})
        patience = self.unreachable_after_s if repeat_for_s is None else repeat_for_s
        deadline = time.monotonic() + patience
        pause, said = _FIRST_PAUSE_S, None
        if time.monotonic() - self._used > _KEPT_S:
            self._connection.close()
        while True:
            try:
                headers = {"Content-Type": MSGPACK, "Accept": MSGPACK, **run_key_header(self.url)}
                self._connection.request("POST", self._prefix + path, request, headers)
                response = self._connection.getresponse()
                body = _read(response)
                self._used = time.monotonic()
                if response.status < 500:
                    if said is not None:
                        log.info("orchestrator answers again")
                    return response.status, body
                failure = f"{response.status}: {_message(body)}"
            except (OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
            self._connection.close()
            if self.is_leaving or time.monotonic() + pause > deadline:
                raise OrchestratorError(
                    f"orchestrator at {self.url} did not answer {path} for {patience:g} s: {failure}"
                )
            # The first one is often the only one; after a run was stopped it is asked for minutes.
            now, level = time.monotonic(), logging.DEBUG
            if said is None or now - said > _REMIND_S:
                said, level = now, logging.WARNING
            log.log(
                level, "orchestrator did not answer %s (%s); trying again for %.0f s", path, failure, deadline - now
            )
            self._leaving.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _read(response: http.client.HTTPResponse) -> bytes | bytearray:
    """The whole body; in writable memory if its length is known, since a batch's tensors are views of it."""
    if response.length is None:
        return response.read()
    body = bytearray(response.length)
    view, filled = memoryview(body), 0
    while filled < len(body):
        count = response.readinto(view[filled:])
        if count == 0:
            raise http.client.IncompleteRead(bytes(view[:filled]), len(body) - filled)
        filled += count
    return body


def _message(body: bytes | bytearray) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", errors="replace")


def _error_of(body: bytes | bytearray) -> dict[str, Any]:
    try:
        return dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return {}


def _fields(body: bytes | bytearray) -> dict[str, Any]:
    import msgpack

    return dict(msgpack.unpackb(body))


def _for_long(what: str, since: float) -> str:
    elapsed = time.monotonic() - since
    return f"{what} (for {elapsed:.0f} s)" if elapsed >= _LONG_S else what


class Heartbeat:
    """Reports every `interval_s` what the trainer does, from a thread of its own: a trainer that computes for long is
    known to be alive, and what one hangs in is known. The orchestrator ends the run when heartbeats stop
    (`timeouts.trainer_s`), unless [`leave`][] was called.

    One of several data ranks is `active`: a rank that hangs keeps it waiting in the sum of the gradients.
    """

    def __init__(
        self, url: str, interval_s: float = 2.0, *, active: bool = True, identity: dict[str, object] | None = None
    ) -> None:
        # A failed heartbeat is not repeated: the next one includes it.
        self._client = OrchestratorClient(url, 0.0, request_timeout_s=interval_s, identity=identity)
        self._interval_s = interval_s
        self._state = (0, "starting", time.monotonic())
        self._background: tuple[str, float] | None = None
        self._stop = threading.Event()
        self._failing = False
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        if active:
            self._thread.start()

    def doing(self, step: int, what: str) -> None:
        # One assignment of one tuple: the thread sees the old one or the new one.
        self._state = (step, what, time.monotonic())

    def background(self, what: str | None) -> None:
        """What another thread does in parallel; None when it is done."""
        self._background = None if what is None else (what, time.monotonic())

    def leave(self) -> None:
        """The work is done: the next heartbeat, at `close`, is the last one."""
        self._leaving = True

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=3 * self._interval_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            step, what, since = self._state
            background = self._background
            doing = [_for_long(what, since)] + ([] if background is None else [_for_long(*background)])
            try:
                self._client.heartbeat(step, "; in the background ".join(doing))
                self._failing = False
            except OrchestratorError as error:
                # Whether to end the run is the main thread's decision, by the deadline of its own requests.
                if not self._failing and not self._stop.is_set():
                    log.warning("heartbeat: %s", error)
                self._failing = True
            self._stop.wait(self._interval_s)
        if self._leaving:
            # The run may be over, and the orchestrator gone.
            with contextlib.suppress(OrchestratorError):
                self._client.heartbeat(self._state[0], FINISHED, leaving=True)
        self._client.close()
