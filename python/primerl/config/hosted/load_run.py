"""The two forms of a run's config: the full one, and the short one of Hosted Training, which becomes the full one."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import ValidationError

from primerl.config.command_line.arguments import Location, asks_for_help, dotted, place_of, split
from primerl.config.command_line.load import load
from primerl.config.command_line.log_variable import with_level
from primerl.config.command_line.sources import Written, read_sources
from primerl.config.errors.fail import ConfigError
from primerl.config.errors.validation_errors import describe
from primerl.config.foreign import loading
from primerl.config.schema.rl import RLConfig


@cache
def keys_of_one_form() -> tuple[frozenset[str], frozenset[str]]:
    """Keys of the short form only, and of the full one only. `model` is in both: a name or folder in the short one, a
    table in the full one."""
    from primerl.config.hosted import HostedConfig

    short, full = frozenset(HostedConfig.model_fields), frozenset(RLConfig.model_fields)
    return short - full, full - short


def load_run(arguments: list[str], program: str) -> RLConfig:
    """Reads `@ file.toml` and dotted overrides, both in either form. Exits 0 after `--help`.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] for anything that is wrong with them.
    """
    if not is_short(arguments):
        return load(RLConfig, arguments, program=program)
    from primerl.config.hosted import HostedConfig, compile_hosted
    from primerl.config.hosted.compile import written_at

    short = load(HostedConfig, arguments, program=program)
    try:
        config: RLConfig = RLConfig.model_validate(with_level(RLConfig, compile_hosted(short)))
        if short.seq_len is None:
            config.model_fields_set.discard("seq_len")  # not given: it follows what the model can attend to
        if "output_dir" not in short.model_fields_set:
            config.model_fields_set.discard("output_dir")  # each run gets its own
        return config
    except ValidationError as error:
        # What only the full form's own checks have found.
        written = Written(arguments)
        raise ConfigError(describe(error, RLConfig, arguments, lambda key: written_at(key, written.at))) from None


def is_short(arguments: list[str]) -> bool:
    """Whether the files, and the overrides where there is no file, are of the short form.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where keys of both forms are mixed.
    """
    if loading.is_foreign(RLConfig, arguments):
        return False  # it becomes the full one
    short, full = [], []
    for place, source in _keys(arguments):
        if _is_short_key(place, source):
            short.append(place)
        elif _is_full_key(place, source):
            full.append(place)
    if short and full:
        written = Written(arguments)
        raise ConfigError(
            f"two forms of config are mixed: {_listed(short, written)} of the short form (Hosted Training's), and "
            f"{_listed(full, written)} of the full form; write all in one of them (docs/hosted.md says what becomes "
            "what, and --dry-run of a file in the short form writes the full one)"
        )
    return bool(short)


def _listed(places: list[Location], written: Written) -> str:
    named = list(dict.fromkeys(f"{dotted(place)}{written.at(place)}" for place in places))
    return f"{', '.join(named)} {'is' if len(named) == 1 else 'are'}"


def _keys(arguments: list[str]) -> list[tuple[Location, Any]]:
    """The first key of everything that is set, with its value; of the command line's, a table for a dotted one."""
    found: list[tuple[Location, Any]] = []
    for tree, place in read_sources(arguments):
        found += [((place[0],), {})] if place else [((key,), value) for key, value in tree.items()]
    _, flags = split(arguments)
    places = [place_of(flag) for flag in flags if flag.startswith("--") and not asks_for_help([flag])]
    return found + [(place[:1], {} if place[1:] else "") for place in places]


def _is_short_key(place: Location, value: Any) -> bool:
    return place[0] in keys_of_one_form()[0] or (place == ("model",) and isinstance(value, str))


def _is_full_key(place: Location, value: Any) -> bool:
    return place[0] in keys_of_one_form()[1] or (place == ("model",) and isinstance(value, dict))
