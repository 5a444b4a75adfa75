"""The policy trainer: `primerl trainer`.

    publish v0                           (or, from a checkpoint of step c: publish v(c) and go on with step c + 1)
    for step k in 1..max_steps:
        batch k from the orchestrator        (waits; the orchestrator decides what is in it)
        forward and backward, micro-batch by micro-batch; gradients summed over the data ranks
        clip, AdamW                          policy v(k-1) becomes v(k)
        publish v(k)
        save a checkpoint                (every `ckpt.interval` steps)
    save the last policy as a model folder

The trainer waits for two things only: the batch, with a deadline, and the other ranks, with a deadline. A heartbeat
thread tells the orchestrator which of these it is at.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from primerl.startup import importing
from primerl.train.checkpoint import CheckpointError, Checkpoints, TrainerState, save_checkpoint
from primerl.train.client import BatchTimeout, Heartbeat, NoMoreBatches, OrchestratorClient, OrchestratorError
from primerl.train.config import ConfigError, TrainerConfig
from primerl.train.data import Batch, BatchError, MicroBatch, decode_batch
from primerl.train.distributed import Ranks
from primerl.train.loss import LossStatistics, policy_loss, token_logprobs
from primerl.train.metrics import Clock, MetricsWriter, console_line, log_to_stdout
from primerl.train.model import ModelError, PackedSequences, load_model, predicted_logits
from primerl.train.optim import Optimizer
from primerl.train.stop import Stopped, stop_on_signals
from primerl.train.weights import WeightsPublisher

log = logging.getLogger(__name__)

SHOWN = {
    "reward/all/mean": "reward",
    "loss/mean": "loss",
    "entropy/all/mean": "entropy",
    "mismatch_kl/all/mean": "mismatch_kl",
    "masked/all/mean": "masked",
    "staleness/all/mean": "staleness",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
    "time/step": "s",
    "time/wait_for_batch": "waited",
    "perf/throughput": "tokens/s",
}
"""Metrics of the console line, with their short names."""


class TrainingDiverged(Exception):  # noqa: N818 (what happened)
    """Loss, gradient or weights are not finite. The message names the step and, where they matter, the rollouts."""


def main(values: dict[str, Any]) -> int:
    """Train by the settings in `values` (see `config.TrainerConfig`). Returns the exit code:
    0 trained, 1 failed (the reason is logged), 2 bad settings or model folder, 128 + n stopped by signal n."""
    try:
        config = TrainerConfig.from_dict(values)
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
    except (OrchestratorError, BatchTimeout, BatchError, TrainingDiverged, CheckpointError) as error:
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
    ranks = Ranks.join(config.batch_timeout_s)
    heartbeat = Heartbeat(config.orchestrator_url, active=ranks.leads)
    try:
        heartbeat.doing(0, "loading the model")
        with importing():
            model = load_model(config.model.path, config.dtype, ranks.device)
        optimizer = Optimizer(model.parameters(), config.optim, config.max_steps)
        publisher = WeightsPublisher(output_dir, config.weights.keep_last, config.weights.keep_all)
        checkpoints = Checkpoints(output_dir, config.ckpt.keep_last, config.ckpt.keep_interval)
        trainer = Trainer(config, ranks, client, heartbeat, model, optimizer, publisher, checkpoints)
        began_after = trainer.restore()
        with MetricsWriter(output_dir, after=began_after) if ranks.leads else nullcontext() as writer:
            steps = trainer.run(writer, began_after)
        if ranks.leads:
            heartbeat.doing(steps, "saving the checkpoint")
            log.info("saved %s", save_checkpoint(model, Path(config.model.path), output_dir, steps))
        heartbeat.leave()
    finally:
        heartbeat.close()
        ranks.leave()


class Trainer:
    """The loop over steps, and the parts it is made of."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        client: OrchestratorClient,
        heartbeat: Heartbeat,
        model: Any,
        optimizer: Optimizer,
        publisher: WeightsPublisher,
        checkpoints: Checkpoints,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.client = client
        self.heartbeat = heartbeat
        self.model = model
        self.optimizer = optimizer
        self.publisher = publisher
        self.checkpoints = checkpoints
        self.tokens_seen = 0
        self.samples_seen = 0

    def restore(self) -> int:
        """Take up the newest checkpoint; returns its step, 0 where there is none. Raises CheckpointError."""
        state = self.checkpoints.newest()
        if state is None:
            return 0
        self.model.load_state_dict(state.model)
        self.optimizer.load(state.optimizer)
        self.tokens_seen, self.samples_seen = state.tokens_seen, state.samples_seen
        log.info("going on from the checkpoint of step %d", state.step)
        return state.step

    def run(self, writer: MetricsWriter | None, began_after: int = 0) -> int:
        """Train from the step after `began_after` until `max_steps`, or until there are no more batches.

        Returns:
            The last step that was trained.
        """
        if self.ranks.leads:
            self.client.resume(began_after)
        self.publish(began_after)
        clock = Clock()
        for step in range(began_after + 1, self.config.max_steps + 1):
            try:
                batch = self.receive(step)
            except NoMoreBatches as end:
                log.info("no more batches after step %d: %s", step - 1, end)
                return step - 1
            clock.lap("wait_for_batch")
            self.heartbeat.doing(step, "forward and backward")
            statistics = self.forward_backward(batch)
            clock.lap("forward_backward")
            norm, lr = self.update(batch)
            clock.lap("optimizer")
            self.publish(step)
            clock.lap("broadcast")
            metrics = self.measure(batch, statistics, clock.step())
            metrics |= {"optim/grad_norm": norm, "optim/lr": lr}
            if writer is not None:
                writer.write(step, metrics)
                log.info("%s", console_line(step, self.config.max_steps, metrics, SHOWN))
            # What it covers is complete, its line of metrics too.
            self.save(step)
            clock.lap("checkpoint")
        return self.config.max_steps

    def receive(self, step: int) -> Batch:
        def waiting(reason: str) -> None:
            log.debug("waiting for batch %d: %s", step, reason)
            self.heartbeat.doing(step, f"waiting for the batch: {reason}")

        self.heartbeat.doing(step, "waiting for the batch")
        body = self.client.batch(step, self.ranks.rank, self.config.batch_timeout_s, waiting)
        batch = decode_batch(body)
        asked = (step, self.ranks.rank, self.ranks.size)
        if (batch.step, batch.rank, batch.ranks) != asked:
            raise BatchError(
                f"asked for step, rank, ranks {asked}, got {(batch.step, batch.rank, batch.ranks)}; "
                "the orchestrator's data_ranks must be the number of trainer processes"
            )
        return batch

    def forward_backward(self, batch: Batch) -> LossStatistics:
        """Accumulate the gradients of this rank's micro-batches, then sum them over the ranks."""
        statistics = LossStatistics.zero(self.ranks.device)
        for micro_batch in batch.micro_batches:
            targets = micro_batch.trained()
            if not targets.numel():
                continue  # the other ranks have one micro-batch more
            loss, measured = micro_batch_loss(self.model, micro_batch, targets, self.config, self.ranks.device)
            if not bool(loss.isfinite()):
                raise TrainingDiverged(f"step {batch.step}: the loss is {loss.item()}; {_rollouts([micro_batch])}")
            (loss / batch.loss_tokens).backward()  # type: ignore[no-untyped-call]
            statistics += measured
        self.heartbeat.doing(batch.step, "summing gradients over the data ranks")
        self.ranks.sum_gradients(self.optimizer.parameters)
        return LossStatistics(self.ranks.sum(statistics.values))

    def update(self, batch: Batch) -> tuple[float, float]:
        self.heartbeat.doing(batch.step, "optimizer")
        norm, lr = self.optimizer.step(batch.step)
        if not norm < float("inf"):
            raise TrainingDiverged(
                f"step {batch.step}: the norm of the gradient is {norm}; {_rollouts(list(batch.micro_batches))}"
            )
        # A finite gradient makes weights that are not when the step is too long.
        if not self.optimizer.has_finite_parameters():
            raise TrainingDiverged(
                f"step {batch.step}: the weights are not finite after the optimizer's step (learning rate {lr:g}, norm "
                f"of the gradient {norm:g}), and were not published; lower trainer.optim.lr. The same command goes on "
                "from the last checkpoint"
            )
        return norm, lr

    def publish(self, version: int) -> None:
        if not self.ranks.leads:
            return
        self.heartbeat.doing(version, f"publishing the weights of policy {version}")
        manifest = self.publisher.publish(self.model, version)
        self.client.weights(version, str(manifest.resolve()))

    def save(self, step: int) -> None:
        interval = self.config.ckpt.interval
        due = interval is not None and (step % interval == 0 or step == self.config.max_steps)
        if not (due and self.ranks.leads):
            return
        self.heartbeat.doing(step, "saving a checkpoint")
        state = TrainerState(step, self.model.state_dict(), self.optimizer.state(), self.tokens_seen, self.samples_seen)
        self.checkpoints.save(state)
        self.client.checkpoint(step)

    def measure(self, batch: Batch, statistics: LossStatistics, times: dict[str, float]) -> dict[str, float]:
        """Metrics of the step over all ranks; those of the orchestrator come with the batch."""
        staleness = batch.staleness()
        tokens = sum(sum(micro_batch.sequence_lengths) for micro_batch in batch.micro_batches)
        counts = torch.tensor([tokens, len(staleness), sum(staleness)], dtype=torch.float64, device=self.ranks.device)
        tokens, samples, stale = self.ranks.sum(counts).tolist()
        self.tokens_seen += int(tokens)
        self.samples_seen += int(samples)
        return {
            **batch.metrics,
            **statistics.means(),
            **times,
            "staleness/all/mean": stale / max(samples, 1.0),
            "perf/throughput": tokens / times["time/step"],
            "progress/num_tokens": self.tokens_seen,
            "progress/num_samples": self.samples_seen,
        }


def micro_batch_loss(
    model: Any, micro_batch: MicroBatch, targets: torch.Tensor, config: TrainerConfig, device: torch.device
) -> tuple[torch.Tensor, LossStatistics]:
    """Summed loss of the micro-batch's trained tokens, at packed indices `targets`."""
    packed = PackedSequences.from_lengths(micro_batch.sequence_lengths, device)
    token_ids = micro_batch.token_ids.long().to(device)
    logits = predicted_logits(model, token_ids, packed, targets.to(device))
    columns = (micro_batch.logprobs, micro_batch.advantages, micro_batch.temperatures)
    engine_logprobs, advantages, temperatures = (column[targets].to(device) for column in columns)
    truncation = None if micro_batch.truncation is None else micro_batch.truncation[targets].to(device)
    logprobs, entropy = token_logprobs(logits, token_ids[targets.to(device)], temperatures, truncation)
    return policy_loss(logprobs, engine_logprobs, advantages, entropy, config.loss)


def _rollouts(micro_batches: list[MicroBatch]) -> str:
    rollouts = sorted({rollout for micro_batch in micro_batches for rollout in micro_batch.rollouts})
    listed = ", ".join(map(str, rollouts[:32]))
    return f"rollouts {listed}" + (f" and {len(rollouts) - 32} more" if len(rollouts) > 32 else "")
