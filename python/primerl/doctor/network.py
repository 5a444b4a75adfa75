"""Ports, proxies, the hub and W&B, and variables that schedulers set."""

from __future__ import annotations

import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from primerl.doctor.finding import Finding, note, ok
from primerl.doctor.folders import hub_home
from primerl.launch.monitors import WANDB_KEY, WANDB_URL, has_login
from primerl.process import rank_variables

HUB = "https://huggingface.co"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ASK_S = 5.0


def findings(*, online: bool) -> Iterator[Finding]:
    """`online`: ask the hub and W&B, for `ASK_S` seconds at most."""
    yield _ports()
    yield _host()
    yield _proxies()
    yield from _scheduler()
    asked: list[Callable[[], Finding]] = [lambda: _hub(online=online), lambda: _wandb(online=online)]
    with ThreadPoolExecutor(len(asked)) as pool:
        yield from pool.map(lambda ask: ask(), asked)


def _ports() -> Finding:
    try:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
    except OSError as error:
        return note("ports", f"127.0.0.1 cannot be listened on: {error}", "the processes of a run meet there")
    return ok("ports", "free ones on 127.0.0.1")


def _host() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return note(
            "host name",
            f"{name} has no address: {error}",
            "only a run over several machines needs it: give its address there (docs/recipes/several-machines.md)",
        )
    return ok("host name", f"{name} is {address}")


def _proxies() -> Finding:
    there = [name for name in PROXIES if os.environ.get(name) or os.environ.get(name.lower())]
    if not there:
        return ok("proxies", "none")
    return ok(
        "proxies", f"{', '.join(there)} set", "used for the hub and W&B; the run's own processes never talk through one"
    )


def _scheduler() -> Iterator[Finding]:
    ranks = [name for name in rank_variables.NAMES if name in os.environ]
    if ranks and not rank_variables.is_rank(os.environ):
        yield ok(
            "variables of ranks",
            f"{', '.join(ranks)} set",
            "`primerl rl` does not hand them on: it starts its own ranks",
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        yield ok("Slurm", f"inside job {job} on {os.environ.get('SLURM_JOB_NODELIST', 'an unknown node')}")
    elif shutil.which("sbatch"):
        yield ok("Slurm", "sbatch is here")


def _hub(*, online: bool) -> Finding:
    address = _without_user(os.environ.get("HF_ENDPOINT") or HUB)
    offline = [name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    token = "with a token" if os.environ.get("HF_TOKEN") or _hub_token().is_file() else "without a token"
    if offline:
        return ok(
            "hub", f"{address}, {token}, offline ({', '.join(offline)})", "only models of the cache, and of folders"
        )
    return _asked("hub", address, token, "models and datasets come from folders or the cache", online=online)


def _without_user(address: str) -> str:
    """An address that may be shown: `user:password@` is for no log."""
    scheme, slashes, rest = address.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def _hub_token() -> Path:
    given = os.environ.get("HF_TOKEN_PATH")
    return Path(os.path.expanduser(given)) if given else hub_home() / "token"


def _wandb(*, online: bool) -> Finding:
    address = _without_user(os.environ.get("WANDB_BASE_URL") or WANDB_URL)
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "disabled"):
        return ok("W&B", f"WANDB_MODE is {mode}")
    key = "with a key" if os.environ.get(WANDB_KEY) or has_login() else "without a key"
    return _asked("W&B", address, key, "`--wandb` needs it; `WANDB_MODE=offline` writes files", online=online)


def _asked(about: str, address: str, said: str, without: str, *, online: bool) -> Finding:
    if not online:
        return ok(about, f"{address}, {said}; not asked (--online)")
    try:
        # Through the proxy, where the user has one: this is the world outside.
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=ASK_S):  # noqa: TID251
            pass
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return note(about, f"{address} does not answer: {reason}", without)
    return ok(about, f"{address} answers, {said}")
