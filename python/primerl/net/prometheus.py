"""Prometheus's `/metrics` of a Python process, on a port of this machine. Standard library and prometheus_client, which
is imported only where there is a port."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PATH = "/metrics"


class PortTakenError(ValueError):
    """The message names the setting."""


class Exposition:
    """Serves what is registered in `registry`, and the process's own CPU time and memory, from a thread."""

    def __init__(self, port: int) -> None:
        """`port` 0 is any free one. Only this machine is answered: no key is asked for. Raises PortTakenError."""
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        self.registry: CollectorRegistry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        try:
            self._server, self._thread = start_http_server(port, HOST, self.registry)
        except OSError as error:
            raise PortTakenError(
                f"metrics_port is {port}: it cannot be bound ({error}); choose another, or 0 for any free one"
            ) from None
        self.url = f"http://{HOST}:{self._server.server_port}{PATH}"
        log.info("Prometheus metrics at %s", self.url)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
