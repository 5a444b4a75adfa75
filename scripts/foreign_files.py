"""Which files of another tool's checkout `primerl convert` translates, and what each lacks.

    python scripts/foreign_files.py ../prime-rl/configs ../prime-rl/examples ../verifiers/configs

Reads every TOML file in the folders (but pyproject.toml) and prints a table: `yes` where nothing is missing but models,
environments and hardware, else what has no counterpart or is to be set. Exits 1 where a key got no sentence of its own.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.foreign import conversion

BARE = "unknown key"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    chosen = parser.parse_args()
    files = sorted(
        file for folder in chosen.folders for file in folder.rglob("*.toml") if file.name != "pyproject.toml"
    )
    if not files:
        print("no TOML file in these folders", file=sys.stderr)
        return 2
    whole, bare = 0, 0
    missing: set[str] = set()
    for file in files:
        problems, environments = outcome(file)
        missing |= set(environments)
        whole += not problems
        bare += sum(BARE in problem for problem in problems)
        print(f"{'yes' if not problems else 'no':4}{file}")
        for problem in dict.fromkeys(problems):
            print(f"        {problem}")
    print(f"\n{whole} of {len(files)} files translate; {bare} keys without a sentence")
    print(f"environments that are not installed: {', '.join(sorted(missing)) or 'none'}")
    return 1 if bare else 0


def outcome(file: Path) -> tuple[list[str], list[str]]:
    """What a file lacks, and environments that are not installed."""
    try:
        made = conversion.of_files([str(file)])
    except ConfigError as error:
        # Endpoints and files of ours are read as they are.
        as_it_is = "as it is" in str(error) or "already" in str(error)
        return ([] if as_it_is else str(error).splitlines()), []
    tomllib.loads(made.text)  # what is written can be read
    return made.problems, made.missing


if __name__ == "__main__":
    raise SystemExit(main())
