"""`primerl report` and `primerl verify`: looking at a finished run."""

from __future__ import annotations

import sys
from pathlib import Path

from primerl.config.errors.fail import fail

FAILED = 1


def report(arguments: list[str]) -> int:
    folder = folder_from(arguments, "report", "shows a table and the reward curve, and writes reward.png")
    if isinstance(folder, int):
        return folder
    from primerl.runs.report import DamagedRunError, NoRunError, show

    try:
        show(folder)
    except NoRunError as error:
        return fail(str(error), title="No report")
    except DamagedRunError as error:
        print(f"primerl report: {error}", file=sys.stderr)
        return FAILED
    return 0


def folder_from(arguments: list[str], command: str, does: str) -> Path | int:
    """The one argument, or the exit code after help or a complaint."""
    use = f"usage: primerl {command} OUTPUT_DIR\n\n{does}; OUTPUT_DIR is the folder of a run"
    if arguments in (["-h"], ["--help"]):
        print(use)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return fail(f"expected the folder of one run, found {' '.join(arguments) or 'nothing'}\n{use}", title="No run")
    folder = Path(arguments[0])
    if not folder.is_dir():
        return fail(f"there is no folder {folder}; give the output_dir of a run", title="No run")
    return folder


def verify(arguments: list[str]) -> int:
    folder = folder_from(
        arguments,
        "verify",
        "recomputes the log-probability of every trained token with the weights that sampled it "
        "(the run must have been started with --keep-broadcasts)",
    )
    if isinstance(folder, int):
        return folder
    # Said before torch is imported, which takes seconds.
    if not (folder / "spool").is_dir():
        return fail(f"{folder} holds no spool of trained batches; give the output_dir of an RL run", title="No run")
    from primerl.verify import main

    return main(folder)
