"""Bindings of the Rust crates: conversions only."""

from typing import Any, Literal, Self, final

__version__: str

# Env worker's lease client (rust/primerl-py/src/envs.rs)

@final
class Lease:
    """A rollout to run."""

    @property
    def rollout(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def example(self) -> int:
        """Index in the environment's list of examples."""
    @property
    def base_url(self) -> str:
        """Of the rollout's OpenAI-compatible endpoint, ending in `/v1`."""
    @property
    def sampling(self) -> dict[str, Any]:
        """As in a chat request."""
    @property
    def deadline_s(self) -> float:
        """Seconds from the lease after which the orchestrator gives the rollout up."""

@final
class Registered:
    @property
    def worker(self) -> int: ...
    @property
    def environment(self) -> int: ...
    @property
    def model(self) -> str:
        """Name to put into requests."""
    @property
    def heartbeat_s(self) -> float: ...

@final
class Leased:
    @property
    def leases(self) -> list[Lease]: ...

@final
class Cancelled:
    """Stop these rollouts and `release` them; nothing is to be reported."""

    @property
    def rollouts(self) -> list[int]: ...

@final
class LeasesVoid:
    """The orchestrator does not know this worker any more: stop all rollouts; they are released already."""

@final
class Answered:
    """The end of a model call."""

    @property
    def call(self) -> int: ...
    @property
    def status(self) -> int:
        """HTTP status; 0 when no answer came."""
    @property
    def body(self) -> bytes: ...
    @property
    def error(self) -> str | None:
        """Why no answer came."""
    @property
    def timed_out(self) -> bool:
        """Whether no answer came within the call's time limit."""

@final
class Problem:
    """Something for the log."""

    @property
    def message(self) -> str: ...

@final
class Ended:
    """There will be no more leases."""

    @property
    def kind(self) -> Literal["finished", "unreachable", "refused"]: ...
    @property
    def message(self) -> str: ...

@final
class EnvClient:
    """Registers with an orchestrator and holds its leases, on a thread of its own."""

    def __new__(
        cls,
        *,
        orchestrator_url: str,
        environment: str,
        role: str,
        name: str,
        examples: int,
        max_concurrent: int,
        give_up_s: float,
    ) -> Self:
        """Starts the thread.

        Args:
            orchestrator_url: `http://host:port`.
            environment: Name in the run.
            role: "train" or "eval".
            name: Unique to this process.
            examples: How many there are; all workers of an environment must agree.
            max_concurrent: Most rollouts held at once.
            give_up_s: Ends when the orchestrator answered nothing for this long.

        Raises:
            ValueError: A value cannot be used; the message names it.
            OSError: The thread or its sockets cannot be made.
        """
    def fileno(self) -> int:
        """Readable while `notices` has something to give: for `loop.add_reader`."""
    def notices(self) -> list[Registered | Leased | Cancelled | LeasesVoid | Answered | Problem | Ended]:
        """What happened since the last call, oldest first."""
    def report(self, rollout: int, outcome: dict[str, Any]) -> None:
        """Sends the outcome of a rollout until it is answered. Ignored where the rollout is not held.

        Args:
            outcome: `{"ok", "traces": [{"session", "trainable", "ok", "reward", "metrics", "stop_condition",
                "truncated"}], "error": {"kind", "message"} | None}`.
        """
    def release(self, rollout: int) -> None:
        """The rollout was stopped without an outcome."""
    def call(self, url: str, session: str, body: bytes, timeout_s: float) -> int:
        """Starts a model call; its end comes as `Answered` with the number returned here.

        A connection that fails is tried again; an answer of any status is final.
        """
    def abort(self, call: int) -> None:
        """Hangs up; no `Answered` follows."""
    def leave(self, patience_s: float) -> None:
        """Waits for reports under way, says goodbye, stops the thread; all within the time given."""
