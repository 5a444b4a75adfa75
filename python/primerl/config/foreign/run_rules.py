"""What becomes of values that say where a run computes, how much at once, and where it writes."""

from __future__ import annotations

import math
from typing import Any

from primerl.config.foreign.rows import Context, Omitted, Refused, Several
from primerl.config.foreign.rules import NONE

GPUS_PER_NODE = 8


def nodes(context: Context) -> bool:
    return bool(context.get("deployment.type") == "multi_node")


def gpus_per_node(context: Context) -> int:
    return int(context.get("deployment.gpus_per_node", GPUS_PER_NODE))


def one_engine(context: Context) -> int:
    names = ("vllm.tensor_parallel_size", "vllm_extra.tensor_parallel_size", "parallel.tp")
    return int(next((size for name in names if (size := context.get(f"inference.{name}"))), 1))


def train_nodes(value: Any, context: Context) -> Any:
    return Several({"deployment.num_train_nodes": value, "trainer.ranks": value * gpus_per_node(context)})


def train_nodes_of_sft(value: Any, context: Context) -> Any:
    return Several({"deployment.num_train_nodes": value, "ranks": value * gpus_per_node(context)})


def infer_nodes(value: Any, context: Context) -> Any:
    """Nodes of a replica, of which each engine here is one on its share of a node's GPUs."""
    total = (value or 0) * int(context.get("deployment.num_infer_replicas", 1))
    per_node, size = gpus_per_node(context), one_engine(context)
    if size > per_node:
        raise Refused(f"an engine of {size} GPUs is larger than a node ({per_node}); here each is within one")
    return Several({"deployment.num_infer_nodes": total, "inference.replicas": max(1, total * per_node // size)})


def infer_gpus(value: Any, context: Context) -> Any:
    if context.get("inference") is None:
        return 0
    if nodes(context):
        raise Omitted
    return max(1, value // one_engine(context)) if isinstance(value, int) else value


def engines(value: Any, context: Context) -> Any:
    """Servers that run already, where the file starts none."""
    if context.get("inference") is not None:
        raise Omitted
    return [url.rstrip("/").removesuffix("/v1") for url in (value if isinstance(value, list) else [value])]


def in_flight(value: Any, context: Context) -> Any:
    """Rollouts at once, as a multiple of a batch; one batch at least."""
    batch = context.get("orchestrator.batch_size")
    if not isinstance(batch, int) or not isinstance(value, int):
        raise Omitted("rollouts in flight are orchestrator.oversampling_factor * orchestrator.batch_size")
    return max(1.0, round(value / batch, 3))


def first_in_flight(value: Any, context: Context) -> Any:
    """All engines' together; here it is of each."""
    counted = infer_nodes(context.get("deployment.num_infer_nodes"), context) if nodes(context) else {}
    single = infer_gpus(context.get("deployment.num_infer_gpus", 1), context) if not nodes(context) else 1
    return max(8, math.ceil(value / max(1, counted.get("inference.replicas", single))))


def run_folder(_: Any, context: Context) -> Any:
    """`output_dir` groups runs there, and is the run's own folder here."""
    base = context.get("output_dir", "outputs")
    name = context.get("run.dir") or context.get("run.name")
    return f"{base.rstrip('/')}/{name}" if name else base


def resume_step(value: Any, context: Context) -> Any:
    """The table alone means the newest."""
    if value in (None, False, NONE):
        raise Omitted
    return look_step(context)


def look_step(context: Context) -> int:
    found = context.get("resume.step") or context.get("trainer.resume.step")
    return found if isinstance(found, int) else -1


def skipped(value: Any, context: Context) -> Any:
    """Parts of a checkpoint that are not loaded: matters where one is."""
    if not value or context.get("resume") is None:
        raise Omitted
    why = "a checkpoint is loaded whole, and a run that resumes is as one that had not stopped"
    if context.get("resume.step") is None:
        raise Omitted(why)
    raise Refused(f"{why}; to begin with its weights alone, set model.path to weights/step_<N>")


def same_model(value: Any, context: Context) -> Any:
    """Another name for a part of the run is another model."""
    whole = context.get("model.name")
    if whole is not None and whole != value:
        raise Refused("a run has one model, which is sampled from and trained; quantised copies are made by the engine")
    return value
