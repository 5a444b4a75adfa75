"""The short form that Hosted Training users know, and what it becomes (docs/hosted.md)."""

from primerl.config.hosted.compile import compile_hosted
from primerl.config.hosted.schema import HostedConfig

__all__ = ["HostedConfig", "compile_hosted"]
