"""`primerl gepa run`: a better system prompt for an environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.cli.arguments import keep_state
from primerl.cli.evaluation_arguments import environment_settings, sampling_flags, take, value_of, with_env_flags
from primerl.config.command_line.arguments import asks_for_help, split, with_long_names
from primerl.config.command_line.sources import read
from primerl.config.errors.fail import ConfigError, fail
from primerl.forking import preload, servers

if TYPE_CHECKING:
    from primerl.config.schema.gepa import GepaConfig

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
    # Taken off before the config is read.
    "-e": "--endpoints-path",
    "-a": "--env-args",
    "-S": "--sampling-args",
}
WITHOUT_EFFECT = {"-v", "--verbose", "-u", "--tui", "-s", "--save-results"}
"""Results are always saved, and each evaluation is a line."""
COLUMNS = "--gepa.state-columns"


def gepa(arguments: list[str]) -> int:
    from primerl.config.errors.error_locations import placed
    from primerl.gepa import search
    from primerl.launch.report.console import Console

    try:
        config, given = configured(arguments)
        keep_state(config.output_dir)
        computes = config.base_url is None and not config.dry_run
        servers.begin(config.fork_server, *([preload.TORCH] if computes else []))
        with placed(config, given):
            return search.run(config, Console().say)
    except ConfigError as error:
        return fail(str(error))


def configured(arguments: list[str]) -> tuple[GepaConfig, list[str]]:
    """The config, and the command line that it was read from. Raises ConfigError."""
    from primerl.config.command_line.load import load
    from primerl.config.schema.gepa import GepaConfig

    given = written_out(arguments)
    return load(GepaConfig, given, program="primerl gepa run"), given


def written_out(arguments: list[str]) -> list[str]:
    """`run reverse-text -m x -B 50 --state-columns a b` as the flags that it stands for; `run` may be omitted.

    Raises:
        ConfigError: A flag, an endpoint or a file cannot be used.
    """
    rest = list(arguments[1:] if arguments[:1] == ["run"] else arguments)
    name = rest.pop(0) if rest and not rest[0].startswith(("-", "@")) else None
    if asks_for_help(rest):
        return rest
    if name is not None and name.endswith(".toml"):
        rest, name = ["@", name, *rest], None
    rest = [word for word in with_long_names(rest, SHORT) if word not in WITHOUT_EFFECT]
    if COLUMNS in rest:
        # Published as words, here a list.
        begin = rest.index(COLUMNS) + 1
        end = next((at for at in range(begin, len(rest)) if rest[at].startswith(("-", "@"))), len(rest))
        words = rest[begin:end]
        if words and not words[0].startswith("["):
            rest[begin:end] = [json.dumps(words)]
    own, sampling = take(rest, "--env-args"), take(rest, "--sampling-args")
    if own is not None and name is None:
        raise ConfigError("--env-args: there is no environment to give it to; name one, `primerl gepa run ENV ...`")
    rest = [*sampling_flags(sampling), *rest]
    if name is not None:
        settings, rest = with_env_flags(environment_settings(own), rest)
        rest += ["--env", json.dumps([{"id": name, **settings}])]
    return with_servers(rest)


def with_servers(flags: list[str]) -> list[str]:
    """With the servers that names of models stand for, in a file of endpoints. Raises ConfigError."""
    from primerl.evals import endpoints

    tree: dict[str, Any] = {}
    file = take(flags, "--endpoints-path")
    for path, section in split(flags)[0]:
        if path is not None and not section:
            tree |= (own := read(path))
            if file is None and isinstance(own.get("endpoints_path"), str):
                file = str(Path(path).parent / own["endpoints_path"])
    given = {
        before: value_of(flags, f"--{before}model") or tree.get(f"{before.replace('-', '_')}model")
        for before in ("", "reflection-")
    }
    names = [name for name in given.values() if isinstance(name, str)]
    servers = endpoints.read(None if file is None else Path(file), *names) if names else {}
    found = list(flags)
    for before, name in given.items():
        server = servers.get(name) if isinstance(name, str) else None
        if server is None:
            continue
        take(found, f"--{before}model")
        found += [f"--{before}model", server.model]
        for key, value in (("base-url", server.base_url), ("api-key-env", server.api_key_env)):
            if value is not None and value_of(flags, f"--{before}{key}") is None:
                found += [f"--{before}{key}", value]
    return found
