"""`primerl eval`: environments against an endpoint or a checkpoint."""

from __future__ import annotations

import json

from primerl.cli.arguments import keep_state
from primerl.config.command_line.arguments import with_long_names
from primerl.forking import preload, servers
from primerl.launch.preflight import checker

SHORT = {
    "-m": "--model",
    "-n": "--num-examples",
    "-k": "--rollouts-per-example",
    "-r": "--rollouts-per-example",
    "-c": "--concurrency",
    "-b": "--base-url",
    "-o": "--output-dir",
    # As `prime eval run` calls them.
    "--max-concurrent": "--concurrency",
    "--api-base-url": "--base-url",
    "--api-key-var": "--api-key-env",
}


def evaluate(arguments: list[str]) -> int:
    with checker.environments_ahead(arguments):
        with checker.interrupted_after():
            from primerl.config.command_line.load import load
            from primerl.config.errors.error_locations import placed
            from primerl.config.errors.fail import ConfigError, fail
            from primerl.config.process_files import run_file
            from primerl.config.schema.evaluation import EvalConfig
        try:
            given = written_out(arguments)
            config = load(EvalConfig, given, program="primerl eval")
            with placed(config, given):
                config = run_file.located(config)
            keep_state(config.output_dir)
            computes = config.base_url is None and not config.dry_run
            servers.begin(config.fork_server, *([preload.TORCH] if computes else []))
            with checker.interrupted_after():
                from primerl.launch import evaluation

            with placed(config, given):
                return evaluation.run(config)
        except ConfigError as error:
            return fail(str(error))


def written_out(arguments: list[str]) -> list[str]:
    """`reverse-text other-env -n 8` as the flags that it stands for; `run` may be before the names."""
    names = []
    rest = list(arguments[1:] if arguments[:1] == ["run"] and len(arguments) > 1 else arguments)
    while rest and not rest[0].startswith(("-", "@")):
        names.append(rest.pop(0))
    rest = with_long_names(rest, SHORT)
    if names:
        rest += ["--env", json.dumps([{"id": name} for name in names])]
    return rest
