"""Loads environments as a run would, in a process that is thrown away: the launcher imports none of them.

Reads a JSON list of `[id, settings]` on standard input; the last line of output is a JSON list of problems (null for
none) in the same order. One process for all: most of the time goes into importing verifiers.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    from primerl.envs.check import check_environment

    problems = [check_environment(environment_id, settings) for environment_id, settings in json.load(sys.stdin)]
    # On a line of its own, whatever an environment has printed.
    print("\n" + json.dumps(problems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
