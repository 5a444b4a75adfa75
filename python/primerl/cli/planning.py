"""`primerl simulate`: a run in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

from primerl.config.command_line.arguments import with_long_names

FILES = ("report.json", "report.txt", "timeline.svg")


def simulate(arguments: list[str]) -> int:
    from primerl.config.command_line.load import load
    from primerl.config.errors.fail import ConfigError, fail
    from primerl.config.process_files.files import write_text
    from primerl.config.schema.simulate import SimulateConfig

    # How it is shown is no part of the plan.
    as_json = "--json" in arguments
    plan = [argument for argument in arguments if argument != "--json"]
    plan = with_long_names(plan, {"--output": "--output-dir"})
    try:
        config = load(SimulateConfig, plan, program="primerl simulate")
    except ConfigError as error:
        return fail(str(error))
    from primerl import _core

    folder = None if config.output_dir is None else Path(config.output_dir)
    if folder is not None and (problem := _problem_with(folder)):
        return fail(f"output_dir: {problem}; choose another output_dir")
    try:
        simulated = _core.simulate(config.plan(), config.what_if)
    except ValueError as error:
        return fail(str(error))
    numbers = json.dumps({"report": simulated["report"], "what_if": simulated["what_if"]}, indent=2)
    print(numbers if as_json else simulated["table"].rstrip("\n"))
    if folder is not None:
        try:
            for name, text in zip(FILES, (numbers + "\n", simulated["table"], simulated["picture"]), strict=True):
                write_text(folder / name, text)
        except (OSError, ValueError) as error:
            return fail(f"output_dir: {folder} cannot be written: {error}")
        if not as_json:
            print(f"the picture is {folder / 'timeline.svg'}")
    return 0 if simulated["report"]["completed"] else 1


def _problem_with(folder: Path) -> str | None:
    """Why nothing is written there. What an earlier simulation wrote, all of its files, is replaced."""
    from primerl.launch.preflight.output_folder import is_of_run

    try:
        if is_of_run(folder):
            return f"{folder} is the folder of a run"
        there = [name for name in FILES if (folder / name).exists()]
        lacking = [name for name in FILES if name not in there]
        if there and lacking:
            return f"{folder / there[0]} is there without {' and '.join(lacking)}, and would be replaced"
        if folder.exists() and not folder.is_dir():
            return f"{folder} is not a folder"
    except OSError as error:
        return f"{folder} cannot be used: {error}"
    return None
