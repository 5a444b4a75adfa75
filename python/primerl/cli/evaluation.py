"""`primerl eval`: environments against an endpoint or a checkpoint."""

from __future__ import annotations

from primerl.cli.arguments import keep_state
from primerl.cli.evaluation_arguments import expanded
from primerl.cli.services import refused
from primerl.forking import preload, servers
from primerl.launch.preflight import checker
from primerl.process import signals

BAD_INPUT, INTERRUPTED = 2, 130
OF_RUNS = ("list", "logs", "stop")
"""Words of `primerl run`, which are about evaluations too."""


def evaluate(arguments: list[str]) -> int:
    from primerl.config.errors.fail import ConfigError, fail

    if arguments and (said := refused("eval", arguments[0])) is not None:
        return fail(said)
    if arguments and arguments[0] in OF_RUNS:
        from primerl.cli.run import run

        return run(arguments, "primerl eval")
    try:
        evaluations = expanded(arguments)
    except ConfigError as error:
        return fail(str(error))
    code = 0
    for given in evaluations:
        code = max(code, _measure(given))
        if code in (BAD_INPUT, INTERRUPTED):
            break
    return code


def _measure(arguments: list[str]) -> int:
    with checker.environments_ahead(arguments):
        with signals.held():
            from primerl.config.command_line.load import load
            from primerl.config.errors.error_locations import placed
            from primerl.config.errors.fail import ConfigError, fail
            from primerl.config.process_files import run_file
            from primerl.config.schema.evaluation import EvalConfig
        try:
            config = load(EvalConfig, arguments, program="primerl eval")
            with placed(config, arguments):
                config = run_file.located(config)
            keep_state(config.output_dir)
            computes = config.base_url is None and not config.dry_run
            servers.begin(config.fork_server, *([preload.TORCH] if computes else []))
            with signals.held():
                from primerl.launch import evaluation

            with placed(config, arguments):
                return evaluation.run(config)
        except ConfigError as error:
            return fail(str(error))
