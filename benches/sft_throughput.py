"""Tokens a second of a supervised step: `primerl sft`, TRL's SFTTrainer with packing, a padded `transformers` loop.

    python benches/sft_throughput.py                  # a tiny model and one of 15M parameters, some minutes
    python benches/sft_throughput.py --models 15m --rounds 5
    python benches/sft_throughput.py --alone          # what a step of ours is made of, and no other

All three train the same model from the same weights on the same rows with the same mask, AdamW and clipping, in one
process on one thread. They take turns step by step, so what else the machine does hits them alike, and the ratio is of
their median times. `primerl sft` is its own loop, metrics and log included; what its steps are made of is taken before,
from its metrics, when it trains by itself. Seconds are CPU seconds where others use the machine (`--clock cpu`): of the
process, and of the thread that trains, for which waiting takes none. Goals: 1.3 times the tokens a second of both; at
most 3 % of a step outside forward, backward and optimizer; a batch is ready within 2 ms. Exits 1 when one is missed.
TRL is a development dependency.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import string
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.data.masks import Masker
from primerl.train.data.rows import Limits, Rows, load_rows
from primerl.train.data.sources import sources
from primerl.train.loop import sft
from primerl.train.loop.metrics import Clock, MetricsWriter, log_to_stdout
from primerl.train.model.packed_model import load_model
from primerl.train.sft_settings import SFTConfig
from step_parts import WARM_UP, report

MODELS = {
    "tiny": TinyConfig(max_position_embeddings=4096),
    "15m": TinyConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=8192,
        initializer_range=0.02,
        max_position_embeddings=4096,
    ),
}
SEQ_LEN = 512
LR = 1e-4
NOWHERE = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the log, to the end)
LONGEST_WAIT_S = 0.002
"""Goal: of the median step for a batch, which a thread has made ready."""


def write_rows(path: Path, rows: int) -> None:
    """Conversations of about 30 to 400 tokens, as uneven as real ones; half of the text is trained."""
    generator = random.Random(0)

    def text() -> str:
        return "".join(
            generator.choices(string.ascii_lowercase + " ", k=min(180, int(generator.lognormvariate(4, 0.8))))
        )

    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            file.write(json.dumps({"prompt": text(), "completion": text()}) + "\n")


@dataclass
class Contender:
    """Trains in a thread of its own, one step when it is told to: a trainer that owns its loop can take turns too."""

    name: str
    train: Callable[[Callable[[int], None]], None]
    """Calls its argument after each step, with the tokens of the step."""
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._last = 0
        threading.Thread(target=self._run, daemon=True, name=self.name).start()

    def step(self, clock: Callable[[], float], *, count: bool) -> None:
        began = clock()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        if count:
            self.seconds.append(clock() - began)
            self.tokens.append(self._last)

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.train(self._after_step)
        except BaseException as error:  # noqa: BLE001 (raised in the main thread)
            self._error = error
            self._done.release()

    def _after_step(self, tokens: int) -> None:
        self._last = tokens
        self._done.release()
        self._go.acquire()

    @property
    def rate(self) -> float:
        """Tokens a second: all tokens by the median step's time, scaled to the mean step's tokens."""
        return statistics.mean(self.tokens) / statistics.median(self.seconds)


def settings(model: Path, data: Path, batch_tokens: int, output_dir: Path, steps: int) -> dict[str, Any]:
    """Of `primerl sft`, on these rows."""
    return {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "threads": 1,
        "model": {"path": str(model)},
        "data": {"path": str(data), "batch_size": batch_tokens, "seq_len": SEQ_LEN},
        "optim": {"lr": LR},
    }


def settings_of(values: dict[str, Any]) -> SFTConfig:
    """With the defaults of what is left out."""
    from primerl.config.schema.sft import SFTConfig as Given
    from primerl.launch.preflight import sft as launcher
    from primerl.process.setting_checks import from_mapping

    return from_mapping(SFTConfig, launcher.settings_of(Given.model_validate(values)))


def ours(values: dict[str, Any]) -> Callable[[Callable[[int], None]], None]:
    """`primerl sft`'s own loop: a step ends when its line of metrics is written."""

    def train(after_step: Callable[[int], None]) -> None:
        trained = 0.0

        class Turns(MetricsWriter):
            def write(self, step: int, metrics: dict[str, float]) -> None:
                nonlocal trained
                super().write(step, metrics)
                before, trained = trained, metrics["progress/num_tokens"]
                after_step(int(trained - before))

        with contextlib.redirect_stdout(NOWHERE):
            log_to_stdout("info")
        sft.MetricsWriter = Turns  # type: ignore[misc]
        sft.train(settings_of(values))

    return train


def alone(values: dict[str, Any], now: Callable[[], float]) -> list[dict[str, Any]]:
    """`primerl sft` by itself, by that clock: its lines of metrics."""
    sft.Clock = partial(Clock, now)  # type: ignore[misc, assignment]
    with contextlib.redirect_stdout(NOWHERE):
        code = sft.main(settings_of(values))
    sft.Clock = Clock  # type: ignore[misc]
    if code:
        raise SystemExit(code)
    return [
        json.loads(line)
        for line in (Path(values["output_dir"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def labels_of(rows: Rows, index: int) -> list[int]:
    row = rows.row(index)
    return torch.where(row.loss_mask == 1, row.token_ids.long(), -100).tolist()


def padded(model_folder: Path, rows: Rows, batch_tokens: int) -> Callable[[Callable[[int], None]], None]:
    """A loop as in the tutorials: shuffled rows, padded to the longest of their batch, the model's own loss."""
    from transformers import AutoModelForCausalLM

    def train(after_step: Callable[[int], None]) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        order = random.Random(0)
        size = max(1, round(SEQ_LEN / (rows.tokens / len(rows))))
        while True:
            tokens = 0
            while tokens < batch_tokens:
                chosen = [order.randrange(len(rows)) for _ in range(size)]
                longest = max(map(rows.length, chosen))
                ids = torch.full((size, longest), 257)
                labels, attended = torch.full((size, longest), -100), torch.zeros((size, longest), dtype=torch.long)
                for place, index in enumerate(chosen):
                    length = rows.length(index)
                    ids[place, :length] = rows.row(index).token_ids.long()
                    labels[place, :length] = torch.tensor(labels_of(rows, index))
                    attended[place, :length] = 1
                    tokens += length
                model(input_ids=ids, attention_mask=attended, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after_step(tokens)

    return train


def trl(model_folder: Path, rows: Rows, batch_tokens: int, output: Path) -> Callable[[Callable[[int], None]], None]:
    """SFTTrainer with packing. One packed row a micro-batch: several would be one long row to its attention."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(
        [
            {"input_ids": rows.row(index).token_ids.tolist(), "labels": labels_of(rows, index)}
            for index in range(len(rows))
        ]
    )

    def train(after_step: Callable[[int], None]) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
        settings = SFTConfig(
            output_dir=str(output),
            packing=True,
            max_length=SEQ_LEN,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=batch_tokens // SEQ_LEN,
            max_steps=10**6,
            learning_rate=LR,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            include_num_input_tokens_seen="non_padding",
        )
        seen = 0

        class Turns(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                nonlocal seen
                now, before = int(state.num_input_tokens_seen), seen
                seen = now
                after_step(now - before)

        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        trainer = SFTTrainer(
            model=model, args=settings, train_dataset=table, processing_class=tokenizer, callbacks=[Turns()]
        )
        trainer.train()

    return train


def made_of(name: str, given: argparse.Namespace, model: Path, data: Path) -> bool:
    """What a step of `primerl sft` is made of, before anything else is in the process."""
    values = settings(model, data, given.batch_tokens, data.parent / "alone", given.rounds + WARM_UP)
    lines = alone(values, time.thread_time if given.clock == "cpu" else time.perf_counter)
    met = report(f"{name}, `primerl sft` by itself", lines)
    wait = statistics.median(line["time/wait_for_batch"] for line in lines[WARM_UP:])
    print(f"    wait for a batch: {1000 * wait:.2f} ms in the median step (<= {1000 * LONGEST_WAIT_S:g})", flush=True)
    return met and wait <= LONGEST_WAIT_S


def compared(name: str, given: argparse.Namespace, model: Path, data: Path) -> bool:
    """Tokens a second, by those of the others."""
    folder = data.parent
    config = settings_of(settings(model, data, given.batch_tokens, folder, 1)).data
    masker = Masker(model, config.loss_mask, time.time())
    limits = Limits(SEQ_LEN, "drop", 0.0, "data.")
    rows = load_rows(sources(config, "data."), masker, limits, folder / "bad.jsonl")
    contenders = [
        Contender("primerl sft", ours(settings(model, data, given.batch_tokens, folder / "ours", 10**6))),
        Contender("TRL SFTTrainer, packing", trl(model, rows, given.batch_tokens, folder / "trl")),
        Contender("transformers, padded", padded(model, rows, given.batch_tokens)),
    ]
    clock = time.process_time if given.clock == "cpu" else time.perf_counter
    for contender in contenders:
        for _ in range(2):
            contender.step(clock, count=False)
    for _ in range(given.rounds):
        for contender in contenders:
            contender.step(clock, count=True)
    parameters = sum(parameter.numel() for parameter in load_model(model).parameters())
    print(f"{name}: {parameters / 1e6:.1f}M parameters, {given.batch_tokens} tokens a step, rows of {SEQ_LEN}")
    best = contenders[0].rate
    met = True
    for contender in contenders:
        ratio = best / contender.rate
        good = contender is contenders[0] or ratio >= 1.3
        met &= good
        verdict = "" if contender is contenders[0] else f"  ratio {ratio:.2f} (>= 1.3: {'met' if good else 'MISSED'})"
        print(f"  {contender.name:<26} {contender.rate:>9,.0f} tokens/s{verdict}", flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["tiny", "15m"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    met = True
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            model, data = Path(folder) / name, Path(folder) / "rows.jsonl"
            write_model(model, MODELS[name], seed=0)
            write_rows(data, 2000)
            met &= made_of(name, arguments, model, data)
            met &= arguments.alone or compared(name, arguments, model, data)
    sys.stdout.flush()
    # Contenders wait for their next turn in their threads.
    os._exit(0 if met else 1)


if __name__ == "__main__":
    sys.exit(main())
