"""Keys of services, which requests carry as headers."""

from __future__ import annotations


def usable(key: str | None, source: str) -> str | None:
    """Without what a file or a shell has put around it, a newline say; None where nothing is left.

    Raises ValueError, which names `source` and not the key: what HTTP libraries raise would have it in it.
    """
    stripped = (key or "").strip()
    if not all("!" <= character <= "~" for character in stripped):
        raise ValueError(
            f"the key in {source} is no key: a blank or a character that is not ASCII is in it; copy it again"
        )
    return stripped or None
