"""The script of a job, from a template that users may replace. Nothing secret is in it.

Fields of the template: `options` (of sbatch, one each), `infer_options` (of the second component of a heterogeneous
job), `project_dir`, `pre_run_command`, `variable` (to be set to the job's id), `command`, `first_start` and
`later_starts` (more arguments, before and after the job was put back into the queue), which are quoted for the shell;
and `config`, the whole `[slurm]`, `nodes`, `gpus_per_node`, `output_dir`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import absolute
from primerl.config.schema.deployment import Deployment, Slurm

VARIABLE = "PRIMERL_SLURM_JOB"
"""The job's id, in the environment of the launcher that the script starts: a job that someone else submitted, in which
`primerl` submits another, has its own SLURM_JOB_ID."""
SCRIPT = "job.sbatch"
HETEROGENEOUS = "#SBATCH hetjob"
"""Options after it are of the next component."""
LOG = Path("logs") / "job.log"
TEMPLATE = Path(__file__).with_name("job.sbatch")


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes of a job that are alike: all of them, or a component of a heterogeneous job."""

    key: str
    """Section of the config that describes them."""
    nodes: int
    counted: str
    """Keys that their number follows from."""
    gpus: int
    partition: str | None
    nodelist: str | None
    exclude: str | None
    constraint: str | None
    cpus: int | None
    mem: str | None


def parts(slurm: Slurm, deployment: Deployment) -> list[Part]:
    """One, or that of the trainer and that of the engines."""
    own = (slurm.partition, slurm.nodelist, slurm.exclude, slurm.constraint, slurm.cpus_per_node, slurm.mem)
    train, infer, other = deployment.num_train_nodes, deployment.num_infer_nodes, slurm.infer
    if other is None:
        return [Part("slurm", train + infer, "num_train_nodes + num_infer_nodes", deployment.gpus_per_node, *own)]
    gpus = deployment.gpus_per_node if other.gpus_per_node is None else other.gpus_per_node
    return [
        Part("slurm", train, "num_train_nodes", deployment.gpus_per_node, *own),
        Part(
            "slurm.infer",
            infer,
            "num_infer_nodes",
            gpus,
            other.partition or slurm.partition,
            other.nodelist,
            other.exclude or slurm.exclude,
            other.constraint or slurm.constraint,
            other.cpus_per_node or slurm.cpus_per_node,
            other.mem or slurm.mem,
        ),
    ]


def options(slurm: Slurm, deployment: Deployment, folder: Path) -> list[str]:
    """Options of sbatch: of the job, or of the first component of a heterogeneous one."""
    given = {
        # Quoted as sbatch reads it; % begins a field of the name.
        "output": shlex.quote(os.fspath(folder / LOG).replace("%", "%%")),
        "open-mode": "append",
        "export": slurm.export,
        # To the launcher, which is the script's process.
        "signal": f"B:USR1@{slurm.signal_s}",
    }
    found = _of_part(slurm, parts(slurm, deployment)[0])
    return [*found, *(f"--{name}={value}" for name, value in given.items()), *slurm.options]


def infer_options(slurm: Slurm, deployment: Deployment) -> list[str]:
    """Options of the second component; none of a job that has no other."""
    return [option for part in parts(slurm, deployment)[1:] for option in [*_of_part(slurm, part), *slurm.options]]


def _of_part(slurm: Slurm, part: Part) -> list[str]:
    given = {
        "job-name": slurm.job_name,
        "partition": part.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "nodelist": part.nodelist,
        "exclude": part.exclude,
        "constraint": part.constraint,
        "nodes": part.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": part.cpus,
        "gpus-per-node": part.gpus or None,
        "mem": part.mem,
    }
    found = [f"--{name}={value}" for name, value in given.items() if value is not None]
    found += ["--exclusive"] if slurm.exclusive else []
    return [*found, "--requeue" if slurm.requeue else "--no-requeue"]


def written(
    slurm: Slurm,
    deployment: Deployment,
    folder: Path,
    *,
    command: Sequence[str],
    first_start: Sequence[str] = (),
    later_starts: Sequence[str] = (),
) -> str:
    """The script. Raises ConfigError for a template that cannot be used."""
    import jinja2

    path = TEMPLATE if slurm.template_path is None else Path(absolute(slurm.template_path))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError.at("slurm.template_path", f"{path} cannot be read: {error}") from None
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    try:
        found = environment.from_string(text).render(
            options=options(slurm, deployment, folder),
            infer_options=infer_options(slurm, deployment),
            project_dir=shlex.quote(absolute(slurm.project_dir)),
            pre_run_command=slurm.pre_run_command,
            variable=VARIABLE,
            command=shlex.join([sys.executable, "-m", "primerl", *command]),
            first_start=shlex.join(first_start),
            later_starts=shlex.join(later_starts),
            config=slurm,
            nodes=deployment.num_train_nodes + deployment.num_infer_nodes,
            gpus_per_node=deployment.gpus_per_node,
            output_dir=shlex.quote(os.fspath(folder)),
        )
    except jinja2.TemplateError as error:
        raise ConfigError.at("slurm.template_path", f"{path}: {error}") from None
    if not found.startswith("#!"):
        raise ConfigError.at(
            "slurm.template_path", f"{path} does not begin with `#!`, such as `#!/bin/bash`; sbatch asks for it"
        )
    if slurm.infer is not None and HETEROGENEOUS not in found:
        raise ConfigError.at(
            "slurm.template_path",
            f"{path} has no line `{HETEROGENEOUS}` for the nodes of slurm.infer; write it, and "
            "infer_options after it as in the built-in script (docs/slurm.md), or omit slurm.infer",
        )
    return found
