"""Where a data rank's batches come from.

While a step is trained, a thread asks for the next batch: what is there by then is fetched and decoded beside the step,
and the trainer waits for what is not there only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from primerl.train.client import OrchestratorClient
from primerl.train.data import Batch, BatchError, decode_batch

log = logging.getLogger(__name__)

_ASK_AHEAD_S = 10.0
"""The orchestrator answers such a request at once."""


@dataclass(frozen=True, slots=True)
class Received:
    batch: Batch
    body: bytes | bytearray
    """As it came: the batch's tensors lie in it."""


class Batches:
    """Not for several threads. `client` is used by the caller's thread only."""

    def __init__(self, client: OrchestratorClient, rank: int, ranks: int) -> None:
        self._client = client
        self._beside = OrchestratorClient(
            client.url, client.unreachable_after_s, _ASK_AHEAD_S, identity=client.identity
        )
        self._asked = (rank, ranks)
        self._ahead: Future[Received | None] | None = None

    def ask_ahead(self, step: int) -> None:
        """Fetch the batch of `step`, which is taken next, beside what the caller does now, should it be there."""
        found: Future[Received | None] = Future()
        self._ahead = found
        # A thread that is not waited for at the end of the process: an orchestrator that hangs would hold it up.
        threading.Thread(target=self._fetch, args=(step, found), name="batch ahead", daemon=True).start()

    def take(self, step: int, deadline_s: float, waiting: Callable[[str], None]) -> Received:
        """The batch of `step`; see `OrchestratorClient.batch` for arguments and errors.

        Raises:
            BatchError: it is no batch, or not the one that was asked for.
        """
        ahead, self._ahead = self._ahead, None
        received = None if ahead is None else ahead.result()
        if received is not None:
            return received
        return self._decoded(step, self._client.batch(step, self._asked[0], deadline_s, waiting))

    def close(self) -> None:
        self._beside.leave()
        if self._ahead is None or self._ahead.done():
            self._beside.close()

    def _fetch(self, step: int, found: Future[Received | None]) -> None:
        try:
            body = self._beside.batch_ahead(step, self._asked[0])
            found.set_result(None if body is None else self._decoded(step, body))
        except Exception as error:  # noqa: BLE001 (whatever it is, the caller is told)
            found.set_exception(error)
        if self._beside.is_leaving:
            self._beside.close()

    def _decoded(self, step: int, body: bytes | bytearray) -> Received:
        batch = decode_batch(body)
        rank, ranks = self._asked
        if (batch.step, batch.rank, batch.ranks) != (step, rank, ranks):
            raise BatchError(
                f"asked for step, rank, ranks {(step, rank, ranks)}, got {(batch.step, batch.rank, batch.ranks)}; "
                "the orchestrator's data_ranks must be the trainer's ranks"
            )
        return Received(batch, body)
