"""Senders and receivers of weights as processes of their own, which do what they are told line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rank_helpers import Meeting

SENDER = """
import json, os, signal, sys, threading
from pathlib import Path
import torch
from primerl.train.weights import publish, transfer
from primerl.train.weights.broadcast import Snapshot
from primerl.train.distributed.ranks import RankError, Ranks
from primerl.train.model.packed_model import DTYPES, load_model
from primerl.train.distributed.fsdp import local, shard
from primerl.train.weights.transfer import Sender
from primerl.train.weights.publish import WeightsPublisher

given = json.loads(sys.argv[1])
ranks = Ranks.join(given["ranks"], 1, 60.0)
dtype = DTYPES[given["dtype"]]
model = load_model(given["model"], "float32" if ranks.size > 1 else given["dtype"])
shard(model, ranks, dtype)
output = Path(given["output"])
sender = Sender(output / "broadcasts", "127.0.0.1", ranks.device, bucket_bytes=given["bucket_bytes"], timeout_s=10.0)
publisher = WeightsPublisher(output, 2, True, ranks, sender=sender)
publisher.barrier._patience_s = given["patience_s"]
broadcast, said = transfer.broadcast, print
left = -1

def counted(*arguments):
    global left
    left -= 1
    if left == 0 and at_last == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if left == 0 and at_last == "withdraw":
        transfer.ENDING_S = 0.01
        sender.withdraw()
    broadcast(*arguments)

transfer.broadcast = counted
snapshot = Snapshot()
said(json.dumps("ready"), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if "version" in command:
        # As a broadcast beside training does: into memory that is used again.
        files, wait = snapshot.take(publisher.shares(model), model)
        wait()
        try:
            answer = str(publisher.write(command["version"], files))
        except (OSError, RankError) as error:
            answer = [type(error).__name__, str(error)]
    elif "patience_s" in command:
        publisher.barrier._patience_s = command["patience_s"]
        answer = "patient"
    elif "kept" in command:
        storages = [tensor.untyped_storage() for tensors in files.values() for tensor in tensors.values()]
        answer = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    elif "disk" in command:
        def broken(*arguments, how=command["disk"], **options):
            if how == "full":
                raise OSError(28, "No space left on device")
            threading.Event().wait()
        publish.save_file = broken
        answer = "broken"
    elif "scale" in command:
        with torch.no_grad():
            for tensor in model.parameters():
                local(tensor).mul_(command["scale"])
        answer = "scaled"
    else:
        left, at_last = command["buckets"], command["then"]
        answer = "counting"
    said(json.dumps(answer), flush=True)
"""

WORKER = """
import json, os, signal, sys
import xxhash
from primerl.train.weights import receiver
from primerl.train.weights.tensors import as_bytes

new_group, broadcast = receiver.new_group, receiver.broadcast
groups, left = 0, -1

def counted_group(*arguments):
    global groups
    groups += 1
    return new_group(*arguments)

def counted(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    broadcast(*arguments)

receiver.new_group, receiver.broadcast = counted_group, counted
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    left = command.pop("die_after", -1)
    try:
        tensors = receiver.receive(**command)
        rows = {name: as_bytes(tensor) for name, tensor in tensors.items()}
        answer = {name: xxhash.xxh3_64_hexdigest(row.numpy().data) for name, row in rows.items()}
    except receiver.TransferError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps([answer, groups]), flush=True)
"""


class Told:
    """A process that answers each line of JSON by one."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(10)}"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def senders(model: Path, output: Path, ranks: int = 1, **changes: Any) -> Iterator[list[Told]]:
    """The ranks of a trainer, which publish and send what they hold."""
    given = {"model": str(model), "output": str(output), "ranks": ranks, "dtype": "float32", "bucket_bytes": 10_000}
    given["patience_s"] = 60.0
    meeting = Meeting()
    started = []
    try:
        for rank in range(ranks):
            places = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} | meeting.environment
            started.append(Told(SENDER, json.dumps(given | changes), **places))
        assert [sender.answer() for sender in started] == ["ready"] * ranks
        yield started
    finally:
        for sender in started:
            sender.end()


def all_do(told: list[Told], command: dict[str, Any]) -> list[Any]:
    for one in told:
        one.tell(command)
    return [one.answer() for one in told]
