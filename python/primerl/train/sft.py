"""Supervised fine-tuning: `primerl sft`. Cross-entropy on what the assistant says, sequences packed without padding.

model: from a folder, or made from a config and kept as weights/step_0
rows:  rendered by the model's own template, all before the first step
for step in 1..max_steps: batch_size rows, mean loss over their answer tokens, clip, AdamW
save weights/step_<max_steps>
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from primerl.models.tiny import write_model
from primerl.startup import importing
from primerl.train.checkpoint import save_checkpoint
from primerl.train.config import ConfigError, SFTConfig
from primerl.train.conversations import RowError
from primerl.train.files import whole_folder
from primerl.train.logprobs import token_logprobs
from primerl.train.memory import prepare
from primerl.train.metrics import Clock, MetricsWriter, console_line, log_to_stdout
from primerl.train.model import ModelError, PackedSequences, load_model, output_head, predicted_hidden
from primerl.train.optim import Optimizer
from primerl.train.proof import prove
from primerl.train.rows import Row, batches, load_rows, micro_batches
from primerl.train.stop import Stopped, stop_on_signals

log = logging.getLogger(__name__)

SHOWN = {
    "loss/mean": "loss",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
    "time/step": "s",
    "perf/throughput": "tokens/s",
}
CONSOLE_INTERVAL_S = 1.0


class TrainingDiverged(Exception):  # noqa: N818 (what happened)
    """The loss or the gradient is not finite."""


def main(values: dict[str, Any]) -> int:
    """Train by the settings in `values` (see `config.SFTConfig`). Returns the exit code:
    0 trained, 1 diverged, 2 bad settings, model folder or rows, 128 + n stopped by signal n."""
    try:
        config = SFTConfig.from_dict(values)
        _check_output(config)
    except ConfigError as error:
        print(f"primerl sft: {error}", file=sys.stderr)
        return 2
    log_to_stdout(config.log.level)
    try:
        with stop_on_signals():
            train(config)
    except Stopped as stopped:
        log.info("stopped by %s", stopped)
        return stopped.exit_code
    except (ConfigError, ModelError, RowError) as error:
        log.error("%s", error)
        return 2
    except TrainingDiverged as error:
        log.error("%s", error)
        return 1
    return 0


def train(config: SFTConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output_dir = Path(config.output_dir)
    folder = _start_folder(config)
    # Rows are rendered in Rust, beside the model's import, which takes as long.
    with ThreadPoolExecutor(max_workers=1) as beside:
        rendered = beside.submit(load_rows, Path(config.data.path), folder, config.data.seq_len)
        with importing():
            model = load_model(folder, config.dtype, device)
        rows = rendered.result()
    log.info("%d rows, %d tokens", len(rows), sum(map(len, rows)))
    prove(model)
    prepare(model, config.activation_checkpointing, config.compile)
    optimizer = Optimizer(model.named_parameters(), config.optim, config.max_steps)
    with MetricsWriter(output_dir) as writer:
        _run(config, rows, model, optimizer, writer, device)
    log.info("saved %s", save_checkpoint(model, folder, output_dir, config.max_steps))


def _run(
    config: SFTConfig, rows: list[Row], model: Any, optimizer: Optimizer, writer: MetricsWriter, device: torch.device
) -> None:
    seed = config.seed if config.data.seed is None else config.data.seed
    source = batches(rows, config.data.batch_size, config.data.shuffle, seed)
    clock = Clock()
    tokens_seen, shown_at = 0, 0.0
    for step in range(1, config.max_steps + 1):
        batch = next(source)
        loss = forward_backward(model, batch, config.data.seq_len, device)
        norm, lr, zero_grad_ratio = optimizer.step(step)
        if not norm < float("inf") or loss != loss:
            raise TrainingDiverged(f"step {step}: the loss is {loss}, the norm of the gradient {norm}; lower optim.lr")
        if not optimizer.has_finite_parameters():
            raise TrainingDiverged(f"step {step}: the weights are not finite after this step; lower optim.lr")
        times = clock.step()
        tokens = sum(map(len, batch))
        tokens_seen += tokens
        metrics = {
            "loss/mean": loss,
            "optim/grad_norm": norm,
            "optim/lr": lr,
            "optim/zero_grad_ratio": zero_grad_ratio,
            "perf/throughput": tokens / times["time/step"],
            "progress/num_tokens": float(tokens_seen),
            **times,
        }
        writer.write(step, metrics)
        now = time.monotonic()
        if now - shown_at >= CONSOLE_INTERVAL_S or step == config.max_steps:
            log.info("%s", console_line(step, config.max_steps, metrics, SHOWN))
            shown_at = now


def forward_backward(model: Any, batch: list[Row], seq_len: int, device: torch.device) -> float:
    """Accumulate the gradient of the mean loss over the batch's answer tokens; returns that loss, in nats."""
    # The first token of a row has no prediction, whatever its mask says.
    answer_tokens = sum(int(row.loss_mask[1:].sum()) for row in batch)
    total = 0.0
    for rows in micro_batches(batch, seq_len):
        packed = PackedSequences.from_lengths([len(row) for row in rows], device)
        token_ids = torch.cat([row.token_ids for row in rows]).long().to(device)
        loss_mask = torch.cat([row.loss_mask for row in rows]).to(device)
        targets = ((loss_mask == 1) & (packed.position_ids.squeeze(0) > 0)).nonzero().squeeze(1)
        hidden = predicted_hidden(model, token_ids, packed, targets)
        logprobs, _ = token_logprobs(hidden, output_head(model), token_ids[targets])
        loss = -logprobs.sum() / answer_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _start_folder(config: SFTConfig) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    target = Path(config.output_dir) / "weights" / "step_0"
    with whole_folder(target) as folder:
        try:
            write_model(folder, config.model.tiny, seed=config.seed)
        except ValueError as error:
            raise ConfigError(f"model.tiny: {error}") from error
    return target


def _check_output(config: SFTConfig) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("primerl sft runs as one process; start it without torchrun")
    weights = Path(config.output_dir) / "weights"
    if weights.exists():
        raise ConfigError(f"output_dir: {weights} exists already; choose another folder or pass --clean-output-dir")
