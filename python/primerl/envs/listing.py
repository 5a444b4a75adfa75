"""What all workers of an environment must have in common: the examples, and the code that makes and scores them.

Workers are leased numbers of examples, so two that list others would train on something else under one name. The
orchestrator compares each worker with the first one, and refuses one that differs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from primerl.envs import versions
from primerl.envs.interface import sendable

# A key is a hash of the whole example: of more than so many, evenly spaced ones are looked at.
MOST_KEYS = 1024
# The keys of so many are sent, by which the same example is found in other runs, whatever the order is that their seeds
# make: 64 kB of the request by which a worker registers.
MOST_PAIRED = 4096
# The address in an object's default repr, which differs from process to process.
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def listing_of(environment_id: str, examples: Sequence[Any], key: Callable[[Any], str]) -> dict[str, Any]:
    """`Listing` of the wire: digest, first, last, packages, and keys.

    Args:
        examples: At least one, in the worker's order.
        key: Of an example, the same in every process.
    """
    first = range(min(len(examples), MOST_PAIRED))
    known = {index: sendable(key(examples[index])) for index in sorted({*looked_at(len(examples)), *first})}
    keys = [known[index] for index in looked_at(len(examples))]
    digest = hashlib.sha256(f"{len(examples)}\n".encode())
    for one in keys:
        digest.update(one.encode() + b"\n")
    return {
        "digest": digest.hexdigest(),
        "first": keys[0],
        "last": keys[-1],
        "packages": packages_of(environment_id),
        "keys": [short(known[index]) for index in first],
    }


def short(key: str) -> str:
    """64 bits of it, which is enough to tell a few thousand apart."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def comparable(value: Any) -> Any:
    """What of an example's data is the same in every process, as JSON has it: of an object that is no such data, such
    as an image or a lock, only the name of its type, and of its text all but the address; a set in order."""
    if isinstance(value, str):
        return without_addresses(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_name(name): comparable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((comparable(one) for one in value), key=lambda one: json.dumps(one, sort_keys=True))
    if isinstance(value, Iterator):  # iterating consumes it
        return type(value).__qualname__
    try:
        return comparable(to_jsonable_python(value, bytes_mode="base64"))
    except (PydanticSerializationError, ValueError):
        return type(value).__qualname__


def without_addresses(text: str) -> str:
    return _ADDRESS.sub("at 0x", text)


def _name(key: Any) -> str:
    """A key of a mapping, as text: names of several types have no order."""
    plain = comparable(key)
    return plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True)


def looked_at(count: int, most: int = MOST_KEYS) -> list[int]:
    """Numbers of the examples whose keys are compared: all, or evenly spaced ones with the first and the last."""
    if count <= most:
        return list(range(count))
    return [index * (count - 1) // (most - 1) for index in range(most)]


def packages_of(environment_id: str) -> dict[str, str]:
    """Versions of verifiers and of the environment's package, where it is installed as one."""
    found = {"verifiers": metadata.version("verifiers")}
    version = versions.installed(environment_id)
    if version is not None:
        found[versions.package(environment_id)] = version
    return found
