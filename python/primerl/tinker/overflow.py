"""Whether weights that engines failed with overflow: the trainer computes that once, not for each failed request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger("primerl.tinker")


class Overflows:
    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Task[bool]] = {}
        """By the key of the weights."""

    async def known(self, key: str, origin: str, is_finite: Callable[[], Awaitable[bool]]) -> bool:
        """Whether the weights are known to overflow. `is_finite` is called for the first request alone. `origin`: what
        they are of, for the log."""

        async def asked() -> bool:
            try:
                return not await is_finite()
            except Exception as error:  # noqa: BLE001 (the engine's own error is reported then)
                log.warning("whether the weights of %s overflow is not known: %s", origin, error)
                return False

        if key not in self._asked:
            self._asked[key] = asyncio.create_task(asked())
        # One request that is cancelled leaves it to the others.
        return await asyncio.shield(self._asked[key])

    def keep(self, keys: Iterable[str]) -> None:
        """Forgets all other weights."""
        kept = set(keys)
        self._asked = {key: asked for key, asked in self._asked.items() if key in kept}
