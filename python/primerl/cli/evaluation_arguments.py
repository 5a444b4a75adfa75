"""What `primerl eval` is given: names, short flags, names of endpoints, and verifiers' files, as keys of its config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from primerl.config.command_line.arguments import asks_for_help, with_long_names
from primerl.config.errors.fail import ConfigError
from primerl.evals import no_counterpart

SHORT = {
    "-m": "--model",
    "-n": "--num-examples",
    "-r": "--rollouts-per-example",
    "-c": "--concurrency",
    "-b": "--base-url",
    "-o": "--output-dir",
    "-t": "--max-tokens",
    "-T": "--temperature",
    # As `prime eval run` calls them.
    "--max-concurrent": "--concurrency",
    "--api-base-url": "--base-url",
    "--api-key-var": "--api-key-env",
    "--timeout": "--timeouts.rollout-s",
    # As verifiers 0.4 does.
    "--num-rollouts": "--rollouts-per-example",
    "--select.limit": "--num-examples",
    "--client.base-url": "--base-url",
    "--client.api-key-var": "--api-key-env",
    "--sampling.max-tokens": "--max-tokens",
    "--sampling.temperature": "--temperature",
    "--run.dir": "--output-dir",
    "--clean": "--clean-output-dir",
    # Taken off before the config is read.
    "-p": "--provider",
    "-e": "--endpoints-path",
    "-a": "--env-args",
    "-S": "--sampling-args",
    "-w": "--num-workers",
}
WITHOUT_EFFECT = {
    *("-s", "--save-results", "-A", "--abbreviated-summary", "-d", "--disable-tui", "-f", "--fullscreen"),
    *("-N", "--no-interleave-scoring", "-i", "--independent-scoring", "--disable-env-server", "--skip-upload"),
    *("--push", "--no-push", "--no-rich", "--select.shuffle"),
}
"""Results are always saved and shown as a short table, examples shuffled by the seed, and nothing is uploaded."""
REFUSED = {
    **dict.fromkeys(("-C", "--state-columns"), no_counterpart.COLUMNS),
    **dict.fromkeys(("-H", "--save-to-hf-hub", "-D", "--hf-hub-dataset-name"), no_counterpart.UPLOAD),
    **dict.fromkeys(("-R", "--resume"), no_counterpart.RESUME),
    **dict.fromkeys(("-x", "--extra-env-kwargs"), "give the environment's own settings by --env-args"),
    **dict.fromkeys(("--header", "--header-from-state"), no_counterpart.HEADERS),
    "--hosted": "evaluations run on this machine; omit it and the flags that go with it",
    "--max-retries": no_counterpart.RETRIES,
    "--api-client-type": no_counterpart.CLIENT,
    "--heartbeat-url": "use `/metrics` of the orchestrator (docs/monitors.md)",
}


def expanded(arguments: list[str]) -> list[list[str]]:
    """The command line of each evaluation, with the long names of keys; one, unless a file of verifiers has several.

    Raises:
        ConfigError: A flag, an endpoint or a file of verifiers cannot be used.
    """
    names, rest = _names(arguments)
    if asks_for_help(rest):
        return [rest]
    files = [name for name in names if name.endswith(".toml")]
    rest = _long(rest)
    taken = {flag: take(rest, flag) for flag in ("--provider", "--endpoints-path", "--env-args", "--sampling-args")}
    flags = [*sampling_flags(taken["--sampling-args"]), *rest]
    named = [name for name in names if name not in files]
    file = _published(files, flags)
    if file is not None:
        if named:
            raise ConfigError(f"{file} and {named[0]} are both given; put all environments into the file")
        return _of_file(file, flags, taken)
    flags = [*(word for name in files for word in ("@", name)), *flags]
    workers = take(flags, "--num-workers") if named else None
    flags = _with_endpoint(flags, taken["--provider"], taken["--endpoints-path"])
    if not named:
        if taken["--env-args"] is not None:
            raise ConfigError("--env-args: there is no environment to give it to; name one, `primerl eval ENV ...`")
        return [flags]
    settings, flags = with_env_flags({**environment_settings(taken["--env-args"]), **_workers(workers)}, flags)
    return [[*flags, "--env", json.dumps([{"id": name, **settings} for name in named])]]


def written_out(arguments: list[str]) -> list[str]:
    """The first of them. Raises ConfigError."""
    return expanded(arguments)[0]


def _names(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first flag; `run` may be before the names."""
    names = []
    rest = list(arguments[1:] if arguments[:1] == ["run"] and len(arguments) > 1 else arguments)
    while rest and not rest[0].startswith(("-", "@")):
        names.append(rest.pop(0))
    return names, rest


def _long(arguments: list[str]) -> list[str]:
    """With the long names of flags. Raises ConfigError for those that have no counterpart."""
    found: list[str] = []
    for position, argument in enumerate(arguments):
        flag = argument.partition("=")[0]
        if flag in REFUSED:
            raise ConfigError(f"{flag} has no counterpart: {REFUSED[flag]}")
        if flag in ("-v", "--verbose"):
            found.append("--log.level=debug")
        elif flag == "-k":
            # Here the k of pass@k, for `prime` the variable of the key.
            value = argument.partition("=")[2] or next(iter(arguments[position + 1 :]), "")
            found += with_long_names(
                [argument], {"-k": "--rollouts-per-example" if _is_count(value) else "--api-key-env"}
            )
        elif flag not in WITHOUT_EFFECT:
            found += with_long_names([argument], SHORT)
    if value_of(found, "--num-examples") == "-1":
        take(found, "--num-examples")
    return found


def _is_count(text: str) -> bool:
    return text.isascii() and text.lstrip("-").isdigit()


def value_of(arguments: list[str], flag: str) -> str | None:
    """The last value of a flag."""
    return take(list(arguments), flag)


def take(arguments: list[str], flag: str) -> str | None:
    """Takes a flag off, with its value, which is returned. Raises ConfigError without one."""
    found = None
    while (at := next((i for i, word in enumerate(arguments) if word.partition("=")[0] == flag), None)) is not None:
        _, equals, value = arguments.pop(at).partition("=")
        if not equals:
            if at == len(arguments):
                raise ConfigError(f"{flag} requires a value")
            value = arguments.pop(at)
        found = value
    return found


def _table(flag: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    from primerl.config.command_line.flags import json_of

    found: dict[str, Any] = json_of(flag, text, dict)
    return found


def environment_settings(text: str | None) -> dict[str, Any]:
    """Settings of an environment; verifiers has those of a v1 environment's parts in `config`."""
    given = _table("--env-args", text)
    parts = given.pop("config", {})
    found = {name: parts[name] for name in ("taskset", "harness") if isinstance(parts, dict) and name in parts}
    return {**({"args": given} if given else {}), **found}


def with_env_flags(settings: dict[str, Any], flags: list[str]) -> tuple[dict[str, Any], list[str]]:
    """With what verifiers' flags, `--env.taskset.KEY` and `--env.SEAT.KEY`, say of the environment that is named; and
    the other flags. Raises ConfigError."""
    if not any(word.startswith(("--env.", "--no-env.")) for word in flags):
        return settings, flags
    from primerl.config.command_line.load import merged
    from primerl.config.foreign.loading import entry_of_flags

    said, others = entry_of_flags(flags)
    if "id" in said:
        raise ConfigError("--env.taskset.id: the environment is named already; omit one of them")
    return merged(settings, said), others


def _workers(text: str | None) -> dict[str, Any]:
    if text in (None, "auto"):
        return {}
    if not _is_count(text or ""):
        raise ConfigError(f"--num-workers: {text!r} is no number; give how many processes run the environment, or auto")
    return {"num_workers": int(text or "")}


def sampling_flags(text: str | None) -> list[str]:
    from primerl.evals.sampling_args import split_sampling

    sampling, template = split_sampling("--sampling-args", _table("--sampling-args", text))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sampling.items()]
    return [*flags, *(["--chat-template-kwargs", json.dumps(template)] if template else [])]


def _with_endpoint(flags: list[str], provider: str | None, endpoints: str | None) -> list[str]:
    """With the server that the model's name stands for."""
    model = value_of(flags, "--model")
    if model is None:
        if provider is not None:
            raise ConfigError("--provider: there is no model to ask it for; give --model")
        return flags
    from primerl.evals.endpoints import target

    found = target(
        model,
        provider=provider,
        endpoints=None if endpoints is None else Path(endpoints),
        base_url=value_of(flags, "--base-url"),
        api_key_env=value_of(flags, "--api-key-env"),
    )
    given = {"--model": found.model, "--base-url": found.base_url, "--api-key-env": found.api_key_env}
    new = [word for flag, value in given.items() if value != value_of(flags, flag) for word in (flag, str(value))]
    for flag in new[::2]:
        take(flags, flag)
    return [*new, *flags]


def _published(names: list[str], flags: list[str]) -> Path | None:
    """The file of verifiers' form that is given, taken off the flags. Raises ConfigError."""
    from primerl.config.command_line.arguments import split
    from primerl.config.command_line.sources import read
    from primerl.evals.published_file import is_published

    files, _ = split(flags)
    given = [*names, *(file for file, section in files if file is not None and not section)]
    found = [file for file in given if os.path.isfile(file) and is_published(read(file))]
    if not found:
        return None
    if len(given) > 1:
        raise ConfigError(f"{found[0]} is a file of [[eval]] entries, which stands alone; give no other file")
    flags[:] = split(flags)[1]
    return Path(found[0])


def _of_file(file: Path, flags: list[str], taken: dict[str, str | None]) -> list[list[str]]:
    from primerl.config.command_line.sources import read
    from primerl.evals.published_file import evaluations

    if taken["--env-args"] is not None:
        raise ConfigError(f"--env-args: {file} names the environments; write `env_args` there")
    tree = read(os.fspath(file))
    over = {"provider": taken["--provider"], "endpoints_path": taken["--endpoints-path"]}
    if over["endpoints_path"] is not None:
        over["endpoints_path"] = os.path.abspath(over["endpoints_path"])
    tree |= {key: value for key, value in over.items() if value is not None}
    found = evaluations(file, tree, take(flags, "--model"))
    if len(found) > 1 and value_of(flags, "--output-dir") is not None:
        raise ConfigError(
            f"--output-dir: {file} has evaluations of {len(found)} models or settings, each with a folder of its own; "
            "omit it"
        )
    for_each = ("num_examples", "rollouts_per_example", "max_tokens", "temperature")
    given = {key: value_of(flags, f"--{key.replace('_', '-')}") for key in for_each}
    lines = []
    for one in found:
        # What the command line gives is for all environments, over what the file says of one.
        environments = [
            {key: value for key, value in environment.items() if given.get(key) is None}
            for environment in one.environments
        ]
        words = [f"--{key.replace('_', '-')}={_text(value)}" for key, value in one.settings.items()]
        lines.append([*words, "--env", json.dumps(environments), *flags])
    return lines


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
