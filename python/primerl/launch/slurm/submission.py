"""Submitting a run as a job: what can be wrong is named before, and the run is in the list of runs from then on."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files
from primerl.config.process_files.run_file import with_folder
from primerl.config.schema.deployment import Deployment, Slurm
from primerl.config.schema.launched import C, Launched
from primerl.config.schema.sft import SFTConfig
from primerl.launch.placement.registry import SLURM, infer_gpus
from primerl.launch.placement.slurm.placement import SlurmPlacement
from primerl.launch.preflight.output_folder import claimed, never_began
from primerl.launch.registration import Former, begin, end, stored_copy
from primerl.launch.slurm import follow, jobs, script, within
from primerl.launch.supervise import detached
from primerl.launch.supervise.failures import BAD_INPUT

CONFIG = Path("configs") / "job.toml"
# `sbatch` says what it has submitted by this, without a sentence around it.
SUBMIT = ("sbatch", "--parsable")
NOT_NOW = "Requested node configuration is not available"
AWAY = "down,drain,fail,maint"
"""States of nodes that may come back, as `sinfo -t` takes them."""
RESUMES_SFT = ("--ckpt.resume-step", "-1")
PLACED_BY_SLURM = ("local", SLURM)


def is_wanted(config: Launched) -> bool:
    """Whether this command is to submit a job, and is not the launcher within it."""
    return config.slurm is not None and not within.is_within()


def placement(deployment: Deployment, slurm: Slurm | None = None) -> SlurmPlacement:
    """Which plans for a job that is to be submitted. Raises ConfigError for a deployment that is not on Slurm."""
    if deployment.type not in PLACED_BY_SLURM:
        raise ConfigError.at("deployment.type", f"{deployment.type!r} does not run in a Slurm job; omit it, or [slurm]")
    return SlurmPlacement(
        num_train_nodes=deployment.num_train_nodes,
        num_infer_nodes=deployment.num_infer_nodes,
        gpus_per_node=deployment.gpus_per_node,
        **infer_gpus(slurm),
        ahead=True,
    )


def begun(config: C) -> C:
    """What a submission begins with: in the folder that the job works in, as in the job, after what can be checked of
    Slurm. Raises ConfigError."""
    slurm = config.slurm
    if slurm is None:
        return config
    folder = files.absolute(slurm.project_dir)
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError.at("slurm.project_dir", f"{folder} cannot be used: {error.strerror}") from None
    check(config)
    found: C = config.model_copy(update={"slurm": slurm.model_copy(update={"project_dir": folder})})
    return found


def check(config: Launched) -> None:
    """Raises ConfigError for what Slurm would refuse, or would wait for in vain."""
    slurm = config.slurm
    if slurm is None:
        return
    if slurm.time is not None:
        _check_time(slurm.signal_s, seconds(slurm.time), f"slurm.time ({slurm.time})")
    if slurm.dry_run or config.dry_run:
        return
    try:
        found = partitions(jobs.command("sinfo", "-h", "-o", "%P|%D|%l|%L"))
    except jobs.SlurmError as error:
        raise ConfigError.at("slurm", str(error)) from None
    for part in script.parts(slurm, config.deployment):
        _check_partition(part, slurm, found)


@dataclass(frozen=True, slots=True)
class Partition:
    name: str
    nodes: int
    is_default: bool
    limit_s: float
    """Longest time of a job; infinite where there is none."""
    limit: str
    """The same, as Slurm writes it."""
    usual: str
    """Time of a job that asks for none."""


def partitions(text: str) -> list[Partition]:
    """From the output of `sinfo -o "%P|%D|%l|%L"`, in which a partition has a line for each state of nodes."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, nodes, limit, usual = line.split("|")
        usual = limit if math.isinf(seconds(usual)) else usual
        plain, count = name.removesuffix("*"), int(nodes) if nodes.isdigit() else 0
        before = found[plain].nodes if plain in found else 0
        found[plain] = Partition(plain, before + count, name.endswith("*"), seconds(limit), limit, usual)
    return list(found.values())


def seconds(text: str) -> float:
    """A time as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; infinite for any other word."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]):
        return math.inf
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, more = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, more = numbers
    else:
        hours, (minutes, more) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + more


def _check_partition(part: script.Part, slurm: Slurm, found: list[Partition]) -> None:
    names = [] if part.partition is None else part.partition.split(",")
    known = {one.name: one for one in found}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError.at(
            f"{part.key}.partition",
            f"there is no partition {unknown[0]!r}; there {'is' if len(known) == 1 else 'are'} "
            f"{', '.join(sorted(known))}",
        )
    chosen = [known[name] for name in names] or [one for one in found if one.is_default]
    if not chosen:
        return
    largest, longest = max(chosen, key=lambda one: one.nodes), max(chosen, key=lambda one: one.limit_s)
    if part.nodes > largest.nodes:
        raise ConfigError.at(
            "deployment",
            f"{part.nodes} nodes are asked for ({part.counted}), and partition {largest.name} has "
            f"{largest.nodes}; lower {'one' if '+' in part.counted else 'it'}, or choose another {part.key}.partition",
        )
    if slurm.time is not None and seconds(slurm.time) > longest.limit_s:
        raise ConfigError(
            f"slurm.time ({slurm.time}) is above the limit of partition {longest.name} ({longest.limit}), so the "
            "job would never start; lower slurm.time. With slurm.requeue the run is requeued at the limit and resumes",
            "slurm.time",
        )
    if slurm.time is None:
        longest = max(chosen, key=lambda one: seconds(one.usual))
        _check_time(slurm.signal_s, seconds(longest.usual), f"the limit of partition {longest.name} ({longest.usual})")


def _check_time(signal_s: int, limit_s: float, what: str) -> None:
    """Slurm accepts a job that gets its signal at once. 0 is no limit."""
    if 0 < limit_s <= signal_s:
        raise ConfigError.at(
            "slurm.signal_s",
            f"{what} is not longer than slurm.signal_s ({signal_s} s), the time before it at which the run stops, so "
            "the run would stop at once; raise slurm.time, or lower slurm.signal_s",
        )


def submit(
    config: Launched,
    say: Callable[[str], None],
    *,
    command: str,
    goes_on: Callable[[Path], bool],
    form: str = "full",
) -> int:
    """Writes and submits the job, and follows it to its end; returns the exit code. `command`: the subcommand,
    with its own flags.

    Raises ConfigError where it is refused; nothing is left in the queue then.
    """
    slurm = config.slurm or Slurm()
    folder = Path(files.absolute(config.output_dir))
    _check_free(folder)
    is_detached = detached.VARIABLE in os.environ
    text = script.written(
        slurm,
        config.deployment,
        folder,
        command=[*command.split(), "@", os.fspath(folder / CONFIG)],
        first_start=once(config),
        later_starts=later(config),
    )
    is_dry = slurm.dry_run or config.dry_run
    nodes = config.deployment.num_train_nodes + config.deployment.num_infer_nodes
    if not is_dry:
        _test(text, nodes)
    with claimed(config.output_dir, clean=config.clean_output_dir and not is_dry, kind=command.split()[0]):
        if is_dry and not never_began(folder):
            say(f"everything checked; {folder} holds a run, which is left as it is, and nothing was submitted")
            return 0
        resumes = not is_dry and not config.clean_output_dir and goes_on(folder)  # before there is a folder of logs
        former = Former(folder, say) if resumes else None
        files.write_text(folder / CONFIG, stored_copy(config))
        files.write_text(folder / script.SCRIPT, text)
        if is_dry:
            say(f"everything checked; the job's script is {folder / script.SCRIPT}, and nothing was submitted")
            return 0
        (folder / script.LOG).parent.mkdir(exist_ok=True)
        run_id = begin(config, folder, say, goes_on=resumes, form=form)
    # The job takes the folder, which has to be free by then.
    offset = follow.size_of(folder / script.LOG)
    try:
        job = _submitted(folder, nodes)
    except ConfigError:
        was_noted = former is not None and former.put_back(run_id)
        if run_id is not None and not was_noted:
            end(run_id, BAD_INPUT, say)
        raise
    say(f"submitted job {job.id} of {nodes} node{'' if nodes == 1 else 's'}; its log is {folder / script.LOG}")
    detached.has_started(folder, run_id)
    if is_detached:
        return 0
    code = follow.to_the_end(job, folder, say, offset)
    if run_id is not None:
        end(run_id, code, say)
    if code != 0:
        say(with_folder(f"job {job.id} has ended with exit code {code}; the same command resumes the run", config))
    return code


def _check_free(folder: Path) -> None:
    said = jobs.in_the_way(folder)
    if said is not None:
        raise ConfigError.at("output_dir", f"{folder} cannot be used: {said}, or choose another")


def _test(text: str, nodes: int) -> None:
    """Raises ConfigError with what Slurm says against the job."""
    try:
        jobs.command("sbatch", "--test-only", given=text)
    except jobs.SlurmError as error:
        # It says the same of a job that can never run and of one that waits for a node to come back. The submission
        # itself tells them apart.
        if NOT_NOW in str(error) and jobs.command("sinfo", "-h", "-N", "-t", AWAY, "-o", "%N").split():
            return
        raise ConfigError.at(
            "slurm", f"sbatch refuses the job of {nodes} node{'' if nodes == 1 else 's'}: {error}"
        ) from None


def _submitted(folder: Path, nodes: int) -> jobs.Job:
    environ = {name: value for name, value in os.environ.items() if name not in (detached.VARIABLE, script.VARIABLE)}
    # A Ctrl-C now would leave a job that no one knows of.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        said = jobs.command(*SUBMIT, os.fspath(folder / script.SCRIPT), environ=environ)
        job = jobs.Job(said.strip().split(";")[0], time.time(), nodes, os.environ.get("SLURM_CONF"))
        jobs.note(folder, job)
    except jobs.SlurmError as error:
        raise ConfigError.at("slurm", f"sbatch has refused the job: {error}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return job


def once(config: Launched) -> Sequence[str]:
    """Arguments of the first start alone: a job that is put back into the queue resumes where it was."""
    found: list[str] = []
    # By the name that the stored config has: of the two that `primerl rl` knows, only one may be given.
    for section, prefix in ((config, ""), (getattr(config, "trainer", None), "trainer.")):
        ckpt = getattr(section, "ckpt", None)
        if ckpt is not None:
            if ckpt.resume_step is not None:
                found += [f"--{prefix}ckpt.resume-step", str(ckpt.resume_step)]
            break
    if getattr(config, "skip_event", None) is not None:
        found += ["--skip-event", str(config.skip_event)]
    if getattr(config, "retry_errors", False):
        found += ["--retry-errors"]
    return found


def later(config: Launched) -> Sequence[str]:
    """Arguments of the starts after it. A run or an evaluation finds out by itself that there is something to resume; a
    fine-tuning that saves no checkpoints begins again."""
    if not isinstance(config, SFTConfig) or config.ckpt is None or config.ckpt.weights_only:
        return ()
    return RESUMES_SFT
