"""`primerl env`: environment packages of this folder, their secrets, and the virtualenvs made for them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from primerl.cli.arguments import CommandParser
from primerl.config.errors.fail import ConfigError, fail

BAD_INPUT = 2
ENVIRONMENTS = Path("environments")
TITLE = "Nothing was changed"
USAGE = """usage: primerl env init NAME [--path DIR] [--force]    write a new environment package, with a test
       primerl env install NAME... [--path DIR]        install packages of ./environments into this Python
       primerl env uninstall NAME...                   remove them from this Python again
       primerl env list [--path DIR] [--json]          list the packages of ./environments
       primerl env secret {list,set,delete} ENVIRONMENT [NAME] [--json]
       primerl env prune [--dry-run]                   remove virtualenvs that no run needs"""


def env(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else BAD_INPUT
    word, *rest = arguments
    if word == "prune":
        from primerl.cli import prune

        return prune.main(rest)
    if word in ("secret", "secrets"):
        from primerl.cli.secret import of_environment

        return of_environment(rest)
    words = {"init": init, "install": install, "uninstall": uninstall, "list": listed}
    if word in words:
        try:
            return words[word](rest)
        except ConfigError as error:
            return fail(str(error), title="No environment was written" if word == "init" else TITLE)
    from primerl.cli.services import refused

    said = refused("env", word) or f"expected `primerl env secret`, or one of {', '.join(words)}, prune"
    return fail(said, title=TITLE)


def _parser(word: str, description: str) -> CommandParser:
    return CommandParser(prog=f"primerl env {word}", allow_abbrev=False, description=description)


def _add_path(parser: CommandParser) -> None:
    parser.add_argument(
        "-p", "--path", type=Path, default=ENVIRONMENTS, metavar="DIR", help="folder of environments (./environments)"
    )


def init(arguments: list[str]) -> int:
    """Raises ConfigError where nothing can be written."""
    parser = _parser(
        "init",
        "Writes a verifiers v1 environment package that works, sums of two numbers, with a test: change it into your "
        "own. Folder and module have `_` where the package's name has `-`.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the package, such as my-env")
    _add_path(parser)
    parser.add_argument(
        "--force", action="store_true", help="write into a folder that is there, over files of the name"
    )
    parser.add_argument(
        "--rewrite-readme", action="store_true", help="only write README.md, over the one that is there"
    )
    # The package always has several files.
    parser.add_argument("--multi-file", action="store_true", help=argparse.SUPPRESS)
    for flag, other in (("-T", "--add-tool"), ("-H", "--add-harness"), ("--openenv", "--openenv")):
        parser.add_argument(*dict.fromkeys((flag, other)), dest="more", action="append_const", const=other,
                            help=argparse.SUPPRESS)  # fmt: skip
    chosen = parser.parse_args(arguments)
    from primerl.workspace import names, scaffold, writing

    if chosen.more:
        raise ConfigError(
            f"{chosen.more[0]} is not written by primerl: tools and harnesses are classes of verifiers in the package "
            "itself (`vf-init` of verifiers writes one), and docs/environments-seats.md says how a config names them"
        )
    package = names.package(chosen.name)
    folder = chosen.path / names.module_of(package)
    files = scaffold.files(package)
    if chosen.rewrite_readme:
        files = {path: text for path, text in files.items() if path.name == "README.md"}
    write = writing.write_over if chosen.force or chosen.rewrite_readme else writing.write_folder
    write(folder, files)
    for path in files:
        print(f"wrote {folder / path}")
    within = "" if chosen.path == ENVIRONMENTS else f" --path {chosen.path}"
    print(f"next:\n  primerl env install {package}{within}\n  python -m pytest {folder}")
    return 0


def install(arguments: list[str]) -> int:
    """Raises ConfigError."""
    parser = _parser(
        "install", "Installs environments of ./environments into the Python that runs primerl; changes of their files "
        "count without installing them again.",
    )  # fmt: skip
    parser.add_argument("names", metavar="NAME", nargs="+", help="name of a package, or its folder")
    _add_path(parser)
    parser.add_argument("--with", dest="tool", choices=("uv", "pip"), help="the installer (uv where it is there)")
    for flag in ("--no-upgrade", "--prerelease"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    from primerl.workspace import installing

    folders = [installing.folder_of(chosen.path, name) for name in chosen.names]
    for name, folder in zip(chosen.names, folders, strict=True):
        installing.install_folder(folder, tool=chosen.tool)
        print(f"installed {name} from {folder}")
    return 0


def uninstall(arguments: list[str]) -> int:
    """Raises ConfigError."""
    parser = _parser("uninstall", "Removes environments from the Python that runs primerl; their folders stay.")
    parser.add_argument("names", metavar="NAME", nargs="+", help="name of a package")
    parser.add_argument("--with", dest="tool", choices=("uv", "pip"), help="the installer (uv where it is there)")
    chosen = parser.parse_args(arguments)
    from primerl.workspace import installing

    for name in chosen.names:
        installing.check_is_installed(name)
    for name in chosen.names:
        installing.uninstall(name, tool=chosen.tool)
        print(f"uninstalled {name}")
    return 0


def listed(arguments: list[str]) -> int:
    parser = _parser("list", "Lists the packages of ./environments, and whether this Python has them.")
    _add_path(parser)
    from primerl.cli.run.common import add_json, show
    from primerl.workspace import installing

    add_json(parser)
    chosen = parser.parse_args(arguments)
    packages = installing.found(chosen.path)
    rows = [[one.name, one.version, "yes" if one.installed else "no", one.folder] for one in packages]
    if chosen.json:
        names = ("environment", "version", "installed", "folder")
        told = [(one.name, one.version, one.installed, str(one.folder)) for one in packages]
        print(json.dumps([dict(zip(names, values, strict=True)) for values in told], indent=2))
    elif rows:
        show(["environment", "version", "installed", "folder"], rows)
    else:
        print(f"no packages in {chosen.path}; `primerl env init NAME` writes one", file=sys.stderr)
    return 0
