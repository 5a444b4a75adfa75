"""Whether what is placed fits: memory of every process on each of its devices, and what would make it fit.

    placement's plan ──> Row a process: devices, ports, bytes by kind (`primerl.train.model.memory`)
    rows of one device ──> more than it has? ──> Problem: which, by how much, and the changes that are enough

Everything is estimated from the run's config and the model's `config.json`; nothing is started. A GPU's bytes are what
its driver says, main memory is that of the machine or its container. Where neither is known, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from primerl.config.process_files import files, resolve
from primerl.config.schema.rl import RLConfig
from primerl.launch.placement import fixes
from primerl.launch.placement.local import HOST
from primerl.launch.placement.protocol import Place, Plan
from primerl.launch.preflight.model_folder import read_json
from primerl.runs import memory as machine_memory
from primerl.runs.tables import table
from primerl.train.model import memory

MAIN = "memory"
"""The device of what computes on CPUs."""
GB = 1e9
VLLM_SHARE = 0.92
"""Part of a GPU's memory that vLLM takes by default."""


@dataclass(frozen=True, slots=True)
class Row:
    """One process of the plan."""

    process: str
    kind: str
    node: str
    devices: tuple[str, ...]
    """GPUs by name, or `memory` where it computes on CPUs; empty where it computes nothing large."""
    cpus: int
    ports: tuple[str, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes on each device, by what they are for."""
    takes: int | None = None
    """Bytes that it takes of each device, where that is more than the parts: an engine fills its share with KV
    cache."""
    share: float | None = None
    """Part of each device that it may take; None: all."""

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Problem:
    """What would not fit."""

    device: str
    processes: tuple[str, ...]
    needed: int
    there: int
    changes: tuple[str, ...] = ()
    """Each of them is enough."""

    def __str__(self) -> str:
        who = " and ".join(self.processes)
        where = "main memory" if self.device == MAIN else f"GPU {self.device}"
        said = f"{who} would need about {_gb(self.needed)} of {where}, which has {_gb(self.there)} for it"
        if not self.changes:
            return f"{said}; no single change of the config is enough"
        return f"{said}; what makes it fit: {'; or '.join(self.changes)}"


@dataclass(frozen=True, slots=True)
class Fitting:
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...] = ()
    unknown: str | None = None
    """Why memory could not be estimated."""

    @property
    def gpus(self) -> int:
        """GPUs that any process gets; one that several share counts once."""
        return len({(row.node, device) for row in self.rows for device in row.devices if device != MAIN})

    def text(self) -> str:
        header = ["process", "node", "devices", "CPUs", "ports", "memory a device"]
        lines = table(header, [_cells(row) for row in self.rows])
        if self.unknown is not None:
            lines.append(f"  memory is not known: {self.unknown}")
        return "\n".join([*lines, *(f"would not fit: {problem}" for problem in self.problems)])

    def gpus_of(self, process: str) -> list[str]:
        return [name for row in self.rows if row.process == process for name in row.devices if name != MAIN]

    def as_json(self) -> dict[str, Any]:
        return {
            "fits": not self.problems,
            "processes": [{**asdict(row), "parts": dict(row.parts), "bytes": row.bytes or None} for row in self.rows],
            "problems": [asdict(problem) for problem in self.problems],
            "unknown": self.unknown,
        }


def fitting(config: RLConfig, plan: Plan, sizes: Mapping[str, int]) -> Fitting:
    """`config`: with the model's folder in it. `sizes`: bytes of each GPU, by its name, as far as they are known."""
    shape, unknown = read_json(Path(files.absolute(config.model.path)) / "config.json"), None
    rows = tuple(_row(config, place, shape, sizes) for place in plan.places)
    if any(row.devices and not row.parts for row in rows):
        unknown = "the model's config.json lacks the usual keys"
    return Fitting(rows, tuple(_problems(config, rows, shape, sizes)), unknown)


def _row(config: RLConfig, place: Place, shape: dict[str, Any], sizes: Mapping[str, int]) -> Row:
    role = place.role
    row = Row(
        process=role.name,
        kind=role.kind,
        node=place.host,
        devices=_devices(config, place),
        cpus=role.resources.cpus,
        ports=tuple(f"{one.host}:{one.port or 'any'}" for one in role.listens),
        share=role.resources.share,
    )
    if role.kind == "trainer":
        return replace(row, parts=fixes.trainer_parts(config, shape, on_gpu=row.devices != (MAIN,)))
    return _serving(config, row, shape, sizes) if role.kind == "inference" else row


def _devices(config: RLConfig, place: Place) -> tuple[str, ...]:
    if place.gpus or place.role.kind not in ("trainer", "inference"):
        return place.gpus
    chosen = config.inference.device.removeprefix("cuda:")
    if place.role.kind == "inference" and chosen.isdigit() and resolve.engine_name(config) == "torch":
        return (chosen,)  # by its own choice
    return (MAIN,)


def _serving(config: RLConfig, row: Row, shape: dict[str, Any], sizes: Mapping[str, int]) -> Row:
    engine, on_gpu = config.inference, row.devices != (MAIN,)
    found = memory.serving(shape, len(row.devices), half=resolve.engine_dtype(config) == "bfloat16")
    if found is None:
        return row
    longest = engine.max_model_len or config.seq_len
    if on_gpu and engine.kv_cache_tokens is None and resolve.engine_backend(config).fills_its_share:
        # Without room for one sequence it does not start.
        parts = {"weights": found.weights, "KV cache of a sequence": found.token * longest}
        whole = min((sizes[one] for one in row.devices if one in sizes), default=None)
        share = row.share or _given_share(config)
        return replace(row, parts=parts, takes=None if whole is None else int(whole * share))
    tokens = engine.kv_cache_tokens or engine.max_num_seqs * longest
    return replace(row, parts={"weights": found.weights, "KV cache": found.token * tokens})


def _given_share(config: RLConfig) -> float:
    given = {name.replace("_", "-"): value for name, value in config.inference.vllm.items()}
    found = given.get("gpu-memory-utilization")
    return float(found) if isinstance(found, int | float) else VLLM_SHARE


def _problems(
    config: RLConfig, rows: Sequence[Row], shape: dict[str, Any], sizes: Mapping[str, int]
) -> Iterator[Problem]:
    """One for what is wrong with several processes alike, or on several GPUs."""
    seen: set[tuple[str, ...]] = set()
    # What other machines have is not known.
    here = [row for row in rows if row.node == HOST and row.parts]
    gpus_of_trainer = {device for row in here if row.kind == "trainer" for device in row.devices}
    most = len(sizes.keys() - {device for row in here for device in row.devices} | gpus_of_trainer)
    for device in dict.fromkeys(device for row in here for device in row.devices):
        there = machine_memory.main_memory() if device == MAIN else sizes.get(device)
        own = [row for row in here if device in row.devices]
        for problem in [] if there is None else _on(config, own, device, there, shape, most):
            if problem.processes not in seen:
                seen.add(problem.processes)
                yield problem


def _on(
    config: RLConfig, rows: list[Row], device: str, there: int, shape: dict[str, Any], most: int
) -> Iterator[Problem]:
    """Problems of one device: processes that need more than their part of it, else all of them together. `most`: GPUs
    that the trainer can have."""
    alone = False
    for row in rows:
        limit = int(there * row.share) if row.share else row.takes or there
        needed = _taken(config, row, device) if device == MAIN else row.bytes
        if needed > limit:
            alone = True
            yield Problem(device, (row.process,), needed, limit, _changes(config, shape, row, device, limit, most))
    taken = {row.process: _taken(config, row, device) for row in rows}
    needed = sum(taken.values())
    if alone or needed <= there:
        return
    largest = max(rows, key=lambda row: taken[row.process])
    left = there - (needed - taken[largest.process])
    changes = _changes(config, shape, largest, device, left, most) if left > 0 else ()
    yield Problem(device, tuple(taken), needed, there, changes)


def _changes(config: RLConfig, shape: dict[str, Any], row: Row, device: str, limit: int, most: int) -> tuple[str, ...]:
    gpus = most if row.kind == "trainer" else len(row.devices)
    return fixes.enough(config, shape, row.kind, limit, gpus, main=device == MAIN)


def _taken(config: RLConfig, row: Row, device: str) -> int:
    """Bytes that a process takes of a device; in main memory, all its ranks together."""
    if device == MAIN:
        return row.bytes * (config.trainer.ranks if row.kind == "trainer" else 1)
    return row.takes or row.bytes


def _cells(row: Row) -> list[str | int]:
    devices = f"GPU {', '.join(row.devices)}" if row.devices not in ((), (MAIN,)) else "-"
    if row.share:
        devices += f", {row.share:.0%} of it"
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in row.parts.items())
    told = f"{_gb(row.takes or row.bytes)}: {parts}" if row.parts else "-"
    return [row.process, row.node, devices, str(row.cpus), ", ".join(row.ports) or "-", told]


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB" if size < 10 * GB else f"{size / GB:.1f} GB"
