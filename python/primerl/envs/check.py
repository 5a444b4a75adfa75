"""Whether an environment can be used as configured: `python -m primerl.envs.check ID [JSON]`.

Run in a process of its own by the launcher, before anything is started. Exit code 0, or 2 after one line on stderr
that says what is wrong and what to do.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any


def check_environment(environment_id: str, arguments: dict[str, Any], held_out: int = 0) -> str | None:
    """Loads the environment and lists its examples; returns what is wrong, or None."""
    from primerl.envs import adapter

    try:
        adapter.prepare()
        env = adapter.load(environment_id, arguments, "http://127.0.0.1:1/v1")
        adapter.list_examples(env, environment_id, 0, held_out)
    except adapter.EnvironmentRefusedError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        return str(error)
    return None


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: python -m primerl.envs.check ID [JSON]", file=sys.stderr)
        return 2
    try:
        settings = json.loads(arguments[1]) if len(arguments) == 2 else {}
    except ValueError as error:
        print(f"the settings are not JSON: {error}", file=sys.stderr)
        return 2
    problem = check_environment(arguments[0], settings)
    if problem is None:
        return 0
    print(" ".join(problem.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
