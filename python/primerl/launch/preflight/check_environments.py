"""Loads environments as a run would, in a process that is thrown away: the launcher imports none of them.

Reads a JSON list of `[id, settings, variables, ...]` on standard input (variables as the env workers will have them,
then what else `check_environment` takes); the last line of output is a JSON list of `[problem, remark, keys]` in the
same order: null for none, and the environment's keys that the problem is about. One process for all of an interpreter:
most of the time goes into importing verifiers, which is done before the list is read, so that this process can be
started before it is known.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from primerl.envs.check import Verdict, check_environment
from primerl.envs.generations import choice
from primerl.envs.interface import EnvironmentRefusedError
from primerl.launch.preflight import shadowing
from primerl.net.requests import unusable_proxies
from primerl.process.imports import importing


def main() -> int:
    with importing():
        unusable = _prepare()
        verdicts = []
        for environment_id, settings, variables, *known in json.load(sys.stdin):
            before = dict(os.environ)
            os.environ.update(variables)
            # As env workers do, where an environment makes a client of a model.
            for name in unusable_proxies(os.environ):
                del os.environ[name]
            verdict = Verdict(unusable) if unusable else check_environment(environment_id, settings, *known)
            if verdict.cause is not None:
                traceback.print_exception(verdict.cause)
            verdicts.append((verdict.problem, verdict.remark, verdict.keys))
            # One environment's are no other's.
            os.environ.clear()
            os.environ.update(before)
    # On a line of its own, whatever an environment has printed.
    print("\n" + json.dumps(verdicts), flush=True)
    return 0


def _prepare() -> str | None:
    """Imports what all environments need; what is wrong, where that is not possible."""
    try:
        from primerl import _core  # noqa: F401 - an env worker of this interpreter needs it

        choice.prepare()
    except EnvironmentRefusedError as error:
        return str(error)
    except ImportError as error:
        return f"{sys.executable} cannot import what env workers need: {error}{shadowing.hint()}"
    return None


if __name__ == "__main__":
    sys.exit(main())
