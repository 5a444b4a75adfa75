"""One pair of fork servers for all tests of a worker of pytest: most of what tests start would import for seconds.

What a test starts with `subprocess` is a fork where that is as good (`ForkedPopen`), and a run that it launches uses
the same servers. PRIMERL_FORK_SERVER=off switches them off for all tests; a test that needs a plain start, or a run
with servers of its own, uses `plain` (also a mark) or `own_servers`.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from primerl.forking import servers
from primerl.forking.popen import ForkedPopen
from primerl.forking.preload import ENVIRONMENTS, TORCH

# Subcommands that import torch; for all others, the environments' server has imported what they need.
OF_TORCH = ("inference", "sft", "trainer", "verify")
NOT_OF_A_FORK = ("executable", "pass_fds", "preexec_fn", "process_group", "shell", "start_new_session")
_Plain = subprocess.Popen
_shared: servers.Servers | None = None
_is_shared = True


class Started(subprocess.Popen[Any]):
    """In the place of `subprocess.Popen`."""

    def __new__(cls, args: Any, *positional: Any, **options: Any) -> Any:
        # asyncio waits for its children by process id.
        kind = None if _caller().startswith("asyncio") else kind_of(args)
        if kind is None or positional or _shared is None or not _is_shared:
            return super().__new__(cls)
        _start(_shared, ENVIRONMENTS)
        if kind == TORCH or needs_both(args):
            _start(_shared, TORCH)
        address = _shared.address(kind)
        if address is None or unlike_a_fork(options):
            return super().__new__(cls)
        # As `Popen` has it: tests that are to start nothing are held to it.
        sys.audit("subprocess.Popen", args[0], args, None, None)
        return ForkedPopen(args, address=address, **options)


def _start(shared: servers.Servers, kind: str) -> None:
    """A test may be in a folder whose files stand in the place of libraries; the server is for all tests."""
    if kind not in shared.processes:
        with chdir(Path(__file__).parent.parent):
            shared.start(kind)


def _caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def unlike_a_fork(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) for name in NOT_OF_A_FORK if name != "start_new_session")


def kind_of(args: Any) -> str | None:
    """The server whose fork this command may be."""
    if not isinstance(args, Sequence) or isinstance(args, str) or len(args) < 3 or args[0] != sys.executable:
        return None
    if args[1] == "-c" and "sys.modules" not in args[2]:  # which it would ask what is imported
        return TORCH if any(word in args[2] for word in ("torch", "primerl.train", "transformers")) else None
    if args[1] != "-m" or args[2].split(".")[0] != "primerl" or args[2].startswith("primerl.forking"):
        return None
    return TORCH if args[3:4] and args[3] in OF_TORCH else ENVIRONMENTS


def needs_both(args: Sequence[str]) -> bool:
    """A command that starts engines or a trainer in turn."""
    return args[3:4] in (["rl"], ["eval"], ["run"])


def share() -> None:
    """Called once, before any test: with the environment of then."""
    global _shared
    # Of a folder that it names, it is that of the process which has started this worker.
    if os.environ.get(servers.VARIABLE) == servers.OFF or not servers.are_possible():
        return
    folder = Path(tempfile.mkdtemp(prefix="primerl-test-forks-"))
    _shared = servers.Servers(folder, own=True, environment=dict(os.environ))
    atexit.register(_shared.close)
    os.environ[servers.VARIABLE] = os.fspath(folder)
    subprocess.Popen = Started  # type: ignore[misc]


@contextmanager
def plain() -> Iterator[None]:
    """Within the block, everything starts the plain way, and runs have no servers."""
    with _setting(servers.OFF):
        yield


@contextmanager
def own_servers() -> Iterator[None]:
    """Within the block, what tests start is started the plain way, and each run has servers of its own."""
    with _setting(None):
        yield


@contextmanager
def _setting(value: str | None) -> Iterator[None]:
    global _is_shared
    before, was_shared = os.environ.get(servers.VARIABLE), _is_shared
    _is_shared = False
    _set(value)
    try:
        yield
    finally:
        _is_shared = was_shared
        _set(before)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(servers.VARIABLE, None)
    else:
        os.environ[servers.VARIABLE] = value
