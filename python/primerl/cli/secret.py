"""`primerl secret` and `primerl env secret`: values that env workers alone get to see."""

from __future__ import annotations

import argparse
import getpass
import json
import sys

from primerl.cli.arguments import CommandParser
from primerl.cli.run.common import add_json
from primerl.cli.services import refused
from primerl.config.errors.fail import fail
from primerl.runs import secrets
from primerl.runs.state import StateError

FAILED = 1
ACTIONS = {"list": "list their names", "set": "set one, from standard input or a prompt", "delete": "delete one"}
SAME = {"create": "set", "update": "set"}
"""Words of `prime secret`."""
TITLE = "Nothing was changed"


def secret(arguments: list[str]) -> int:
    if arguments and (said := refused("secret", arguments[0])) is not None:
        return fail(said, title=TITLE)
    return _secret("primerl secret", arguments, of_environment=False)


def of_environment(arguments: list[str]) -> int:
    """`primerl env secret`."""
    if arguments and (said := refused("env", "secret", arguments[0])) is not None:
        return fail(said, title=TITLE)
    return _secret("primerl env secret", arguments, of_environment=True)


def _secret(program: str, arguments: list[str], *, of_environment: bool) -> int:
    # Nothing of the command line is repeated in a complaint: it may be a value.
    parser = CommandParser(
        prog=program,
        allow_abbrev=False,
        description="Values that env workers see as variables of their environment, and no other process of a run. "
        "They are read from standard input or asked for, kept in the state folder (mode 600) and shown nowhere.",
    )
    parser.add_argument("action", help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    if of_environment:
        parser.add_argument("environment", help="the environment's id (owner/name), or its name in the run")
    parser.add_argument("name", nargs="?", help="of the variable")
    # As `prime secret create` has it.
    parser.add_argument("-n", "--name", dest="named", help=argparse.SUPPRESS)
    add_json(parser, "of `list`: print one JSON array, of names")
    chosen, more = parser.parse_known_args(arguments)
    environment = chosen.environment if of_environment else None
    try:
        if more:
            raise secrets.SecretError(
                "too much on the command line; a value does not belong there, where everybody on this machine sees "
                "it: it is read from standard input, or asked for"
            )
        if environment is not None:
            secrets.check_environment(environment)
        if chosen.name is not None and chosen.named is not None:
            raise secrets.SecretError("the name is given twice, after the action and by --name; omit one of them")
        action = SAME.get(chosen.action, chosen.action)
        if chosen.json and action != "list":
            raise secrets.SecretError("only `list` has --json")
        return _do(action, chosen.name or chosen.named, environment, as_json=chosen.json)
    except (secrets.SecretError, StateError) as error:
        return fail(str(error), title=TITLE)


def _do(action: str, name: str | None, environment: str | None, *, as_json: bool) -> int:
    if action not in ACTIONS:
        raise secrets.SecretError(f"expected one of {', '.join(ACTIONS)} first")
    if (name is None) != (action == "list"):
        raise secrets.SecretError("`list` takes no name" if action == "list" else f"`{action}` takes the name of one")
    if name is None:
        found = secrets.names(environment)
        if as_json:
            print(json.dumps([{"name": one, "environment": environment} for one in found], indent=2))
            return 0
        print("\n".join(found) if found else "no secrets" + (f" of {environment}" if environment else ""))
        others = secrets.environments() if environment is None else []
        if others:
            hint = "`primerl env secret list ENVIRONMENT`"
            print(
                f"also of single environments: {', '.join(others)} ({hint})",
                file=sys.stderr,
            )
        return 0
    of = f" of {environment}" if environment else ""
    secrets.check_name(name)
    if action == "set":
        replaced = secrets.put(name, _value(name), environment)
        print(f"{'replaced' if replaced else 'set'} {name}{of}; env workers of later starts get it")
        return 0
    if not secrets.remove(name, environment):
        print(f"there is no secret {name}{of}", file=sys.stderr)
        return FAILED
    print(f"deleted {name}{of}; env workers that run keep it until they end")
    return 0


def _value(name: str) -> str:
    if sys.stdin.isatty():
        return getpass.getpass(f"value of {name} (not shown): ")
    try:
        value = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise secrets.SecretError(f"{name}: the value is not UTF-8 text") from None
    # `echo value |` ends it with one.
    return value.removesuffix("\n").removesuffix("\r")
