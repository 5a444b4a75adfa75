"""What an env worker counts, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primerl.net.prometheus import Exposition

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Meter:
    """Counts nothing if there is no port."""

    def __init__(self, port: int | None, cores: int) -> None:
        """`cores`: that the worker may run on. Raises [`PortTakenError`][primerl.net.prometheus.PortTakenError]."""
        self._exposition: Exposition | None = None
        if port is None:
            return
        self._exposition = Exposition(port)
        from prometheus_client import Counter, Gauge, Histogram

        registry = self._exposition.registry
        bound: Gauge = Gauge("primerl_env_worker_cores", "Cores that the worker may run on", registry=registry)
        bound.set(cores)
        self._running: Gauge = Gauge("primerl_env_worker_running", "Rollouts that run now", registry=registry)
        self._ended: Counter = Counter(
            "primerl_env_worker_rollouts", "Rollouts that ended, by how", ["outcome"], registry=registry
        )
        self._seconds: Histogram = Histogram(
            "primerl_env_worker_rollout_seconds", "From lease to end", registry=registry, buckets=SECONDS
        )
        self._calls: Counter = Counter(
            "primerl_env_worker_model_calls", "Answers of the model, by HTTP status", ["status"], registry=registry
        )

    @property
    def url(self) -> str | None:
        return None if self._exposition is None else self._exposition.url

    def began(self) -> None:
        if self._exposition is not None:
            self._running.inc()

    def ended(self, outcome: str, seconds: float) -> None:
        """`outcome`: `ok`, the kind of the error, or `cancelled`."""
        if self._exposition is not None:
            self._running.dec()
            self._ended.labels(outcome).inc()
            self._seconds.observe(seconds)

    def answered(self, status: str) -> None:
        if self._exposition is not None:
            self._calls.labels(status).inc()

    def close(self) -> None:
        if self._exposition is not None:
            self._exposition.close()
