"""The policy trainer's loop over steps.

    publish v0                           (or, from a checkpoint of step c: publish v(c) and resume with step c + 1)
    for step k in 1..max_steps:
        batch k from the orchestrator        (waits; the orchestrator decides what is in it)
        forward and backward, micro-batch by micro-batch; gradients summed over the data ranks
        ask for batch k + 1              (a thread fetches it if it is ready)
        clip, update                         policy v(k-1) becomes v(k)
        start publishing v(k)            (a thread hashes and writes it; v(k-1) is published by then)
        save a model folder, and start saving a checkpoint       (every `ckpt.interval` steps; a thread writes it)
        write the line of metrics        (the checkpoint is complete after it)
    save the last policy as a model folder

The trainer waits for the batch, for the other ranks, and, where writing takes longer than a step, for its own threads,
each with a deadline. A heartbeat thread reports to the orchestrator which of these it is doing.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from primerl.train.adapters.lora import Adapter, check_facts
from primerl.train.checkpoint import on_request
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.checkpoint.state import CheckpointError, Checkpoints, TrainerState
from primerl.train.checkpoint.step_folders import keep_newest, saving, set_aside_later
from primerl.train.data.batch import Batch, MicroBatch, check_ids
from primerl.train.data.without_trees import without_trees
from primerl.train.distributed.fsdp import nothing, packed_logprobs, sum_gradients_after
from primerl.train.distributed.ranks import Ranks
from primerl.train.loop.batches import Batches, Received
from primerl.train.loop.client import Heartbeat, NoMoreBatches, OrchestratorClient, PublishAgain
from primerl.train.loop.metrics import OF_EVERY_STEP, SHOWN, Clock, MetricsWriter, console_line
from primerl.train.loop.progress import Remaining, taking
from primerl.train.loop.statistics import Groups, Histograms, Statistics, Trained, counted
from primerl.train.loop.stop import TrainingDiverged, keep_batch, listed
from primerl.train.model.flops import Performance
from primerl.train.model.packed_model import PackedSequences
from primerl.train.model.prefixes import worth_sharing
from primerl.train.model.router_replay import RouterReplay
from primerl.train.model.routing import RoutingLoad
from primerl.train.objective.components import MOST_LOG_RATIO, Loss, Targets, TokenValues
from primerl.train.objective.grammar import Replay, leaving_out
from primerl.train.objective.truncation import replaying
from primerl.train.optim import Optimizer, Update
from primerl.train.settings import NO_CHECKPOINTS, TrainerConfig
from primerl.train.weights.broadcast import BroadcastError, Broadcasts

log = logging.getLogger(__name__)
# A batch that takes longer is logged, once: if a run does not begin, the trainer's log says why.
TOLD_AFTER_S = 5.0

IS_THERE, IS_OVER, IS_ASKED = 0.0, 1.0, 2.0
"""Outcomes of asking for a batch; the largest of all ranks' counts."""


class Trainer:
    """The loop over steps, and the parts it is made of."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        client: OrchestratorClient,
        heartbeat: Heartbeat,
        model: Any,
        adapter: Adapter | None,
        performance: Performance,
        shares: bool,
        loss: Loss,
        optimizer: Optimizer,
        batches: Batches,
        broadcasts: Broadcasts,
        checkpoints: Checkpoints,
    ) -> None:
        self.config = config
        self.ckpt = config.ckpt or NO_CHECKPOINTS
        self.ranks = ranks
        self.client = client
        self.heartbeat = heartbeat
        self.model = model
        self.adapter = adapter
        self.loss = loss
        self.routing = RoutingLoad(model)
        self.replay = RouterReplay(model) if config.enable_router_replay else None
        self.performance = performance
        self.shares = shares  # tokens that samples share are computed once
        self.optimizer = optimizer
        self.batches = batches
        self.broadcasts = broadcasts
        self.checkpoints = checkpoints
        self.trained = Trained()
        self.grammars = Replay(Path(config.model.path))
        self.weights_saved: int | None = None  # step of the last model folder
        self.published_again: int | None = None  # version
        self.has_told_of_waiting = False
        self.histograms: Histograms | None = None  # of the current step, if it has any

    def restore(self) -> int:
        """Resume from the named checkpoint or the newest one; returns its step, 0 if there is none.

        Raises:
            CheckpointError: it does not exist, cannot be read, or belongs to another model.
            OrchestratorError: the batches after it are gone. Nothing has been changed.
        """
        step = self.ckpt.goes_back_to
        state = self.checkpoints.newest() if step is None else self.checkpoints.load(step)
        began_after = 0 if state is None else self.resume_from(state)
        if self.ranks.leads:
            self.client.resume(began_after)
            for path in [] if step is None else set_aside_later(Path(self.config.output_dir), step):
                log.warning("a folder of a later step than the one this run resumes from was renamed to %s", path)
        return began_after

    def resume_from(self, state: TrainerState) -> int:
        try:
            check_facts(self.adapter, state.adapter)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint of step {state.step} is of another model: {error}") from error
        with taking(f"reading the checkpoint of step {state.step}"):
            self.checkpoints.restore(state, self.model, self.optimizer)
        self.trained = Trained(state.samples_seen, state.tokens_seen, state.environments)
        log.info("resuming from the checkpoint of step %d", state.step)
        return state.step

    def begin(self, began_after: int) -> Clock:
        """Publish the weights to begin with. Nothing is trained, and no file of the run is changed, before the
        orchestrator has accepted them: those of a run that resumes have to be the same.

        Raises:
            BroadcastError: they cannot be written.
            OrchestratorError: they were refused.
        """
        clock = Clock(always=OF_EVERY_STEP)
        self.publish(began_after, clock)
        self.broadcasts.finish()
        clock.step()
        return clock

    def run(
        self, clock: Clock, writer: MetricsWriter | None, began_after: int, distributions: MetricsWriter | None
    ) -> int:
        """Train from the step after `began_after` until `max_steps`, or until there are no more batches; returns the
        last step that was trained."""
        remaining = Remaining()
        for step in range(began_after + 1, self.config.max_steps + 1):
            try:
                received = self.receive(step)
            except NoMoreBatches as end:
                log.info("no more batches after step %d: %s", step - 1, end)
                self.finish(step - 1, over=True)
                return step - 1
            clock.lap("wait_for_batch")
            batch = received.batch if self.shares else without_trees(received.batch)
            try:
                statistics, update = self.train_on(batch, clock)
            except TrainingDiverged as error:
                kept = keep_batch(Path(self.config.output_dir), step, self.ranks.rank, "batch.msgpack", received.body)
                raise TrainingDiverged(f"{error}; {kept} (primerl.train.data.batch.decode_batch reads it)") from None
            self.publish(step, clock)
            tokens = self.count(batch, statistics)
            self.save(step, clock)
            metrics = self.measure(batch, statistics, update, tokens, clock.step())
            if distributions is not None and self.histograms is not None:
                distributions.append(step, self.histograms.line())
            if writer is not None:
                # Last, so that readers of the step's metrics find everything else of the step.
                writer.write(step, metrics)
                left_s = remaining.seconds(step, self.config.max_steps)
                log.info("%s", console_line(step, self.config.max_steps, metrics, SHOWN, left_s))
            # The step's line of metrics is written: the checkpoint may be completed.
            self.checkpoints.complete()
            clock.lap("metrics")
        self.finish(self.config.max_steps)
        return self.config.max_steps

    def train_on(self, batch: Batch, clock: Clock) -> tuple[Statistics, Update]:
        statistics = self.forward_backward(batch)
        clock.lap("forward_backward")
        if batch.step < self.config.max_steps:
            self.batches.ask_ahead(batch.step + 1)
        update = self.update(batch)
        clock.lap("optimizer")
        return statistics, update

    def receive(self, step: int) -> Received:
        began = time.monotonic()

        def waiting(reason: str) -> None:
            # The batch may be waiting for the policy whose broadcast has failed.
            self.broadcasts.check()
            tells = not self.has_told_of_waiting and time.monotonic() - began > TOLD_AFTER_S
            self.has_told_of_waiting |= tells
            log.log(logging.INFO if tells else logging.DEBUG, "waiting for batch %d: %s", step, reason)
            self.doing(step, f"waiting for the batch: {reason}")

        received, over = None, NoMoreBatches("another rank got that answer")
        while True:
            self.doing(step, "waiting for the batch")
            outcome, why = IS_THERE, "another rank got that answer"
            try:
                if received is None:
                    received = self.batches.take(step, self.config.batch_timeout_s, waiting)
            except NoMoreBatches as end:
                outcome, over = IS_OVER, end
            except PublishAgain as asked:
                outcome, why = IS_ASKED, str(asked)
            # When a run is stopped, some ranks may have their batch already.
            outcome = self.ranks.largest(torch.tensor([outcome], device=self.ranks.device)).item()
            if outcome == IS_ASKED:
                self.publish_again(step - 1, why)
            elif received is None or outcome == IS_OVER:
                raise over
            else:
                return received

    def publish_again(self, version: int, why: str) -> None:
        """Publish the current weights again, once, as no engine can load the files. All ranks have to call it.

        Raises:
            BroadcastError: they were published again before, or cannot be written.
        """
        if self.published_again == version:
            raise BroadcastError(f"no engine can load policy {version}, though its weights were written again: {why}")
        self.published_again = version
        log.warning("no engine can load policy %d, its weights are written again: %s", version, why)
        self.doing(version, f"publishing the weights of policy {version} again")
        self.broadcasts.begin(self.model, version)
        self.broadcasts.finish()

    def forward_backward(self, batch: Batch) -> Statistics:
        """Accumulate the gradients of this rank's micro-batches, then sum them over the ranks."""
        device = self.ranks.device
        targets = [self.loss.targets(micro_batch) for micro_batch in batch.micro_batches]
        self.doing(batch.step, "counting tokens over the data ranks")
        summed = self.ranks.sum(torch.cat([self.loss.counts(targets), self.loss.held(targets, batch)]).to(device))
        counts, held = summed[:3], summed[3:]
        self.loss.check_held(held, batch)
        statistics = Statistics(Groups.of(batch, self.ranks), device)
        every = self.config.distributions_interval
        self.histograms = Histograms(device) if every is not None and batch.step % every == 0 else None
        # Other ranks may have more micro-batches with tokens to train.
        trained = [pair for pair in zip(batch.micro_batches, targets, strict=True) if pair[1].indices.numel()]
        most = int(self.ranks.largest(torch.tensor([len(trained)], device=device)).item())
        self.doing(batch.step, "forward and backward")
        for index in range(most):
            sum_gradients_after(self.model, last=index == most - 1)
            if index >= len(trained):
                nothing(self.model, self.ranks).backward()  # type: ignore[no-untyped-call]
                continue
            micro_batch, own = trained[index]
            # The backward pass may compute layers again.
            with self.replaying(micro_batch):
                loss, values = self.micro_batch_loss(micro_batch, own.to(device), counts, batch.step)
                self.log_discarded(batch.step, micro_batch, own, values)
                check_finite(batch.step, loss, micro_batch, own, values)
                loss.backward()  # type: ignore[no-untyped-call]
            environments = torch.tensor(micro_batch.environments, dtype=torch.int64)[own.sequences]
            statistics.add(values, environments.to(device))
            if self.histograms is not None:
                self.histograms.add(values)
        self.doing(batch.step, "adding up what was measured")
        if self.histograms is not None:
            self.histograms = self.histograms.over(self.ranks)
        return statistics.over(self.ranks)

    def replaying(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        if self.replay is None:
            return nullcontext()
        return self.replay.replaying(micro_batch.experts, len(micro_batch.token_ids), self.ranks.device)

    def log_discarded(self, step: int, micro_batch: MicroBatch, targets: Targets, values: TokenValues) -> None:
        """Logs the rollouts that the loss discards."""
        sequences = set(targets.sequences[values.discarded.cpu()].tolist())
        if sequences:
            rollouts = listed(sorted({micro_batch.rollouts[sequence] for sequence in sequences}))
            log.warning(
                "step %d: rollouts %s are discarded: for one of their tokens the engine's log-probability is more than "
                "%g nats below the trainer's, which is impossible for the policy that sampled it",
                step,
                rollouts,
                MOST_LOG_RATIO,
            )

    def micro_batch_loss(
        self, micro_batch: MicroBatch, targets: Targets, counts: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, TokenValues]:
        device = self.ranks.device
        packed = PackedSequences.sharing(micro_batch.sequence_lengths, self.shared(micro_batch), device)
        check_ids(micro_batch, self.model.get_input_embeddings().num_embeddings)
        token_ids = micro_batch.token_ids.long().to(device)
        temperatures = None
        if bool((micro_batch.temperatures != 1).any()):
            temperatures = micro_batch.temperatures.to(device)[targets.indices]
        predicted, hook = token_ids[targets.indices], None
        if micro_batch.truncation is not None:
            hook = replaying(predicted, micro_batch.truncation.to(device)[targets.indices])
        allowed = self.grammars.allowed(micro_batch)
        if allowed is not None:
            hook = leaving_out(allowed[targets.indices.cpu()].to(device), hook)
        wanted = self.loss.plain(targets, micro_batch)
        with self.routing.recording():
            logprobs, entropy, plain = packed_logprobs(
                self.model, token_ids, packed, targets.indices, temperatures, hook=hook, plain=wanted
            )
        return self.loss(targets, micro_batch, logprobs, entropy, counts, step, plain)

    def shared(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """Leading tokens of each sequence that were computed with the previous one; empty if none were."""
        # Samples with the same tokens may have other experts.
        may = self.shares and micro_batch.experts is None
        return micro_batch.shared if may and worth_sharing(micro_batch.sequence_lengths, micro_batch.shared) else ()

    def update(self, batch: Batch) -> Update:
        self.doing(batch.step, "optimizer")
        update = self.optimizer.step(batch.step)
        norm, lr = update.grad_norm, update.lr
        if not norm < float("inf"):
            rollouts = listed(sorted({rollout for part in batch.micro_batches for rollout in part.rollouts}))
            raise TrainingDiverged(f"step {batch.step}: the norm of the gradient is {norm}; rollouts {rollouts}")
        # A finite gradient still leads to infinite weights if the step is too large.
        if not self.optimizer.has_finite_parameters():
            raise TrainingDiverged(
                f"step {batch.step}: the weights are not finite after the optimizer's step (learning rate {lr:g}, norm "
                f"of the gradient {norm:g}), and were not published; lower trainer.optim.lr. The same command resumes "
                "from the last checkpoint"
            )
        return update

    def publish(self, version: int, clock: Clock) -> None:
        """Start publishing `version` in the background; waits for the previous broadcast first."""
        if self.broadcasts.in_flight:
            self.doing(version, "waiting for the previous broadcast")
        took = self.broadcasts.finish()
        clock.lap("wait_for_broadcast")
        if took is not None:
            clock.add_background("broadcast_thread", took)
        self.doing(version, f"publishing the weights of policy {version}")
        self.broadcasts.begin(self.model, version)
        clock.lap("broadcast")

    def save(self, step: int, clock: Clock) -> None:
        """Start saving a checkpoint if one is due, and report finished ones to the orchestrator."""
        is_last = step == self.config.max_steps
        is_due = is_last or bool(self.ckpt.interval and step % self.ckpt.interval == 0)
        if not is_due and not on_request.is_wanted(Path(self.config.output_dir), self.config.ckpt, self.ranks):
            self.report_saved(self.checkpoints.saved())
            return
        self.doing(step, "waiting for the previous checkpoint")
        self.report_saved(self.checkpoints.finish())
        clock.lap("wait_for_ckpt")
        # Before the checkpoint, so that each checkpoint has its model folder, unless only the last one is wanted.
        if is_last or self.ckpt.weights_only or not self.ckpt.weights.only_last:
            self.save_weights(step)
            clock.lap("save_ckpt")
        if self.config.ckpt is None or self.ckpt.weights_only:
            return
        self.doing(step, "saving a checkpoint")
        state = TrainerState(
            step,
            self.trained.tokens,
            self.trained.samples,
            self.config.optim.type,
            adapter=self.adapter.facts() if self.adapter else {},
            environments=self.trained.environments,
        )
        with saving(Path(self.config.output_dir) / "checkpoints"):
            self.checkpoints.save(state, self.model, self.optimizer)
        clock.lap("save_ckpt")

    def save_weights(self, step: int) -> None:
        """Save the model folder `weights/step_<step>`, unless it is saved already."""
        if step == self.weights_saved:
            return
        self.doing(step, "saving the model")
        separate = self.adapter if self.ckpt.weights.save_adapter_separately else None
        source, output_dir = Path(self.config.model.path), Path(self.config.output_dir)
        most = self.config.weights.max_shard_bytes
        with saving(output_dir / "weights"), taking(f"saving weights/step_{step}") as tell:
            saved = save_model(self.model, source, output_dir, step, self.ranks, separate, most, tell)
        if self.ckpt.weights_only and self.ranks.leads:
            keep_newest(saved.parent, self.ckpt.keep_last, self.ckpt.keep_interval)
        self.weights_saved = step
        log.info("saved %s", saved)

    def finish(self, step: int, *, over: bool = False) -> None:
        """Wait until everything is on disk, the weights before the checkpoint that relies on them. `over`: the
        orchestrator may be gone."""
        self.doing(step, "waiting for the last broadcast and checkpoint")
        if over:
            self.broadcasts.end()
        else:
            self.broadcasts.finish()
        self.report_saved(self.checkpoints.finish())

    def report_saved(self, saved: int | None) -> None:
        """Report a saved checkpoint: batches up to the oldest one that `resume_step` may name are no longer needed."""
        if saved is not None and self.ranks.leads:
            self.client.checkpoint(self.checkpoints.steps()[-self.ckpt.keep_last :][0], saved)

    def doing(self, step: int, what: str) -> None:
        """Report to the orchestrator and to the other ranks what this rank does."""
        self.heartbeat.doing(step, what)
        self.ranks.at(f"step {step}: {what}")

    def count(self, batch: Batch, statistics: Statistics) -> int:
        """Add the step's samples and tokens to the totals; returns its tokens, over all ranks."""
        names = statistics.groups.environment_names(self.config.environments)
        counts = self.ranks.sum(counted(batch, len(names)).to(self.ranks.device))
        return self.trained.add(names, counts.tolist())

    def measure(
        self, batch: Batch, statistics: Statistics, update: Update, tokens: int, times: dict[str, float]
    ) -> dict[str, float]:
        """Metrics of the step over all ranks, and those of the orchestrator, which come with the batch."""
        staleness = batch.staleness()
        lengths = [length for micro_batch in batch.micro_batches for length in micro_batch.sequence_lengths]
        shared = [common for micro_batch in batch.micro_batches for common in self.shared(micro_batch)]
        learnt = sum(micro_batch.learnt() for micro_batch in batch.micro_batches)
        flops = self.performance.flops(lengths, learnt, shared)
        counts = torch.tensor(
            [len(staleness), sum(staleness), flops, sum(shared)], dtype=torch.float64, device=self.ranks.device
        )
        sampled, stale, flops, repeated = self.ranks.sum(counts).tolist()
        return {
            **batch.metrics,
            **self.performance.metrics(tokens, flops, times["time/step"], tokens - repeated),
            **statistics.metrics(self.config.environments),
            **times,
            "optim/grad_norm": update.grad_norm,
            "optim/lr": update.lr,
            "optim/zero_grad_ratio": update.zero_grad_ratio,
            # Samples that a teacher wrote have no policy version, and are not counted.
            "staleness/all/mean": stale / max(sampled, 1.0),
            **self.trained.metrics(),
            **self.routing.metrics(self.ranks),
            **(self.replay.metrics(self.ranks) if self.replay else {}),
        }


def check_finite(step: int, loss: torch.Tensor, micro_batch: MicroBatch, own: Targets, values: TokenValues) -> None:
    """Raises TrainingDiverged, which names the rollouts."""
    if bool(loss.isfinite()):
        return
    bad = own.sequences[~values.columns["loss"].isfinite().cpu()].tolist()
    rollouts = [micro_batch.rollouts[sequence] for sequence in bad] or list(micro_batch.rollouts)
    raise TrainingDiverged(f"step {step}: the loss is {loss.item()}; rollouts {listed(sorted(set(rollouts)))}")
