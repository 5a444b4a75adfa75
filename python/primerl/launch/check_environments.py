"""Loads environments as a run would, in a process that is thrown away: the launcher imports none of them.

Reads a JSON list of `[id, settings, variables]` on standard input: variables as env workers have them, and behind them
how many examples are held out, where any are. The last line of output is a JSON list of problems (null for none) in the
same order. One process for all: most of the time goes into importing verifiers, which is done before the list is read,
so that this process can be started before it is known.
"""

from __future__ import annotations

import json
import os
import sys

from primerl.startup import importing


def main() -> int:
    with importing():
        from primerl.envs import adapter
        from primerl.envs.check import check_environment

        adapter.prepare()
        problems = []
        for environment_id, settings, variables, *held_out in json.load(sys.stdin):
            before = dict(os.environ)
            os.environ.update(variables)
            problems.append(check_environment(environment_id, settings, *held_out))
            # One environment's are no other's.
            os.environ.clear()
            os.environ.update(before)
    # On a line of its own, whatever an environment has printed.
    print("\n" + json.dumps(problems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
