"""Keep a growing set of letters sorted, over two or three turns with a scripted user.

    user: Sort: dba        assistant: abd
    user: Add: zc          assistant: abcdz

Every turn needs the earlier ones, so the conversation has to be extended exactly.
"""

from typing import Any

__all__ = ["SortEnv", "SortTaskset"]


def __getattr__(name: str) -> Any:
    # Loaded when verifiers asks for it: the data generator needs the letters only, and starts in no time.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sort_letters import environment

    return getattr(environment, name)
