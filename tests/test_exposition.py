"""Prometheus's `/metrics` of trainer and env workers."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest
from primerl.config.errors.fail import ConfigError as LoadError
from primerl.config.schema.environment import TrainEnvironment
from primerl.envs.meter import Meter
from primerl.envs.settings import WorkerConfig
from primerl.net.prometheus import PortTakenError
from primerl.train.loop.metrics import EXPOSITION_FILE, ExposedMetrics, MetricsWriter
from primerl.train.settings import TrainerConfig
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from settings_helpers import filled, refusal


def samples(url: str) -> dict[tuple[str, str], float]:
    """By name and the label's value."""
    text = httpx.get(url, timeout=60).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_trainer_exposes_the_last_line_of_its_metrics(tmp_path: Path) -> None:
    exposed = ExposedMetrics(0, tmp_path)
    try:
        with MetricsWriter(tmp_path, also=exposed.write) as writer:
            writer.write(1, {"loss/mean": 0.5, "reward/all/mean": 0.25})
            writer.write(2, {"loss/mean": float("nan")})
        url = json.loads((tmp_path / EXPOSITION_FILE).read_text())["url"]
        assert url == exposed.url
        found = samples(url)
        assert found["primerl_trainer_step", ""] == 2
        assert found["primerl_trainer", "loss/mean"] != found["primerl_trainer", "loss/mean"]
        assert ("primerl_trainer", "reward/all/mean") not in found, "it was not measured at step 2"
        assert found["process_cpu_seconds_total", ""] > 0
    finally:
        exposed.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_an_env_worker_counts_how_rollouts_end() -> None:
    meter = Meter(0, cores=3)
    try:
        assert meter.url is not None
        for _ in range(3):
            meter.began()
        meter.ended("ok", 0.2)
        meter.ended("timeout", 5.0)
        meter.answered("200")
        found = samples(meter.url)
        assert found["primerl_env_worker_cores", ""] == 3
        assert found["primerl_env_worker_running", ""] == 1
        assert found["primerl_env_worker_rollouts_total", "ok"] == 1
        assert found["primerl_env_worker_rollouts_total", "timeout"] == 1
        assert found["primerl_env_worker_model_calls_total", "200"] == 1
        assert found["primerl_env_worker_rollout_seconds_count", ""] == 2
    finally:
        meter.close()
    off = Meter(None, cores=1)
    off.began()
    off.ended("ok", 1.0)
    off.close()
    assert off.url is None


def test_a_port_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"metrics_port is {port}.*0 for any free one"):
            ExposedMetrics(port, tmp_path)
        with pytest.raises(PortTakenError, match=f"metrics_port is {port}"):
            Meter(port, cores=1)
    worker = {"orchestrator_url": "http://x", "environment": "e", "id": "e"}
    trainer = {"output_dir": "o", "orchestrator_url": "http://x", "max_steps": 1, "model": {"path": "m"}}
    assert filled(WorkerConfig, **worker).metrics_port is None
    assert filled(TrainerConfig, **trainer, metrics_port=0).metrics_port == 0
    for bad in (65536, -1):
        assert "metrics_port: Input should be" in refusal(WorkerConfig, {**worker, "metrics_port": bad})
        assert "metrics_port: Input should be" in refusal(TrainerConfig, {**trainer, "metrics_port": bad})


def test_each_worker_of_an_environment_has_a_port_of_its_own() -> None:
    from primerl.config.process_files.resolve import port_of

    assert [port_of(9000, index) for index in range(3)] == [9000, 9001, 9002]
    assert (port_of(0, 2), port_of(None, 2)) == (0, None)
    with pytest.raises((ValidationError, LoadError), match="would have port 65537"):
        TrainEnvironment.model_validate({"id": "e", "num_workers": 3, "metrics_port": 65535})
