"""Supervised fine-tuning: `primerl sft`. Cross-entropy on what is to be imitated, rows packed without padding.

model: from a folder, or made from a config and kept as weights/step_0
rows:  rendered by the model's own template, all before the first step
(from a checkpoint of step c: weights, optimizer, and the place in the data; on with step c + 1)
for step in 1..max_steps:
    the next batch_size tokens          (packed by a thread, some steps ahead)
    forward and backward: mean loss over the trained tokens
    clip, AdamW
    validate                            (every val.interval steps, and last)
    save weights, then a checkpoint     (every ckpt.interval steps, and last; a thread writes it)
    write the line of metrics           (the checkpoint is complete after it)
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from primerl.process.imports import importing
from primerl.process.signals import held
from primerl.train.adapters.lora import Adapter, check_facts
from primerl.train.checkpoint import on_request
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.checkpoint.state import (
    CheckpointError,
    Checkpoints,
    TrainerState,
)
from primerl.train.checkpoint.step_folders import SavingError, keep_newest, remove_unfinished, saving, set_aside_after
from primerl.train.data.datasets import check_batch_size, check_vocabulary, last_step, load_data, mixture_of
from primerl.train.data.mixture import Mixture
from primerl.train.data.packing import Ahead, StepBatch, step_batches
from primerl.train.data.rows import Rows
from primerl.train.data.sources import DataError
from primerl.train.distributed.ranks import RankError, Ranks
from primerl.train.loop.metrics import OF_EVERY_STEP, Clock, MetricsWriter, console_line, log_copied_to, log_to_stdout
from primerl.train.loop.progress import Remaining, Report, bar, taking
from primerl.train.loop.stop import Stopped, TrainingDiverged, keep_batch, listed, stop_on_signals
from primerl.train.loop.validation import Validation
from primerl.train.model.flops import Performance
from primerl.train.model.loading import import_models, load, make_ready, model_folder, start_folder, together
from primerl.train.model.packed_model import ModelError, dtype_on
from primerl.train.model.routing import RoutingLoad
from primerl.train.objective.cross_entropy import forward_backward, row_losses
from primerl.train.optim import Optimizer, Update
from primerl.train.settings import ConfigError
from primerl.train.sft_settings import NO_CHECKPOINTS, SFTConfig

log = logging.getLogger(__name__)

SHOWN = {
    "loss/mean": "loss",
    "val/loss": "val",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
    "progress/epoch": "epoch",
    "time/step": "s",
    "perf/throughput": "tokens/s",
}
CONSOLE_INTERVAL_S = 1.0
LOG = Path("logs") / "trainer.log"


def main(config: SFTConfig) -> int:
    """Trains. Returns the exit code:
    0 trained, 1 failed (diverged, another rank is gone, nothing can be saved), 2 bad settings, model folder, rows or
    checkpoint, 128 + n stopped by signal n."""
    try:
        _check_output(config)
    except ConfigError as error:
        print(f"primerl sft: {error}", file=sys.stderr)
        return 2
    log_to_stdout(config.log.level)
    with log_copied_to(Path(config.output_dir) / LOG):
        return _train_to_the_end(config)


def _train_to_the_end(config: SFTConfig) -> int:
    try:
        with stop_on_signals():
            train(config)
    except Stopped as stopped:
        log.info("stopped by %s", stopped)
        return stopped.exit_code
    except (ConfigError, ModelError, DataError, CheckpointError) as error:
        log.error("%s", error)
        return 2
    except SavingError as error:
        how = "with --ckpt.resume-step -1 the command resumes from the last checkpoint"
        log.error("%s. Make room there, or make it writable; %s", error, how)
        return 1
    except (TrainingDiverged, RankError) as error:
        log.error("%s", error)
        return 1
    return 0


def train(config: SFTConfig) -> None:
    with held(second_passes=True), importing():
        import_models()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    ranks = Ranks.join(config.ranks, config.dp_replicate, config.dist_timeout_s)
    try:
        with ranks.naming_the_missing():
            _train(config, ranks)
    finally:
        ranks.leave()


def _train(config: SFTConfig, ranks: Ranks) -> None:
    output_dir = Path(config.output_dir)
    ckpt = config.ckpt or NO_CHECKPOINTS
    checkpoints = Checkpoints(output_dir, ckpt.keep_last, ckpt.keep_interval, ranks, also_keep=output_dir / "weights")
    state = _state_to_resume(config, checkpoints)
    if ranks.leads:
        for name in ("weights", "checkpoints"):
            remove_unfinished(output_dir / name)
    # Templates may write today's date: a resumed run and every rank have to see the same rows.
    rendered_at = state.data["rendered_at"] if state else ranks.agree(time.time())
    dtype = dtype_on(ranks.device, config.dtype)
    log.info("the model computes in %s on %s", dtype, ranks.device)
    with start_folder(config, ranks) as folder:
        # Rows are rendered in Rust, in parallel with the loading of the model.
        with ThreadPoolExecutor(max_workers=1) as executor:
            how = {"trust_remote_code": config.model.trust_remote_code, "whole": config.model.lora is not None}
            loading = executor.submit(_load_model, folder, dtype, ranks, **how)
            rows, validation = load_data(config, folder, rendered_at, ranks)
            with taking("loading the model"):
                model = together(ranks, loading.result)
        check_batch_size(config, rows)
        check_vocabulary(rows, model.get_input_embeddings().num_embeddings)
        mixture = mixture_of(config, rows)
        last = last_step(config, rows)
        adapter, performance, shares = make_ready(model, config, config.model.lora, folder, config.seed, ranks)
        optimizer = Optimizer(model.named_parameters(), config.optim, last, ranks)
        if validation is not None:
            validation.share(shares)
    parts = (model, adapter, performance, shares, optimizer, checkpoints, ranks)
    run = Run(config, last, rows, mixture, validation, *parts, rendered_at)
    if state is not None:
        run.restore(state)
    # A run that was killed before its first checkpoint starts over, and measures again before the first step.
    with (
        closing(checkpoints),
        MetricsWriter(output_dir, after=-1 if state is None else run.step) if ranks.leads else nullcontext() as writer,
    ):
        run.train(writer)


@dataclass
class Run:
    """The loop over steps, and the parts it is made of."""

    config: SFTConfig
    last: int
    rows: Rows
    mixture: Mixture
    validation: Validation | None
    model: Any
    adapter: Adapter | None
    performance: Performance
    shares: bool
    """Tokens that rows share are computed once."""
    optimizer: Optimizer
    checkpoints: Checkpoints
    ranks: Ranks
    rendered_at: float

    def __post_init__(self) -> None:
        self.step = 0
        self.samples = [0] * len(self.rows.titles)
        self.tokens = [0] * len(self.rows.titles)
        self.position = self.mixture.position()
        self.output_dir = Path(self.config.output_dir)
        self.routing = RoutingLoad(self.model)
        self.remaining, self.shown_at = Remaining(), 0.0
        # What decides the order of the rows, which has to be the same when a checkpoint is resumed.
        self.data = {"rows": self.rows.digest(), **self.mixture.describe(), "rendered_at": self.rendered_at}

    def restore(self, state: TrainerState) -> None:
        """Raises CheckpointError when the state is of another model or other data."""
        where = f"the checkpoint of step {state.step}"
        for name, value in self.data.items():
            if state.data[name] != value:
                what = "the rows" if name == "rows" else f"data's {name} ({state.data[name]}, and now {value})"
                named = " (where a file has another name now, set `label` to the old one)" if name == "rows" else ""
                raise CheckpointError(
                    f"{what} are not those of {where}; give the data it was made with{named}, or start over"
                )
        try:
            check_facts(self.adapter, state.adapter)
        except ValueError as error:
            raise CheckpointError(f"{where} is of another model: {error}") from error
        with taking(f"reading {where}"):
            self.checkpoints.restore(state, self.model, self.optimizer)
        try:
            self.mixture.go_to(state.data["position"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where} is of other data: {error}") from error
        self.step, self.position = state.step, state.data["position"]
        self.samples, self.tokens = list(state.data["samples"]), list(state.data["tokens"])
        for name in ("weights", "checkpoints") if self.ranks.leads else ():
            for path in set_aside_after(self.output_dir / name, state.step):
                log.warning("a folder of a later step than the one this run resumes from was renamed to %s", path)
        log.info("resuming from the checkpoint of step %d", state.step)

    def train(self, writer: MetricsWriter | None) -> None:
        if self.step >= self.last:
            log.info("all %d steps are trained", self.last)
            return
        if self.validation is not None and self.config.val and self.config.val.at_start and not self.step:
            metrics = self.validation.measure(self.model, 0)
            if writer is not None:
                writer.write(0, metrics)
            log.info("%s", console_line(0, self.last, metrics, SHOWN))
        data, ranks = self.config.data, self.ranks
        sizes = (data.batch_size, data.seq_len, data.epochs)
        batches = step_batches(self.mixture, self.rows, *sizes, ranks.device, ranks, share=self.shares)
        ahead = Ahead(batches)
        try:
            with bar("training") as report:
                self._steps(ahead, writer, report)
        finally:
            ahead.close()
        self.ranks.at("waiting for the last checkpoint")
        with taking("saving the last checkpoint"):
            self.checkpoints.finish()

    def _steps(self, batches: Ahead[StepBatch], writer: MetricsWriter | None, report: Report) -> None:
        clock = Clock(always=OF_EVERY_STEP)
        for step in range(self.step + 1, self.last + 1):
            batch = next(batches)
            clock.lap("wait_for_batch")
            self.ranks.at(f"step {step}: forward and backward")
            loss = forward_backward(self.model, batch, self.ranks, self.routing)
            clock.lap("forward_backward")
            self.ranks.at(f"step {step}: optimizer")
            update = self._update(step, batch, loss)
            clock.lap("optimizer")
            metrics = {
                "loss/mean": loss,
                "optim/grad_norm": update.grad_norm,
                "optim/lr": update.lr,
                "optim/zero_grad_ratio": update.zero_grad_ratio,
                **self._advance(step, batch),
            }
            if self.validation is not None and self._is_due(self.config.val.interval if self.config.val else None):
                metrics |= self.validation.measure(self.model, step)
                clock.lap("validation")
            is_due = self._is_due(self.config.ckpt.interval if self.config.ckpt else None)
            if is_due or on_request.is_wanted(self.output_dir, self.config.ckpt, self.ranks):
                self.checkpoints.finish()
                clock.lap("wait_for_ckpt")
                self.save()
                clock.lap("save_ckpt")
            times = clock.step()
            metrics |= {**times, **self._measure(batch, _training_s(times))}
            if writer is not None:
                writer.write(step, metrics)
            self._show(step, metrics, report)
            # The step's line of metrics is written: the checkpoint may be completed.
            self.checkpoints.complete()
            clock.lap("metrics")

    def _show(self, step: int, metrics: dict[str, float], report: Report) -> None:
        """Update the bar; log a line if one is due."""
        left_s = self.remaining.seconds(step, self.last)
        report(step / self.last, f"step {step}/{self.last}  loss {metrics['loss/mean']:.4g}")
        now = time.monotonic()
        if now - self.shown_at >= CONSOLE_INTERVAL_S or step == self.last or "val/loss" in metrics:
            log.info("%s", console_line(step, self.last, metrics, SHOWN, left_s))
            self.shown_at = now

    def _measure(self, batch: StepBatch, seconds: float) -> dict[str, float]:
        tokens, samples = sum(batch.tokens), sum(batch.samples)
        lengths = [length for micro_batch in batch.micro_batches for length in micro_batch.packed.lengths]
        shared = [common for micro_batch in batch.micro_batches for common in micro_batch.packed.shared]
        trained = sum(micro_batch.targets.shape[0] for micro_batch in batch.micro_batches)
        own = torch.tensor([self.performance.flops(lengths, trained, shared), sum(shared)], dtype=torch.float64)
        flops, repeated = self.ranks.sum(own.to(self.ranks.device)).tolist()
        lengths_of_all = {"seq_len/all/mean": tokens / samples, "seq_len/all/max": float(batch.longest)}
        return (
            lengths_of_all
            | self.performance.metrics(tokens, flops, seconds, tokens - repeated)
            | self.routing.metrics(self.ranks)
        )

    def _update(self, step: int, batch: StepBatch, loss: float) -> Update:
        update = self.optimizer.step(step)
        norm = update.grad_norm
        if not math.isfinite(norm) or not math.isfinite(loss):
            rows = self._suspects(batch)
            what = f"the loss is {loss}, the norm of the gradient {norm}; lower optim.lr, or look at {rows}"
        elif not self.optimizer.has_finite_parameters():
            what = "the weights are not finite after this step; lower optim.lr"
        else:
            return update
        kept = keep_batch(self.output_dir, step, self.ranks.rank, "batch.safetensors", batch.saved(self.rows))
        raise TrainingDiverged(f"step {step}: {what}; {kept}")

    def _suspects(self, batch: StepBatch) -> str:
        """Names of the rows whose own loss is not finite, of all ranks. Nothing was updated."""
        losses = row_losses(self.model, batch.micro_batches, batch.most_micro_batches, self.ranks)
        bad = self.ranks.union(self.rows.name(row) for row, loss in losses.items() if not math.isfinite(loss))
        return listed(bad, "; ") if bad else "any of its rows, each of which has a finite loss by itself"

    def _advance(self, step: int, batch: StepBatch) -> dict[str, float]:
        """Count a trained step. Returns `progress/*`."""
        self.step, self.position = step, batch.position
        self.samples = [sum(pair) for pair in zip(self.samples, batch.samples, strict=True)]
        self.tokens = [sum(pair) for pair in zip(self.tokens, batch.tokens, strict=True)]
        samples, tokens = sum(self.samples), sum(self.tokens)
        metrics = {
            "progress/epoch": batch.epoch,
            "progress/num_samples": float(samples),
            "progress/num_tokens": float(tokens),
        }
        for title, own_samples, own_tokens in zip(self.rows.titles, self.samples, self.tokens, strict=True):
            metrics[f"progress/{title}/ratio_samples"] = own_samples / samples
            metrics[f"progress/{title}/ratio_tokens"] = own_tokens / tokens
        return metrics

    def _is_due(self, interval: int | None) -> bool:
        return self.step == self.last or (interval is not None and self.step % interval == 0)

    def save(self) -> None:
        """Save the model folder, then start saving the checkpoint, so that each checkpoint has its model folder unless
        only the last one is wanted. The checkpoint is written while training continues."""
        self.ranks.at(f"step {self.step}: saving")
        ckpt = self.config.ckpt or NO_CHECKPOINTS
        if self.step == self.last or ckpt.weights_only or not ckpt.weights.only_last:
            self._save_weights(ckpt.weights.save_adapter_separately)
        if not ckpt.weights_only:
            with saving(self.output_dir / "checkpoints"):
                self.checkpoints.save(self._state(), self.model, self.optimizer)
        elif self.ranks.leads:
            keep_newest(self.output_dir / "weights", ckpt.keep_last, ckpt.keep_interval)

    def _save_weights(self, adapter_too: bool) -> None:
        began = time.monotonic()
        source, separate = model_folder(self.config), self.adapter if adapter_too else None
        with saving(self.output_dir / "weights"), taking(f"saving weights/step_{self.step}") as tell:
            saved = save_model(self.model, source, self.output_dir, self.step, self.ranks, separate, tell=tell)
        log.info("saved %s in %.1f s", saved, time.monotonic() - began)

    def _state(self) -> TrainerState:
        place = {"position": self.position, "samples": self.samples, "tokens": self.tokens}
        return TrainerState(
            step=self.step,
            tokens_seen=sum(self.tokens),
            samples_seen=sum(self.samples),
            optimizer=self.config.optim.type,
            data={**self.data, **place},
            adapter=self.adapter.facts() if self.adapter else {},
        )


def _training_s(times: dict[str, float]) -> float:
    other = ("time/validation", "time/save_ckpt", "time/wait_for_ckpt")
    return times["time/step"] - sum(times.get(name, 0.0) for name in other)


def _load_model(folder: Path, dtype: str, ranks: Ranks, *, trust_remote_code: bool, whole: bool) -> Any:
    with importing():
        return load(folder, dtype, ranks, trust_remote_code, whole=whole)


def _state_to_resume(config: SFTConfig, checkpoints: Checkpoints) -> TrainerState | None:
    if config.ckpt is None or config.ckpt.resume_step is None:
        return None
    if config.ckpt.resume_step == -1:
        state = checkpoints.newest()
        if state is None:
            log.info("there is no checkpoint in %s: beginning with step 1", config.output_dir)
            return None
    else:
        state = checkpoints.load(config.ckpt.resume_step)
    if not state.data:
        raise CheckpointError(f"the checkpoint of step {state.step} is not of a supervised fine-tuning")
    return state


def _check_output(config: SFTConfig) -> None:
    if int(os.environ.get("RANK", "0")):
        return  # the leading rank may have started writing
    weights = Path(config.output_dir) / "weights"
    if weights.exists() and not config.resumes:
        raise ConfigError.at(
            "output_dir",
            f"{weights} exists already; choose another folder, pass --clean-output-dir, or resume with "
            "--ckpt.resume-step -1",
        )
