"""Reserves bundles on nodes, and compares what the nodes have with what the launcher has."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.launch.placement import alike
from primerl.launch.placement.protocol import PlacementError
from primerl.launch.placement.ray import keeper
from primerl.launch.placement.ray.connection import Connection
from primerl.process.problems import Problem

AGENTS_S = 240.0
"""On top of the wait: for actors to start on a busy node. The driver gives up sooner, and says why."""


@dataclass(slots=True)
class Seat:
    """One bundle on one node, and the agent in it."""

    key: str
    node: str
    """Id."""
    name: str
    address: str
    cpus: int
    gpu_count: int
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES takes them, once they are reserved."""
    is_there: bool = True
    witness: tuple[str, str] = ("", "")


def seats(group: str, bundles: Mapping[str, tuple[int, int]], nodes: Sequence[Mapping[str, Any]]) -> dict[str, Seat]:
    """By their keys, one a bundle. `bundles`: CPUs and GPUs by the node's id."""
    known = {one["id"]: one for one in nodes}
    found = [
        Seat(f"{group}.{index}", node, str(known[node]["name"]), str(known[node]["address"]), max(1, cpus), gpus)
        for index, (node, (cpus, gpus)) in enumerate(bundles.items())
    ]
    return {seat.key: seat for seat in found}


def facts_command(path: str, text: str) -> list[str]:
    return [sys.executable, "-I", "-S", keeper.__file__, keeper.FACTS, path, text]


def message(group: str, wanted: Mapping[str, Seat], wait_s: float, witness: tuple[str, str]) -> dict[str, Any]:
    asked = [
        {"seat": seat.key, "node": seat.node, "name": seat.address, "CPU": seat.cpus, "GPU": seat.gpu_count}
        for seat in wanted.values()
    ]
    return {"reserve": group, "seats": asked, "wait_s": wait_s, "facts": facts_command(*witness)}


def ask(
    connection: Connection, group: str, wanted: Mapping[str, Seat], wait_s: float, witness: tuple[str, str]
) -> None:
    connection.tell(**message(group, wanted, wait_s, witness))


def reserved(
    connection: Connection,
    wanted: dict[str, Seat],
    wait_s: float,
    folder: Path,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, Seat]:
    """The same seats with their GPUs. `folder`: which all nodes have to share. `check` may raise. Raises
    PlacementError."""
    file = folder / "run" / f".shared.{secrets.token_hex(8)}"
    file.parent.mkdir(parents=True, exist_ok=True)
    witness = os.fspath(file), secrets.token_hex(16)
    file.write_text(witness[1], encoding="utf-8")
    total = ", ".join(f"{seat.address}: {seat.gpu_count} GPUs, {seat.cpus} CPUs" for seat in wanted.values())
    for seat in wanted.values():
        seat.witness = witness
    asked = message("0", wanted, wait_s, witness)
    found = connection.ask("reserved", wait_s + AGENTS_S, check, say, **asked)
    if found is None or "reserved" not in found:
        why = connection.last_words() if found is None and connection.is_gone else (found or {}).get("why", "no answer")
        raise PlacementError.at("ray", f"the cluster does not give the run its nodes ({total}): {why}")
    problems = [problem for key, fact in found["facts"].items() if (problem := difference(wanted[key], fact, folder))]
    if problems:
        raise PlacementError.of(problems)
    for key, fact in found["facts"].items():
        wanted[key].gpus = tuple(fact["gpus"])
        if (remark := alike.skew(f"node {wanted[key].address}", float(fact.get("ahead_s", 0.0)))) is not None:
            say(remark)
    say(f"Ray has reserved {total}")
    return wanted


def difference(seat: Seat, fact: Mapping[str, Any], folder: Path) -> Problem | None:
    """Why a node cannot run processes of the run."""
    node = f"node {seat.address}"
    if "error" in fact:
        return Problem.at(
            "ray",
            f"{node} cannot run {sys.executable} with this primerl ({fact['error'].strip()}); install the same "
            "Python environment at the same path on all nodes",
        )
    if (other := alike.difference(node, fact, alike.versions())) is not None:
        return Problem.at("ray", other)
    if not fact["sees"]:
        words = f"{folder} is not the same folder on {node} as here; give an output_dir that all nodes share"
        return Problem.at("output_dir", words)
    return None
