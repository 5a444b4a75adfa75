"""The policy trainer (`primerl trainer`): builds its parts and runs them. `policy_trainer` has the loop over steps."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from primerl.process.imports import importing
from primerl.run_key import learn
from primerl.train.adapters.lora import new_publisher
from primerl.train.checkpoint.state import CheckpointError, Checkpoints
from primerl.train.checkpoint.step_folders import SavingError
from primerl.train.data.batch import BatchError
from primerl.train.distributed.ranks import RankError, Ranks, keep_to
from primerl.train.loop.batches import Batches
from primerl.train.loop.client import BatchTimeout, Heartbeat, OrchestratorClient, OrchestratorError, begin
from primerl.train.loop.metrics import MetricsWriter, log_to_stdout
from primerl.train.loop.policy_trainer import Trainer
from primerl.train.loop.progress import taking
from primerl.train.loop.stop import Stopped, TrainingDiverged, stop_on_signals
from primerl.train.model.loading import load, make_ready, together
from primerl.train.model.packed_model import ModelError, checked_folder, dtype_on
from primerl.train.objective.components import Loss, LossError
from primerl.train.optim import Optimizer
from primerl.train.settings import NO_CHECKPOINTS, ConfigError, TrainerConfig
from primerl.train.weights.broadcast import BroadcastError, Broadcasts

if TYPE_CHECKING:
    from primerl.train.loop.metrics import ExposedMetrics

log = logging.getLogger(__name__)


def main(config: TrainerConfig) -> int:
    """Trains. Returns the exit code:
    0 trained, 1 failed (the reason is logged), 2 bad settings or model folder, 128 + n stopped by signal n."""
    try:
        # For a trainer that the launcher did not start.
        learn(config.orchestrator_url, config.output_dir)
        client = OrchestratorClient(config.orchestrator_url, config.orchestrator_timeout_s)
    except ValueError as error:
        print(f"primerl trainer: {error}", file=sys.stderr)
        return 2
    log_to_stdout(config.log.level)
    try:
        with stop_on_signals():
            train(config, client)
    except Stopped as stopped:
        log.info("stopped by %s", stopped)
        return stopped.exit_code
    except (ConfigError, ModelError) as error:
        log.error("%s", error)
        return 2
    except SavingError as error:
        log.error("%s. Make room there, or make it writable; the same command resumes from the last checkpoint", error)
        return 1
    except (
        OrchestratorError,
        BroadcastError,
        BatchTimeout,
        BatchError,
        LossError,
        TrainingDiverged,
        CheckpointError,
        RankError,
    ) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    finally:
        client.close()
    return 0


def train(config: TrainerConfig, client: OrchestratorClient) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    output_dir = Path(config.output_dir)
    loss = Loss(config.loss)
    folder = checked_folder(config.model.path)
    ranks = Ranks.join(config.ranks, config.dp_replicate, config.dist_timeout_s)
    keep_to(config.gpu_share, ranks.device)
    with ranks.naming_the_missing():
        identity = begin(ranks, client)
    heartbeat = Heartbeat(config.orchestrator_url, active=ranks.leads, identity=identity)
    try:
        with ranks.naming_the_missing():
            heartbeat.doing(0, "loading the model")
            dtype = dtype_on(ranks.device, config.dtype)
            log.info("the model computes in %s on %s", dtype, ranks.device)
            with importing(), taking("loading the model"):
                trusts, whole = config.model.trust_remote_code, config.model.lora is not None
                model = together(ranks, lambda: load(folder, dtype, ranks, trusts, whole=whole))
            adapter, performance, shares = make_ready(model, config, config.model.lora, folder, config.seed, ranks)
            optimizer = Optimizer(model.named_parameters(), config.optim, config.max_steps, ranks)
            telling = OrchestratorClient(config.orchestrator_url, config.orchestrator_timeout_s, identity=identity)
            broadcasts = Broadcasts(new_publisher(config, adapter, ranks), telling, heartbeat.background, ranks)
            batches = Batches(client, ranks.rank, ranks.size)
            ckpt = config.ckpt or NO_CHECKPOINTS
            also_keep = output_dir / "weights" if config.ckpt else None
            kept = (ckpt.keep_last, ckpt.keep_interval)
            checkpoints = Checkpoints(output_dir, *kept, ranks, also_keep=also_keep, with_orchestrator=True)
            parts = (model, adapter, performance, shares, loss, optimizer, batches, broadcasts, checkpoints)
            trainer = Trainer(config, ranks, client, heartbeat, *parts)
            began_after = trainer.restore()
            with (
                closing(broadcasts),
                closing(batches),
                closing(checkpoints),
                exposed(config, ranks) as exposition,
            ):
                clock = trainer.begin(began_after)
                with (
                    metrics_writer(output_dir, began_after, exposition) if ranks.leads else nullcontext() as writer,
                    distributions_writer(config, ranks, began_after) as distributions,
                ):
                    steps = trainer.run(clock, writer, began_after, distributions)
            trainer.save_weights(steps)
        heartbeat.leave()
    finally:
        heartbeat.close()
        ranks.leave()


def distributions_writer(
    config: TrainerConfig, ranks: Ranks, after: int
) -> AbstractContextManager[MetricsWriter | None]:
    """A writer if some step has distributions."""
    if config.distributions_interval is None or not ranks.leads:
        return nullcontext()
    return MetricsWriter(Path(config.output_dir), after=after, name="distributions.jsonl")


def exposed(config: TrainerConfig, ranks: Ranks) -> AbstractContextManager[ExposedMetrics | None]:
    """Prometheus's `/metrics`, if it is enabled. Raises ConfigError if the port is taken."""
    if config.metrics_port is None or not ranks.leads:
        return nullcontext()
    from primerl.net.prometheus import PortTakenError
    from primerl.train.loop.metrics import ExposedMetrics

    try:
        return closing(ExposedMetrics(config.metrics_port, Path(config.output_dir)))
    except PortTakenError as error:
        raise ConfigError(str(error)) from None


def metrics_writer(output_dir: Path, after: int, exposition: ExposedMetrics | None) -> MetricsWriter:
    return MetricsWriter(output_dir, after=after, also=None if exposition is None else exposition.write)
