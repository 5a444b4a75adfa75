"""Hashes and digests that identify tensors anywhere (docs/architecture.md, "Weights"). No torch: files are read
before it is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

DIGEST_BYTES = 16
"""Bytes of a digest, which is written in hex."""


def hash_of(data: bytes | bytearray | memoryview) -> str:
    """XXH3-64 of a tensor's raw little-endian bytes, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def digest_of(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """XXH3-128 of the name, dtype (safetensors' word), shape and hash of each, whatever their order; 32 hex digits."""
    lines = [f"{name} {dtype} {'x'.join(map(str, shape))} {xxh3}\n" for name, dtype, shape, xxh3 in sorted(tensors)]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())
