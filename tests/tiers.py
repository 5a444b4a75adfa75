"""The tiers of tests: marks those that are `fast`, holds them to it, and orders files for pytest's workers.

With `--shuffle SEED` tests run in a random order, which shows what one leaves to another.

A test is fast unless it, or its module, is marked `processes`, `end_to_end`, `vllm` or `long`, or unless it asks for a
fixture that starts processes. A fast test that starts a process fails, whether it notices or not.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator
from typing import Any

import pytest

SLOW_MARKS = ("processes", "end_to_end", "vllm", "long")
SLOW_FIXTURES = {"mock_binary", "imitator", "expert", "tab"}
# Files of few tests that take long: the number of usual tests that would take as long.
WEIGHTS = {"test_render_real_tokenizers": 800, "test_lora": 150, "test_lora_sft": 150, "test_verify": 150}
# Events of Python's audit hooks, and where each has the program.
STARTS = {"subprocess.Popen": 0, "os.posix_spawn": 0, "os.exec": 0, "os.fork": None, "os.forkpty": None}
# Programs of others, which take milliseconds.
ALLOWED = {"git", "ldconfig", "uname"}


class Guard:
    """Sees the processes that this one starts. An audit hook cannot be taken off again, so it is switched."""

    def __init__(self) -> None:
        self.test: str | None = None
        self.started: list[str] = []
        self.installed = False

    def install(self) -> None:
        if not self.installed:
            sys.addaudithook(self.heard)
            self.installed = True

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.test is None or event not in STARTS:
            return
        position = STARTS[event]
        program = event if position is None else os.fsdecode(arguments[position])
        if os.path.basename(program) in ALLOWED:
            return
        self.started.append(program)
        # No Exception, which the code under test might catch.
        raise pytest.fail.Exception(self.complaint(program))

    def complaint(self, program: str) -> str:
        return f"a fast test started {program}: mark {self.test} with @pytest.mark.processes, or start nothing"


GUARD = Guard()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_configure() -> None:
    GUARD.install()


def is_slow(item: pytest.Item) -> bool:
    fixtures = SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    return bool(fixtures) or any(item.get_closest_marker(name) for name in SLOW_MARKS)


def weight(item: pytest.Item) -> int:
    """How long a test may take, roughly: a run, a few processes, none."""
    if item.get_closest_marker("end_to_end"):
        return 12
    return 3 if is_slow(item) else 1


# First, since `-m` selects by marks in this same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest come first: a worker that began one at the end would leave the others idle."""
    weights = {item.path: WEIGHTS.get(item.path.stem, 0) for item in items}
    for item in items:
        if not is_slow(item):
            item.add_marker("fast")
        weights[item.path] += weight(item)
    seed = config.getoption("shuffle")
    if seed is None:
        items.sort(key=lambda item: -weights[item.path])
    else:
        random.Random(seed).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    GUARD.test = item.nodeid if item.get_closest_marker("fast") else None
    GUARD.started.clear()
    try:
        return (yield)
    finally:
        GUARD.test = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if GUARD.started:
        pytest.fail(GUARD.complaint(GUARD.started[0]), pytrace=False)
    return result
