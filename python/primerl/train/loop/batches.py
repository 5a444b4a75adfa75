"""Fetches a data rank's batches from the orchestrator.

While a step is trained, a thread asks for the next batch. If the orchestrator has it by then, it is fetched and decoded
in the background, and the trainer waits only for batches that are not cut yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from primerl.train.data.batch import Batch, BatchError, decode_batch
from primerl.train.loop.client import OrchestratorClient

_ASK_AHEAD_S = 10.0
"""Deadline of a background request, which the orchestrator answers at once."""


@dataclass(frozen=True, slots=True)
class Received:
    batch: Batch
    body: bytes | bytearray
    """The bytes as received, which the batch's tensors are views of."""


class Batches:
    """To be used by one thread. The background thread has a client of its own."""

    def __init__(self, client: OrchestratorClient, rank: int, ranks: int) -> None:
        self._client = client
        self._background = OrchestratorClient(
            client.url, client.unreachable_after_s, _ASK_AHEAD_S, identity=client.identity
        )
        self._asked = (rank, ranks)
        self._ahead: Future[Received | None] | None = None

    def ask_ahead(self, step: int) -> None:
        """Fetch the batch of `step`, which is taken next, in the background if the orchestrator has it already."""
        found: Future[Received | None] = Future()
        self._ahead = found
        # A daemon: an orchestrator that hangs must not delay the end of the process.
        threading.Thread(target=self._fetch, args=(step, found), name="batch ahead", daemon=True).start()

    def take(self, step: int, deadline_s: float, waiting: Callable[[str], None]) -> Received:
        """The batch of `step`; see `OrchestratorClient.batch` for arguments and errors.

        Raises:
            BatchError: it cannot be decoded, or is not the one that was requested.
        """
        ahead, self._ahead = self._ahead, None
        received = None if ahead is None else ahead.result()
        if received is not None:
            return received
        return self._decoded(step, self._client.batch(step, self._asked[0], deadline_s, waiting))

    def close(self) -> None:
        self._background.leave()
        if self._ahead is None or self._ahead.done():
            self._background.close()

    def _fetch(self, step: int, found: Future[Received | None]) -> None:
        try:
            body = self._background.batch_ahead(step, self._asked[0])
            found.set_result(None if body is None else self._decoded(step, body))
        except Exception as error:  # noqa: BLE001 (raised where the batch is taken)
            found.set_exception(error)
        if self._background.is_leaving:
            self._background.close()

    def _decoded(self, step: int, body: bytes | bytearray) -> Received:
        batch = decode_batch(body)
        rank, ranks = self._asked
        if (batch.step, batch.rank, batch.ranks) != (step, rank, ranks):
            raise BatchError(
                f"asked for step, rank, ranks {(step, rank, ranks)}, got {(batch.step, batch.rank, batch.ranks)}; "
                "the orchestrator's data_ranks must be the trainer's ranks"
            )
        return Received(batch, body)
