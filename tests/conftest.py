"""What tests of several parts share."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forks
import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from end_to_end import Started

pytest_plugins = ["tiers", "failure_logs", "pytester"]

# A runner in the background may ignore SIGINT, and so would what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Several tests at once on a small machine; and no model hub is ever asked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Runs of tests are not to be among the user's own.
os.environ["PRIMERL_STATE_DIR"] = STATE = tempfile.mkdtemp(prefix="primerl-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)
forks.share()


@pytest.fixture(autouse=True)
def _environment_of_before() -> Iterator[None]:
    """What a test's code sets in the environment ends with it: a run's key, for one, lets strangers into the next."""
    before = dict(os.environ)
    yield
    before.pop("PYTEST_CURRENT_TEST", None)
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _plain_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    with forks.plain() if request.node.get_closest_marker("plain") else contextlib.nullcontext():
        yield


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of runs and secrets of the test's own."""
    from primerl.process import redaction

    folder = tmp_path / "state"
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(folder))
    monkeypatch.setattr(redaction, "_known", set())
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def mock_binary(repository: Path) -> Path:
    # torch is imported for tests that need it only.
    from engine_helpers import build_mock

    return build_mock(repository)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, not to be written to."""
    from engine_helpers import new_model

    return new_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module's own tiny model, output layer and embedding tied."""
    from end_to_end import write_small

    return write_small(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def runs() -> Iterator[list[Started | subprocess.Popen[Any]]]:
    """Runs, and scripts that train them, that end with the test, however that ends."""
    started: list[Started | subprocess.Popen[Any]] = []
    yield started
    for one in started:
        one.kill()
        if isinstance(one, subprocess.Popen):
            one.wait()


@pytest.fixture(scope="session")
def imitator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learnt from sloppy demonstrations of the short recipe; not to be written to."""
    return taught(tmp_path_factory, "imitator")


@pytest.fixture(scope="session")
def expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that learnt from flawless ones; not to be written to."""
    return taught(tmp_path_factory, "expert", "--truncate", "0", "--untag", "0")


def taught(factory: pytest.TempPathFactory, name: str, *demonstrations: str) -> Path:
    """Fine-tuned by whichever of pytest's workers needs it first; the others wait for it."""
    from end_to_end import fine_tune

    if "PYTEST_XDIST_WORKER" not in os.environ:
        return fine_tune(factory.mktemp(name), *demonstrations)
    folder = factory.getbasetemp().parent / name
    with FileLock(folder.with_suffix(".lock")):
        done = folder / "done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            done.write_text(str(fine_tune(folder, *demonstrations)))
        return Path(done.read_text())


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny random models of any family, by its name and changes of its config; not to be written to."""
    from families import write_family

    made: dict[str, Path] = {}

    def folder(family: str, **changes: Any) -> Path:
        key = f"{family}{changes}"
        if key not in made:
            made[key] = write_family(tmp_path_factory.mktemp("models") / family, family, **changes)
        return made[key]

    return folder


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as executor:
        yield executor


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a family's own chat template (`mask_helpers`)."""
    from mask_helpers import write_model

    return partial(write_model, tmp_path_factory.mktemp("models"))


@pytest.fixture
def own_logging() -> Iterator[None]:
    """The trainer sends its package's log to its own standard output; give it back after each test."""
    logger = logging.getLogger("primerl")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before
