"""`primerl serve --tinker`: the Tinker API over one base model."""

from __future__ import annotations

from primerl.cli.arguments import keep_state
from primerl.config.errors.fail import ConfigError, fail
from primerl.process import extras

USAGE = (
    "usage: primerl serve --tinker @ FILE.toml [--dotted.key VALUE ..]\n\n"
    "Serves an API for training scripts: --tinker, that of the Tinker SDK (docs/tinker.md).\n"
    "`primerl serve --tinker --help` lists the keys."
)
BAD_INPUT = 2


def serve(arguments: list[str]) -> int:
    if "--tinker" not in arguments:
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else BAD_INPUT
    rest = [argument for argument in arguments if argument != "--tinker"]
    from primerl.config.command_line.load import load
    from primerl.config.schema.serve import ServeConfig

    try:
        config = load(ServeConfig, rest, program="primerl serve --tinker")
        extras.require("`primerl serve --tinker`", "torch", "transformers", "tinker", "starlette", "uvicorn")
        keep_state(config.output_dir)
        from primerl.tinker.serve import serve as run

        return run(config)
    except ConfigError as error:
        return fail(str(error))
