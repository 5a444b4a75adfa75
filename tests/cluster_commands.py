"""Commands other than `primerl rl` on the nodes of a cluster: what they are given, and what is asked of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import tinker_calls
from end_to_end import Started, find, start, until

ENGINES = """\
output_dir = "i"
replicas = 2
max_model_len = 128
[model]
path = "tiny"
[deployment]
num_infer_nodes = 2
"""
FINE_TUNING = """\
output_dir = "o"
max_steps = 60
ranks = 2
[model]
path = "tiny"
[data]
path = "rows.jsonl"
batch_size = 512
seq_len = 256
[ckpt]
interval = 1000
[deployment]
num_train_nodes = 2
"""


TINKER = """\
output_dir = "t"
port = 0
[model]
path = "tiny"
[trainer]
threads = 1
[inference]
max_model_len = 64
[deployment]
num_infer_nodes = 1
"""
TINKER_KEY = "tml-of-the-test"


def tinker_address(run: Started, wait_s: float, start: int = 1) -> str:
    """Where a server of the Tinker API answers, by its log, after so many starts."""
    log = run.output / "logs" / "server.log"

    def address() -> str | None:
        assert run.launcher.poll() is None, run.launcher.communicate()
        found = re.findall(r"ready: TINKER_BASE_URL=(\S+)", log.read_text()) if log.is_file() else []
        return None if len(found) < start else str(found[-1])

    return str(until(address, wait_s, "the server"))


def a_client_trains_and_samples(run: Started, wait_s: float) -> str:
    """By a server of the Tinker API; an engine is killed meanwhile. Its address."""
    url = tinker_address(run, wait_s)
    driven = tinker_calls.Client(url, "tiny", TINKER_KEY)
    model = driven.trained_model()
    losses = [driven.step(model)[0] for _ in range(3)]
    assert losses[2] < losses[0]
    sampler = driven.sampler(0, model_path=driven.called("save_weights_for_sampler", model, path="one")["path"])
    before = driven.sample(sampler, 0, [5, 6, 7], 4)
    pid = find(str(run.output / "configs" / "engine_1.toml"))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    base = driven.sampler(1, base_model="tiny")
    answers = [driven.sample(one, 1, [5, 6, 7], 4) for one in (base, sampler)]
    assert answers[1].sequences[0].tokens == before.sequences[0].tokens
    assert all(len(answer.sequences[0].tokens) == 16 for answer in answers)
    return url


def write_rows(file: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "x"}]} for i in range(64)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def running(output: Path, *arguments: str) -> Iterator[Started]:
    """A command in the foreground, which is killed where the test has not ended it."""
    command = [sys.executable, "-m", "primerl", *arguments]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    run = Started(launcher, output)
    try:
        yield run
    finally:
        run.kill()


def engines_serve(run: Started, count: int, wait_s: float, but: str | None = None) -> dict[str, str]:
    """Addresses of so many engines by name, each of which has generated. `but`: an address that is gone."""

    def listed() -> dict[str, str]:
        assert run.launcher.poll() is None, run.launcher.communicate()
        with contextlib.suppress(OSError):
            found = {one["name"]: one["url"] for one in json.loads((run.output / "engines.json").read_text())}
            return found if len(found) == count and but not in found.values() else {}
        return {}

    found: dict[str, str] = until(listed, wait_s, f"{count} engines")
    body = {"model": "tiny", "token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
    for url in found.values():
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=30)
        assert len(answer.json()["choices"][0]["token_ids"]) == 3, answer.text
    return found


def an_engine_is_killed_and_comes_back(run: Started, name: str, wait_s: float) -> None:
    before = engines_serve(run, 2, wait_s)
    pid = find(str(run.output / "configs" / f"{name}.toml"))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    engines_serve(run, 2, wait_s, but=before[name])


def a_port_that_is_taken_is_named(folder: Path, limit_s: float) -> None:
    """Of an engine, on every node of a host. `folder`: the working folder, with `rl.toml`."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = start(folder / "o", "@", "rl.toml", "--output-dir", "o", "--inference.port", port)
        code, printed = run.ended(limit_s)
    assert code == 1, printed
    assert re.search(rf"inference exited with code 2.*0\.0\.0\.0:{port}", printed, re.DOTALL), printed
