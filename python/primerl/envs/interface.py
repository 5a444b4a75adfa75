"""What the worker knows of an environment, whichever generation of verifiers it was written for.

`generations.v1` and `generations.classic` are modules with the functions of
[`Generation`][primerl.envs.interface.Generation]; `generations.choice` says which of them an environment needs.
Standard library only: neither of the two can be imported where the other's verifiers is installed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from primerl.process.problems import ProblemError

if TYPE_CHECKING:
    from primerl.envs.limits import RolloutLimits

log = logging.getLogger("primerl.envs")

# An exception may carry a whole document: neither logs nor the orchestrator's journal are for those.
LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 20_000

OVERFLOW = "context_length_exceeded"
"""Code of the error by which the gateway, as OpenAI's API, says that a prompt is too long."""
WORDS_OF_OVERFLOW = (OVERFLOW, "maximum context length")
"""The same in the text of other servers, which may have no such code, and of libraries that quote an answer."""

Role = Literal["train", "eval"]

Outcome = dict[str, Any]
"""`Outcome` of primerl-core: `ok`; `traces`, each with `session`, `trainable`, `ok`, `reward`, `metrics`,
`stop_condition`, `truncated`, `demonstration` where it is asked for;
`error`, None or a table as [`failure`][primerl.envs.interface.failure] makes it."""

Post = Callable[[str, str, str, bytes, float], Awaitable[tuple[int, bytes]]]
"""(URL, API key, session, JSON body, timeout in seconds) -> (status, body); raises ConnectionError or TimeoutError."""


_not_numbers: set[str] = set()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What an environment measured as floats: truth values and whole numbers, NumPy's too. What is none (None,
    words, NaN) has no mean, and is omitted, with a warning for each name. What a dictionary holds is named
    `metric/key`."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers({f"{name}/{key}": inner for key, inner in value.items()})
            continue
        try:
            # A word may look like a number in one rollout and not in the next.
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except Exception:  # noqa: BLE001 (of whatever type it is: a tensor of several raises RuntimeError)
            number = math.nan
        if math.isfinite(number):
            found[str(name)] = number
        elif value is not None and name not in _not_numbers:
            _not_numbers.add(name)
            log.warning("metric %r is not a finite number (%s); it is omitted", name, shortened(repr(value), 80))
    return found


def with_demonstrations(outcome: Outcome, key: str | None, places: Sequence[Sequence[Any]]) -> Outcome:
    """The outcome, each trace with what an expert answered to its example; a failure where there is none.

    Args:
        key: Where it is; None where it is not asked for.
        places: For each trace what may have it, the first one first: mappings, or objects with attributes.
    """
    if key is None or not outcome["ok"]:
        return outcome
    for trace, of_trace in zip(outcome["traces"], places, strict=True):
        found = (_at(place, key) for place in of_trace)
        text = next((value for value in found if value is not None), None)
        if isinstance(text, str) and text:
            trace["demonstration"] = text
        elif trace["trainable"]:
            what = "there is none" if text is None else f"it is {shortened(repr(text), 80)}"
            message = (
                f"training_mode opsd needs a demonstration as text under {key!r} in an example's info or its task, and "
                f"{what}; orchestrator.demonstration.key names another place"
            )
            return {"ok": False, "traces": outcome["traces"], "error": {"kind": "environment", "message": message}}
    return outcome


def _at(place: Any, key: str) -> Any:
    return place.get(key) if isinstance(place, Mapping) else getattr(place, key, None)


class EnvironmentRefusedError(ProblemError):
    """The environment cannot be loaded as configured. The message names it and what to do; its keys are those of the
    environment's section."""


@dataclass(frozen=True)
class Gateway:
    """Where the model calls of one rollout go."""

    base_url: str
    api_key: str = field(repr=False)
    post: Post
    deadline: float
    """On the clock of `time.monotonic`."""


@dataclass(frozen=True)
class Address:
    """The gateway of one rollout."""

    label: str
    """Names it in the log."""
    base_url: str
    """Where its model is asked, ending in `/v1`."""
    api_key: str = field(repr=False)


class Runner(Protocol):
    """Runs examples of one environment."""

    async def run(
        self,
        example: Any,
        rollout: Address,
        *,
        model: str,
        sampling: dict[str, Any],
        time_limit: float,
        demonstration: str | None = None,
    ) -> Outcome:
        """One rollout, to its end; it is stopped by cancelling it.

        Args:
            example: Of the environment's list.
            sampling: As in a chat request.
            time_limit: Seconds in which the rollout's model calls must end.
            demonstration: Where the example has what an expert answered, which its traces are reported with.
        """

    async def run_group(
        self,
        example: Any,
        rollouts: Sequence[Address],
        *,
        model: str,
        sampling: dict[str, Any],
        time_limit: float,
        demonstration: str | None = None,
    ) -> list[Outcome]:
        """All rollouts of a group, scored together: an outcome for each, in their order."""


class Generation(Protocol):
    """A module that can load environments."""

    def prepare(self) -> None:
        """Changes other libraries as an env worker needs them; before an environment is loaded."""

    def load(self, environment_id: str, arguments: dict[str, Any], root: str) -> Any:
        """The environment. On the main thread. Raises EnvironmentRefusedError."""

    def list_examples(
        self, env: Any, environment_id: str, seed: int, role: Role = "train", held_out: int = 0
    ) -> Sequence[Any]:
        """All examples but the first `held_out`, in an order that depends on nothing but the environment, its split and
        the seed.

        Raises EnvironmentRefusedError."""

    def key(self, example: Any) -> str:
        """The example's key: the same for the same example in every process."""

    def scores_groups(self, env: Any) -> bool:
        """Whether rewards compare the rollouts of a group, which must then be run together."""

    def remark(self, env: Any, environment_id: str, role: Role) -> str | None:
        """What its user should know of it before a run; after its examples were listed."""

    def serving(
        self, env: Any, root: str, post: Post, limits: RolloutLimits = ...
    ) -> AbstractAsyncContextManager[Runner]:
        """The environment with what it shares between rollouts. `limits`: of each of them."""


class OutsideGeneration(Generation, Protocol):
    """One of another package: an entry point in `primerl.environments` names its module."""

    def claims(self, environment_id: str) -> bool:
        """Whether it is for this environment. Imports nothing of it."""


def check_held_out(environment_id: str, count: int, held_out: int) -> None:
    """Raises EnvironmentRefusedError where no example is left to train on."""
    if count <= held_out:
        raise EnvironmentRefusedError(
            f"environment {environment_id!r} has {count} examples, and {held_out} are held out for validation: "
            "none is left to train on; lower val.num_examples, or name the taskset's validation split in val.taskset"
        )


def is_overflow(status: int, answer: str) -> bool:
    """Whether an answer, or what a library says of it, is that the model's context is full."""
    if status not in (400, 413):
        return False
    return _code(answer) == OVERFLOW or any(words in answer for words in WORDS_OF_OVERFLOW)


def _code(answer: str) -> Any:
    """The error's code in a body of OpenAI's or Anthropic's API; None where it has none."""
    try:
        return json.loads(answer)["error"]["code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def failure(kind: str, message: str, exception: str | None = None) -> Outcome:
    """The outcome of a rollout that has no traces. `exception`: the name of its type, where there was one."""
    error = {"kind": kind, "message": shortened(message, LONGEST_MESSAGE), "exception": exception}
    return {"ok": False, "traces": [], "error": error}


def shortened(text: str, longest: int) -> str:
    """Beginning and end of a text of more than `longest` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters omitted] {text[-half:]}"


def sendable(value: Any) -> Any:
    """A JSON value without halves of surrogate pairs, which have no UTF-8: `\\ud800` in their place."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {sendable(key): sendable(inner) for key, inner in value.items()}
    return [sendable(inner) for inner in value] if isinstance(value, list | tuple) else value


def module_name(environment_id: str) -> str:
    """`owner/my-env@1.2` -> `my_env`."""
    return environment_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
