"""Says by keys of the user's config why the orchestrator refuses its own, or to resume a run.

Its config has the sections of `orchestrator` at the top, and calls environments by their names. The core names what the
run was started with, and knows environments by number and no sections."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from primerl.config.command_line.arguments import dotted
from primerl.config.errors.error_locations import environment_places
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.process.problems import Problem

ENVIRONMENT = re.compile(r"environments\.(\d+)(?:\.(.+))?")
CLIENT = "client of evaluation environment "
TEACHER = "teacher of environment "
MODEL = ("flops.", "the model's ")
ELSEWHERE = {
    "seed": "seed",
    "seq_len": "seq_len",
    "data_ranks": "trainer.ranks",
    "spool_steps": "orchestrator.retention.spool_steps",
}
"""Names of the core and the orchestrator whose keys are not in the section `orchestrator`."""
OF_EVALUATION = {"sampling.max_tokens": "max_tokens", "batch_size": "concurrency", "model.path": "model"}
PARAMETER = re.compile(r"kind\.\w+\.(\w+)")
"""A parameter of one algorithm, as the core names it; in the user's config it stands next to the type."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What `primerl-orchestrate --check --json` says."""

    code: str
    """`changed`: the run was begun with another value. `config`, `input`: all else."""
    message: str
    key: str | None = None
    """As the orchestrator and the core name it; None where it is not about one key."""
    was: str = ""
    now: str = ""

    def without(self, origin: str) -> Refusal:
        """The file that it names is one for the check alone."""
        return replace(self, message=self.message.replace(origin, ""))


def read(output: str) -> Refusal | None:
    """None where the output does not end with a refusal: a custom algorithm's module may print when it is imported."""
    try:
        said = json.loads(output.rstrip().rpartition("\n")[2])
        return Refusal(said["code"], said["message"], said.get("key"), said.get("was", ""), said.get("now", ""))
    except (ValueError, KeyError, TypeError):
        return None


def in_words_of(config: RLConfig | EvalConfig, refusal: Refusal) -> Problem:
    """The message, with the key that the user wrote, or omitted, instead of the orchestrator's."""
    if refusal.key is None:
        return Problem(refusal.message)
    if refusal.code != "changed" or isinstance(config, EvalConfig):
        key = _given_as(config, refusal.key)
        leading = f"{refusal.key}: "
        is_leading = refusal.message.startswith(leading)
        return Problem(f"{key}: {refusal.message.removeprefix(leading)}" if is_leading else refusal.message, key)
    name, was, now = refusal.key, refusal.was, refusal.now
    core = f"{name} = {was}, and now {name} = {now}"
    if name.startswith(MODEL):
        what = "its shape" if name.startswith("flops.") else name.removeprefix("the model's ")
        key, said = "model.path", f"another model than the one in model.path ({what} differs)"
    else:
        key = _placed(config, name)
        said = f"{key} = {was}, and now {key} = {now}"
    return Problem(refusal.message.replace(core, said), key)


def _given_as(config: RLConfig | EvalConfig, name: str) -> str:
    """Key of the full form, of one of the orchestrator's own config."""
    role, _, inner = name.partition(".env.")
    # A label may have dots.
    label = max(
        (label for label in _labels(config, role) if f"{inner}.".startswith(f"{label}.")), key=len, default=None
    )
    if label is not None:
        own = inner.removeprefix(label)
        is_client = isinstance(config, EvalConfig) and own.startswith(".client.")  # which it has one of
        return own.removeprefix(".client.") if is_client else _place(config, label) + own
    if isinstance(config, EvalConfig):
        return OF_EVALUATION.get(name, name)
    is_own = name.partition(".")[0].partition("[")[0] in type(config.orchestrator).model_fields
    return ELSEWHERE.get(name, f"orchestrator.{name}" if is_own else name)


def _labels(config: RLConfig | EvalConfig, role: str) -> list[str]:
    if role not in ("train", "eval"):
        return []
    entries = config.env if isinstance(config, EvalConfig) else getattr(config.orchestrator, role).env
    return [entry.label for entry in entries]


def _placed(config: RLConfig, name: str) -> str:
    """Key of the full form."""
    if name == "teacher":
        return "orchestrator.teacher.client.model"
    numbered = ENVIRONMENT.fullmatch(name)
    if numbered is not None:
        return _of_environment(config, int(numbered[1]), numbered[2] or "")
    if name.startswith(TEACHER):
        return f"{_place(config, name.removeprefix(TEACHER))}.teacher.client.model"
    if name.startswith(CLIENT):
        label = name.removeprefix(CLIENT)
        return f"{_place(config, label)}.client"
    return ELSEWHERE.get(name, f"orchestrator.{name}")


def _environments(config: RLConfig) -> list[Any]:
    """In the core's order."""
    return [*config.orchestrator.train.env, *config.orchestrator.eval.env]


def _place(config: RLConfig | EvalConfig, label: str) -> str:
    return dotted(dict(environment_places(config)).get(label, ("orchestrator", "eval", "env")))


def _of_environment(config: RLConfig, number: int, field: str) -> str:
    there = _environments(config)
    if number >= len(there):
        # One that was there is missing now.
        return "orchestrator.eval.env" if config.orchestrator.eval.env else "orchestrator.train.env"
    entry = there[number]
    place = _place(config, entry.label)
    run = config.orchestrator
    if field in ("demonstration", "group_size", "training_mode") and getattr(entry, field, None) is None:
        return f"orchestrator.{field}" if getattr(run, field, None) is not None else place
    if field.startswith("sampling."):
        # An evaluation may have its own.
        own = getattr(entry, "sampling", None)
        of_its_own = own is not None and getattr(own, field.removeprefix("sampling."), None) is not None
        return f"{place if of_its_own else 'orchestrator'}.{field}"
    if field.startswith("algorithm."):
        key = field.removeprefix("algorithm.")
        section = place if getattr(entry, "algorithm", None) is not None else "orchestrator"
        parameter = PARAMETER.fullmatch(key)
        if parameter is not None:
            key = {"timeout": "timeout_s"}.get(parameter[1], parameter[1])
        return f"{section}.algorithm.{'type' if key == 'kind' else key}"
    if field == "ratio" and config.orchestrator.buffer.env_ratios is not None:
        return f"orchestrator.buffer.env_ratios[{number}]"
    if field == "name" and entry.name is None:
        return f"{place}.id"
    field = field.removeprefix("role.evaluate.")
    return place if field in ("", "role") else f"{place}.{field}"
