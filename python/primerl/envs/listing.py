"""What all workers of an environment must have in common: the examples, and the code that makes and scores them.

Workers are leased numbers of examples, so two that list others would train on something else under one name. The
orchestrator compares each worker with the first one, and refuses one that differs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

# A key is a hash of the whole example: of more than so many, evenly spaced ones are looked at.
MOST_KEYS = 1024
_SEPARATOR = re.compile(r"[-_.]+")


def listing_of(environment_id: str, examples: Sequence[Any], key: Callable[[Any], str]) -> dict[str, Any]:
    """`Listing` of the wire: digest, first, last, packages.

    Args:
        examples: At least one, in the worker's order.
        key: Of an example, the same in every process.
    """
    keys = [key(examples[index]) for index in looked_at(len(examples))]
    digest = hashlib.sha256(f"{len(examples)}\n".encode())
    for one in keys:
        digest.update(one.encode() + b"\n")
    return {
        "digest": digest.hexdigest(),
        "first": keys[0],
        "last": keys[-1],
        "packages": packages_of(environment_id),
    }


def looked_at(count: int, most: int = MOST_KEYS) -> list[int]:
    """Numbers of the examples whose keys are compared: all, or evenly spaced ones with the first and the last."""
    if count <= most:
        return list(range(count))
    return [index * (count - 1) // (most - 1) for index in range(most)]


def packages_of(environment_id: str) -> dict[str, str]:
    """Versions of verifiers and of the environment's package, where it is installed as one."""
    module = environment_id.rsplit("/", 1)[-1].split("@", 1)[0]
    found = {"verifiers": metadata.version("verifiers")}
    name = _SEPARATOR.sub("-", module).lower()
    version = _version(name) or _version_of_module(module.replace("-", "_").lower())
    if version is not None:
        found[name] = version
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _version_of_module(module: str) -> str | None:
    """Of a package whose own name is another one."""
    owners = metadata.packages_distributions().get(module, [])
    return _version(owners[0]) if owners else None
