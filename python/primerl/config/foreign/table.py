"""The table of renamings, by kind of file, and which kind a file is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from primerl.config.foreign import table_orchestrator, table_run, table_sft, table_trainer, table_verifiers
from primerl.config.foreign.rows import Row, Table


@dataclass(frozen=True, slots=True)
class Kind:
    """Files that one program of another tool reads."""

    name: str
    tool: str
    form: str
    """The form of ours that they become: `rl`, `sft`, `eval` or `gepa`."""
    within: str = ""
    """Section of the whole run's file that such a file is; empty: it is whole."""


RL = Kind("prime-rl's `rl`", "prime-rl", "rl")
ORCHESTRATOR = Kind("prime-rl's `orchestrator`", "prime-rl", "rl", "orchestrator")
TRAINER = Kind("prime-rl's `trainer`", "prime-rl", "rl", "trainer")
INFERENCE = Kind("prime-rl's `inference`", "prime-rl", "rl", "inference")
SFT = Kind("prime-rl's `sft`", "prime-rl", "sft")
EVALS = Kind("prime-rl's `evals`", "prime-rl", "eval")
EVAL = Kind("verifiers' `eval`", "verifiers", "eval")
PUBLISHED = Kind("verifiers' list of evaluations", "verifiers", "eval")
GEPA = Kind("verifiers' `gepa`", "verifiers", "gepa")
KINDS = (RL, ORCHESTRATOR, TRAINER, INFERENCE, SFT, EVALS, EVAL, PUBLISHED, GEPA)


def rows(kind: Kind) -> list[Row]:
    if kind.form == "rl":
        return [
            *table_run.RUN,
            *table_run.MACHINES,
            *table_run.INFERENCE,
            *table_trainer.TRAINER,
            *table_orchestrator.ROWS,
        ]
    return {
        SFT: table_sft.ROWS,
        EVALS: table_verifiers.PRIME_EVALS,
        EVAL: table_verifiers.VERIFIERS_EVAL,
        PUBLISHED: table_verifiers.PUBLISHED_EVAL,
        GEPA: table_verifiers.VERIFIERS_GEPA,
    }[kind]


@cache
def table(kind: Kind) -> Table:
    return Table(rows(kind))


def kind_of(tree: dict[str, Any]) -> Kind | None:
    """By the tables that a file has; None for one that is of none of these programs. Pure."""
    has = tree.keys()
    evaluations = tree.get("eval")
    if isinstance(evaluations, list) or isinstance(tree.get("ablation"), list):
        return PUBLISHED
    if has & {"gepa", "reflection_model", "max_total_rollouts", "reflection_minibatch_size"} or _has_env_id(tree):
        return GEPA
    if has & {"trainer", "orchestrator"}:
        return RL
    if "data" in has and not isinstance(tree.get("model"), str):
        return SFT
    if isinstance(evaluations, dict) and "source" in evaluations and not isinstance(tree.get("model"), dict):
        return EVALS
    if isinstance(tree.get("train"), dict) and {"source", "env"} & tree["train"].keys():
        return ORCHESTRATOR
    if isinstance(tree.get("env"), dict):
        return EVAL
    if has & {"vllm", "kv_cache_offload", "use_deep_gemm", "router", "server"}:
        return INFERENCE
    if has & {"optim", "loss", "scheduler"}:
        return TRAINER
    return RL if "inference" in has and isinstance(tree.get("model"), dict) else None


def as_read_for(form: str, tree: dict[str, Any]) -> Kind | None:
    """`kind_of`, for a command that reads files of a form: one of verifiers' `gepa` without a key of its own looks like
    one of `eval`. Pure."""
    found = kind_of(tree)
    return GEPA if form == GEPA.form and found is EVAL else found


def _has_env_id(tree: dict[str, Any]) -> bool:
    given = tree.get("env")
    entries = given if isinstance(given, list) else [given]
    return any(isinstance(entry, dict) and "env_id" in entry for entry in entries)


def leaves(node: Any, path: str = "", place: tuple[int | str, ...] = ()) -> Iterator[tuple[str, tuple[int | str, ...]]]:
    """Dotted paths of what has no keys below, with `[]` behind lists of tables, and their places."""
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from leaves(inner, f"{path}.{name}" if path else name, (*place, name))
    elif isinstance(node, list) and node and all(isinstance(entry, dict) for entry in node):
        for number, entry in enumerate(node):
            yield from leaves(entry, f"{path}[]", (*place, number))
    elif path:
        yield path, place
