"""Bindings of the Rust crates: conversions only."""

__version__: str
