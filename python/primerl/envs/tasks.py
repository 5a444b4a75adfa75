"""The data of an environment's examples, for a reflection model: `python -m primerl.envs.tasks`, a request on stdin.

The request is JSON: `[id, arguments, seed, count]`. On stdout: `{"total", "examples": [{...}]}` with the data of the
first `count` examples in the seeded order. Exit code 2 where the environment cannot be used:
after one line on stderr, and `{"problem", "keys"}`, keys of the environment that it is about, on stdout.
Run by the environment's own interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from primerl.envs import exits, overrides
from primerl.envs.generations import choice
from primerl.envs.interface import EnvironmentRefusedError, sendable


def told(environment_id: str, arguments: dict[str, Any], seed: int, count: int) -> dict[str, Any]:
    """Raises EnvironmentRefusedError."""
    with exits.refused(environment_id):
        generation = choice.chosen(environment_id)
        own, _ = overrides.split(arguments)
        env = generation.load(environment_id, own, "http://127.0.0.1:1/v1")
        examples = generation.list_examples(env, environment_id, seed, "eval")
        return {
            "total": len(examples),
            "examples": [_data(examples[place]) for place in range(min(count, len(examples)))],
        }


def _data(example: Any) -> dict[str, Any]:
    data = getattr(example, "data", example)
    plain = (
        data.model_dump(mode="json", exclude_none=True, warnings="none") if hasattr(data, "model_dump") else dict(data)
    )
    found: dict[str, Any] = sendable(json.loads(json.dumps(plain, default=str)))
    return found


def main() -> int:
    # What the environment prints is none of the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        found = told(*json.loads(sys.stdin.read()))
    except EnvironmentRefusedError as error:
        words = " ".join(str(error).split())
        print(words, file=sys.stderr)
        with answer:
            json.dump({"problem": words, "keys": error.keys}, answer)
        return 2
    with answer:
        json.dump(found, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
