"""`primerl run resume`."""

from __future__ import annotations

import argparse
import os

from primerl.cli.run.common import can_go_on, of_run, parser_of
from primerl.cli.run.start import detach, start_rl
from primerl.config.errors.fail import fail
from primerl.launch.resume.restoring import is_gone
from primerl.launch.slurm import jobs
from primerl.launch.supervise.lock import in_use
from primerl.runs import served
from primerl.runs.registry import SCRIPT, Run


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "resume",
        "Resumes a run or an evaluation in its own folder, with the config that it was started with. "
        "Keys may be changed, as in --max-steps 200; those that the run depends on are refused. Where the folder is "
        "gone, the newest checkpoint of the run's store is fetched (or that of --ckpt.resume-step N).",
    )
    parser.add_argument("-d", "--detach", action="store_true", help="in the background")
    chosen, overrides = parser.parse_known_args(arguments)
    if next(word for word in arguments if word not in ("-d", "--detach")).startswith("-"):
        return fail("the run comes before the keys: `primerl run resume ID --max-steps 200`")
    return of_run(argparse.Namespace(**vars(chosen), overrides=overrides), _resume)


def _resume(run: Run, chosen: argparse.Namespace) -> int:
    if in_use(run.output_dir):
        return fail(f"{run.id} is running; `primerl run logs {run.id} -f` follows it", title="Nothing was started")
    if (said := jobs.in_the_way(run.output_dir)) is not None:
        return fail(f"{run.id}: {said}", title="Nothing was started")
    if run.form == SCRIPT:
        return fail(
            f"{run.id} was started by a training script (primerl.Run): start that again, on the same output_dir, "
            f"{run.output_dir}; it resumes from the checkpoints that it has saved",
            title="Nothing was started",
        )
    for needed, what in ((run.config, "the copy of its config"), (run.folder, "the folder it was started in")):
        if not needed.exists():
            return fail(f"{run.id}: {what}, {needed}, is gone; start it by its own file, `primerl run @ FILE`")
    given, overrides = ["@", os.fspath(run.config)], chosen.overrides
    comes_back = run.kind == "rl" and is_gone(run.output_dir)
    if not comes_back and not can_go_on(run):
        return fail(f"{run.id}: {run.output_dir} holds no run to resume; start it again by its own file")
    if chosen.detach:
        return detach(["resume", run.id, *overrides], run.folder)
    if comes_back and (code := _fetch(run, [*given, *overrides])) != 0:
        return code
    from primerl.cli.evaluation import evaluate
    from primerl.cli.processes import inference
    from primerl.cli.serve import serve
    from primerl.cli.sft import sft

    os.chdir(run.folder)
    if run.kind == "sft":
        return sft([*given, "--ckpt.resume-step", "-1", *overrides])
    if run.kind == "inference":
        return inference([*given, *overrides])
    if run.kind == "eval":
        return evaluate([*given, *overrides])
    if run.kind == served.KIND:
        return serve(["--tinker", *given, *overrides])
    return start_rl([*given, *overrides], form=run.form)


def _fetch(run: Run, arguments: list[str]) -> int:
    """A checkpoint from the run's store into its folder; the exit code."""
    from primerl.config.errors.fail import ConfigError
    from primerl.config.hosted.load_run import load_run
    from primerl.launch.resume import going_back, restoring
    from primerl.stores.entries import StoreError

    try:
        step = going_back.wanted(load_run(arguments, program="primerl run resume"))
        restoring.restore(run, step, print)
    except (ConfigError, StoreError) as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{run.output_dir} cannot be written: {error}")
    return 0
