"""`primerl simulate`: a run in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

from primerl.config.command_line.arguments import with_long_names


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

    try:
        simulated = _core.simulate(config.plan(), config.what_if)
    except ValueError as error:
        return fail(str(error))
    numbers = json.dumps({"report": simulated["report"], "what_if": simulated["what_if"]}, indent=2)
    print(numbers if as_json else simulated["table"].rstrip("\n"))
    if config.output_dir is not None:
        folder = Path(config.output_dir)
        try:
            write_text(folder / "report.json", numbers + "\n")
            write_text(folder / "report.txt", simulated["table"])
            write_text(folder / "timeline.svg", simulated["picture"])
        except (OSError, ValueError) as error:
            return fail(f"output_dir: {folder} cannot be written: {error}")
        if not as_json:
            print(f"the picture is {folder / 'timeline.svg'}")
    return 0 if simulated["report"]["completed"] else 1
