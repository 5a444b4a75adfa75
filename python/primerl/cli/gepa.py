"""`primerl gepa run`: a better system prompt for an environment."""

from __future__ import annotations

import json

from primerl.cli.arguments import keep_state
from primerl.config.command_line.arguments import with_long_names
from primerl.forking import preload, servers

SHORT = {
    "-m": "--model",
    "-M": "--reflection-model",
    "-B": "--gepa.max-calls",
    "-n": "--gepa.num-train",
    "-N": "--gepa.num-val",
    "-c": "--gepa.max-concurrent",
    "-b": "--base-url",
    "-k": "--api-key-env",
    "-o": "--output-dir",
    "--max-calls": "--gepa.max-calls",
    "--num-train": "--gepa.num-train",
    "--num-val": "--gepa.num-val",
    "--minibatch-size": "--gepa.minibatch-size",
    "--perfect-score": "--gepa.perfect-score",
    "--state-columns": "--gepa.state-columns",
    "--max-concurrent": "--gepa.max-concurrent",
    "--seed": "--gepa.seed",
    "--api-base-url": "--base-url",
    "--api-key-var": "--api-key-env",
    "--run-dir": "--output-dir",
}
COLUMNS = "--gepa.state-columns"


def gepa(arguments: list[str]) -> int:
    from primerl.config.command_line.load import load
    from primerl.config.errors.error_locations import placed
    from primerl.config.errors.fail import ConfigError, fail
    from primerl.config.schema.gepa import GepaConfig
    from primerl.gepa import search
    from primerl.launch.report.console import Console

    try:
        given = written_out(arguments)
        config = load(GepaConfig, given, program="primerl gepa")
        keep_state(config.output_dir)
        computes = config.base_url is None and not config.dry_run
        servers.begin(config.fork_server, *([preload.TORCH] if computes else []))
        with placed(config, given):
            return search.run(config, Console().say)
    except ConfigError as error:
        return fail(str(error))


def written_out(arguments: list[str]) -> list[str]:
    """`run reverse-text -m x -B 50 --state-columns a b` as the flags that it stands for; `run` may be omitted."""
    rest = list(arguments[1:] if arguments[:1] == ["run"] else arguments)
    name = rest.pop(0) if rest and not rest[0].startswith(("-", "@")) else None
    if name is not None and name.endswith(".toml"):
        rest, name = ["@", name, *rest], None
    rest = with_long_names(rest, SHORT)
    if COLUMNS in rest:
        # Published as words, here a list.
        begin = rest.index(COLUMNS) + 1
        end = next((at for at in range(begin, len(rest)) if rest[at].startswith(("-", "@"))), len(rest))
        words = rest[begin:end]
        if words and not words[0].startswith("["):
            rest[begin:end] = [json.dumps(words)]
    return rest + ([] if name is None else ["--env", json.dumps([{"id": name}])])
