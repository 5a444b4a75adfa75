"""Evaluations in the form of verifiers' files: `[[eval]] env_id = ..`, with defaults for all of them at the top.

Evaluations of one model are one evaluation of several environments here; those of several models follow each other.
"""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.foreign.table import EVALS, kind_of
from primerl.evals import no_counterpart
from primerl.evals.endpoints import Target, target
from primerl.evals.sampling_args import split_sampling

SAME = {
    "id": "env_id",
    "args": "env_args",
    "resume_path": "resume",
    "header": "headers",
    "header_from_state": "headers_from_state",
}
ALSO_WRITTEN = ("max_tokens", "temperature")
TAKEN = (
    *("env_id", "env_args", "taskset", "harness", "name"),
    *("model", "endpoint_id", "provider", "api_base_url", "api_key_var", "endpoints_path"),
    *("sampling_args", "sampling", *ALSO_WRITTEN),
    *("num_examples", "rollouts_per_example", "max_concurrent", "num_workers", "timeout", "output_dir", "shuffle_seed"),
)
WITHOUT_EFFECT = (
    *("save_results", "disable_tui", "verbose", "env_dir_path", "disable_env_server", "independent_scoring", "shuffle"),
    *("timeout_minutes", "allow_sandbox_access", "allow_instances_access", "allow_tunnel_access", "eval_name"),
)
"""Results are always saved, examples always shuffled by the seed, rollouts scored one by one; environments are
installed packages, which run here with all that this machine may do."""
REFUSED = {
    "api_client_type": no_counterpart.CLIENT,
    "extra_env_kwargs": "give the environment's own settings as `args` or `taskset`",
    "headers": no_counterpart.HEADERS,
    "headers_from_state": no_counterpart.HEADERS,
    "hf_hub_dataset_name": no_counterpart.UPLOAD,
    "max_retries": no_counterpart.RETRIES,
    "resume": f"{no_counterpart.RESUME}; omit it",
    "save_to_hf_hub": no_counterpart.UPLOAD,
    "state_columns": no_counterpart.COLUMNS,
}
# What verifiers' files stand for where they say nothing.
NUM_EXAMPLES, ROLLOUTS, TEMPERATURE, CONCURRENT = 5, 3, 1.0, 32
Tree = dict[str, Any]


@dataclass
class Evaluation:
    """Environments that are measured together: keys of `primerl eval`."""

    settings: Tree
    environments: list[Tree] = field(default_factory=list)


def is_published(tree: Tree) -> bool:
    """Whether a file's tables have this form."""
    # prime-rl's `evals` files have a table of this name.
    return ("eval" in tree or "ablation" in tree) and kind_of(tree) is not EVALS


def evaluations(file: Path, tree: Tree, model: str | None = None) -> list[Evaluation]:
    """What a file asks for, by model. `model`: in place of the file's.

    Raises:
        ConfigError: A key is unknown, or has no counterpart; the message names the file and the key.
    """
    entries = tree.get("eval", []), tree.get("ablation", [])
    if not all(isinstance(part, list) and all(isinstance(entry, dict) for entry in part) for part in entries):
        raise ConfigError(f"{file}: `eval` and `ablation` are lists of tables; write [[eval]]")
    above = {key: value for key, value in tree.items() if key not in ("eval", "ablation")}
    flat = [(f"eval[{number}]", entry) for number, entry in enumerate(entries[0])]
    for number, entry in enumerate(entries[1]):
        flat += [(f"ablation[{number}]", one) for one in _swept(f"{file}: ablation[{number}]", entry)]
    found: list[Evaluation] = []
    for place, entry in flat:
        settings, environment = _translated(file, place, above, entry, model)
        same = next((one for one in found if one.settings == settings), None)
        if same is None:
            found.append(same := Evaluation(settings))
        _add(same.environments, environment)
    return found


def _add(environments: list[Tree], environment: Tree) -> None:
    """With a name of its own, where the same environment is measured twice."""
    label = environment.get("name") or environment["id"].rsplit("/", 1)[-1].split("@", 1)[0]
    taken = {one.get("name") or one["id"].rsplit("/", 1)[-1].split("@", 1)[0] for one in environments}
    if label in taken:
        number = next(number for number in itertools.count(2) if f"{label}-{number}" not in taken)
        environment = {**environment, "name": f"{label}-{number}"}
    environments.append(environment)


def _swept(place: str, entry: Tree) -> list[Tree]:
    """The cross product of an ablation's lists."""
    sweep = dict(entry.get("sweep", {}))
    inner = {name: sweep.pop(name, {}) for name in ("args", "env_args")}
    axes: list[tuple[str | None, str, list[Any]]] = [(None, key, values) for key, values in sweep.items()]
    axes += [(name, key, values) for name, table in inner.items() for key, values in table.items()]
    if not axes or not all(isinstance(values, list) and values for _, _, values in axes):
        raise ConfigError(f"{place}.sweep: give at least one key with a list of values")
    found = []
    for values in itertools.product(*(values for _, _, values in axes)):
        one: Tree = {key: value for key, value in entry.items() if key != "sweep"}
        for (table, key, _), value in zip(axes, values, strict=True):
            if table is None:
                one[key] = value
            else:
                one[table] = {**one.get(table, {}), key: value}
        found.append(one)
    return found


def _translated(file: Path, place: str, above: Tree, entry: Tree, model: str | None) -> tuple[Tree, Tree]:
    outer, inner = _checked(f"{file}", above), _checked(f"{file}: {place}", entry)
    if {"model", "endpoint_id"} & inner.keys():
        outer = {key: value for key, value in outer.items() if key not in ("model", "endpoint_id")}
    given = {**outer, **inner}
    asked = _target(file, place, given, model)
    sampling, template = split_sampling(f"{file}: {place}", _sampling(file, place, given))
    settings: Tree = {
        "model": asked.model,
        "base_url": asked.base_url,
        "api_key_env": asked.api_key_env,
        "concurrency": given.get("max_concurrent", CONCURRENT),
        "output_dir": given.get("output_dir"),
        "seed": given.get("shuffle_seed"),
        "chat_template_kwargs": template or None,
        "timeouts": {"rollout_s": given["timeout"]} if "timeout" in given else None,
    }
    many = given.get("num_examples", NUM_EXAMPLES)
    workers = given.get("num_workers", "auto")
    arguments = dict(given.get("env_args", {}))
    parts = arguments.pop("config", {})
    environment: Tree = {
        "id": given.get("env_id"),
        "name": given.get("name"),
        "num_examples": None if many == -1 else many,
        "rollouts_per_example": given.get("rollouts_per_example", ROLLOUTS),
        "temperature": sampling.get("temperature", TEMPERATURE),
        "max_tokens": sampling.get("max_tokens"),
        "num_workers": None if workers == "auto" else workers,
        "args": arguments or None,
        "taskset": given.get("taskset") or parts.get("taskset"),
        "harness": given.get("harness") or parts.get("harness"),
    }
    if not isinstance(environment["id"], str) or not environment["id"]:
        raise ConfigError(f"{file}: {place}.env_id is missing; give the environment")
    return _set(settings), _set(environment)


def _set(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if value is not None}


def _checked(place: str, given: Tree) -> Tree:
    """By the main name of each key. Raises ConfigError."""
    found: Tree = {}
    for key, value in given.items():
        name = SAME.get(key, key)
        if name in REFUSED and value not in (False, 0, "", [], {}):
            raise ConfigError(f"{place}.{key}: {REFUSED[name]}")
        if name in REFUSED or name in WITHOUT_EFFECT:
            continue
        if name not in TAKEN:
            near = difflib.get_close_matches(key, [*TAKEN, *SAME], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TAKEN)}"
            raise ConfigError(f"{place}.{key}: unknown key; {hint}")
        if name in found and found[name] != value:
            raise ConfigError(f"{place}.{key}: {name} is given twice; omit one of the two")
        found[name] = value
    return found


def _target(file: Path, place: str, given: Tree, model: str | None) -> Target:
    if {"model", "endpoint_id"} <= given.keys():
        raise ConfigError(f"{file}: {place}: model and endpoint_id are both given; omit one of them")
    named = model or given.get("endpoint_id") or given.get("model")
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{file}: {place}: `model` is missing; give it, or --model")
    path = given.get("endpoints_path")
    try:
        return target(
            named,
            provider=given.get("provider"),
            endpoints=None if path is None else file.parent / path,
            base_url=given.get("api_base_url"),
            api_key_env=given.get("api_key_var"),
        )
    except ConfigError as error:
        raise ConfigError(f"{file}: {place}: {error}") from None


def _sampling(file: Path, place: str, given: Tree) -> Tree:
    if {"sampling_args", "sampling"} <= given.keys():
        raise ConfigError(f"{file}: {place}: sampling_args and sampling are both given; omit one of them")
    table = given.get("sampling_args", given.get("sampling", {}))
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {place}: sampling is a table; write [sampling]")
    return {**{key: given[key] for key in ALSO_WRITTEN if key in given}, **table}
