"""The script of a job, from a template that users may replace. Nothing secret is in it.

Fields of the template: `options` (of sbatch, one each), `project_dir`, `pre_run_command`, `variable` (to be set to the
job's id), `command`, `first_start` and `later_starts` (more arguments, before and after the job was put back into the
queue), which are quoted for the shell; and `config`, the whole `[slurm]`, `nodes`, `gpus_per_node`, `output_dir`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import absolute
from primerl.config.schema.deployment import Deployment, Slurm

VARIABLE = "PRIMERL_SLURM_JOB"
"""The job's id, in the environment of the launcher that the script starts: a job that someone else submitted, in which
`primerl` submits another, has its own SLURM_JOB_ID."""
SCRIPT = "job.sbatch"
LOG = Path("logs") / "job.log"
TEMPLATE = Path(__file__).with_name("job.sbatch")


def options(slurm: Slurm, deployment: Deployment, folder: Path) -> list[str]:
    """Options of sbatch."""
    nodes = deployment.num_train_nodes + deployment.num_infer_nodes
    given = {
        "job-name": slurm.job_name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "nodelist": slurm.nodelist,
        "exclude": slurm.exclude,
        "constraint": slurm.constraint,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus_per_node,
        "gpus-per-node": deployment.gpus_per_node or None,
        "mem": slurm.mem,
        # Quoted as sbatch reads it; % begins a field of the name.
        "output": shlex.quote(os.fspath(folder / LOG).replace("%", "%%")),
        "open-mode": "append",
        "export": slurm.export,
        # To the launcher, which is the script's process.
        "signal": f"B:USR1@{slurm.signal_s}",
    }
    found = [f"--{name}={value}" for name, value in given.items() if value is not None]
    found += ["--exclusive"] if slurm.exclusive else []
    return [*found, "--requeue" if slurm.requeue else "--no-requeue", *slurm.options]


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
        raise ConfigError(f"slurm.template_path: {path} cannot be read: {error}") from None
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
        raise ConfigError(f"slurm.template_path: {path}: {error}") from None
    if not found.startswith("#!"):
        raise ConfigError(
            f"slurm.template_path: {path} does not begin with `#!`, such as `#!/bin/bash`; sbatch asks for it"
        )
    return found
