"""`primerl lab setup`: a folder with configs, a list of endpoints and an example environment to start from."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from primerl.cli.arguments import CommandParser
from primerl.config.errors.fail import ConfigError, fail

TITLE = "The folder was not set up"
USAGE = """usage: primerl lab setup [--prime-rl] [--skip-agents-md] [--skip-install]

setup  write configs, configs/endpoints.toml, an example environment and AGENTS.md into this folder"""


def lab(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "setup":
        return setup(arguments[1:])
    from primerl.cli.services import refused

    said = refused("lab", arguments[0])
    return fail(said or f"`primerl lab` has no word {arguments[0]!r}; there is `primerl lab setup`", title=TITLE)


def setup(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl lab setup",
        allow_abbrev=False,
        description="Writes configs/ (training, evaluations, prompt optimisation, endpoints), an example environment, "
        "AGENTS.md and .gitignore into this folder, and installs the environment. A file that is there stays as it is.",
    )
    parser.add_argument(
        "--prime-rl",
        action="store_true",
        help="a training config in primerl's own form, configs/prime-rl, in place of configs/rl; the trainer is "
        "part of primerl, nothing is cloned",
    )
    parser.add_argument("--skip-agents-md", action="store_true", help="write no AGENTS.md")
    parser.add_argument("--skip-install", action="store_true", help="do not install the example environment")
    # Which agent's folders are made: AGENTS.md is for all of them.
    parser.add_argument("--agents", "--agent", help=argparse.SUPPRESS)
    parser.add_argument("--no-interactive", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    from primerl.workspace import configs, writing

    try:
        new, kept = writing.write_missing(
            Path(), configs.files(full_form=chosen.prime_rl, guidance=not chosen.skip_agents_md)
        )
    except ConfigError as error:
        return fail(str(error), title=TITLE)
    for path in new:
        print(f"wrote {path}")
    for path in kept:
        print(f"kept {path}, which is there already")
    code = 0 if chosen.skip_install else _install(configs.EXAMPLE)
    print(_next(configs.EXAMPLE, full_form=chosen.prime_rl, installs=chosen.skip_install))
    return code


def _install(name: str) -> int:
    from primerl.workspace import installing

    try:
        installing.install(Path("environments"), name)
    except ConfigError as error:
        print(f"primerl lab setup: {error}; the files are written", file=sys.stderr)
        return 1
    print(f"installed {name}")
    return 0


def _next(name: str, *, full_form: bool, installs: bool) -> str:
    training = os.path.join("configs", *(("prime-rl", f"{name}.toml") if full_form else ("rl", "qwen-3.toml")))
    lines = [f"primerl env install {name}"] if installs else []
    lines += [
        f"primerl eval run {name} -m MODEL -n 8 -r 2",
        f"primerl rl @ {training} --dry-run",
    ]
    return "next:\n" + "\n".join(f"  {line}" for line in lines)
