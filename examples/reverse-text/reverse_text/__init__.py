"""Reverse a short string and put the answer between tags: `Reverse: abcd` -> `<r>dcba</r>`.

The reward has two parts to learn, one after the other: the tags (without them it is 0), then the whole string.
"""

from typing import Any

__all__ = ["ReverseTaskset"]


def __getattr__(name: str) -> Any:
    # Loaded when verifiers asks for it: the data generator needs the strings only, and starts in no time.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reverse_text import taskset

    return getattr(taskset, name)
