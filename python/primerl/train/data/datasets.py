"""Loads the rows of supervised fine-tuning, and computes how many steps they make."""

from __future__ import annotations

import logging
from itertools import islice, pairwise
from pathlib import Path

from primerl.train.data.masks import Masker
from primerl.train.data.mixture import Mixture, steps
from primerl.train.data.rows import Limits, Rows, load_rows
from primerl.train.data.sources import DataError, sources
from primerl.train.distributed.ranks import Ranks
from primerl.train.loop.progress import progress
from primerl.train.loop.validation import Validation
from primerl.train.settings import ConfigError
from primerl.train.sft_settings import SFTConfig

log = logging.getLogger(__name__)

MOST_EPOCHS_A_STEP = 100
"""A step that would hold every row more often is refused: filling it would take too long."""


COUNTED_AT_ONCE = 1000
"""Steps between progress reports, which take longer than counting a step."""


def load_data(config: SFTConfig, folder: Path, rendered_at: float, ranks: Ranks) -> tuple[Rows, Validation | None]:
    data, output_dir = config.data, Path(config.output_dir)
    masker = Masker(folder, data.loss_mask, rendered_at, data.control_tokens)
    limits = Limits(data.seq_len, data.long_rows, data.max_bad_share, "data.")
    rows = load_rows(sources(config.data, "data."), masker, limits, output_dir / _named("bad_rows.jsonl", ranks))
    log.info("%s rows, %s tokens", f"{len(rows):,}", f"{rows.tokens:,}")
    if config.val is None:
        return rows, None
    given = config.val.data
    if given.loss_mask is not None and given.loss_mask != data.loss_mask:
        masker = Masker(folder, given.loss_mask, rendered_at, data.control_tokens)
    seq_len = given.seq_len or data.seq_len
    limits = Limits(seq_len, given.long_rows, given.max_bad_share, "val.data.")
    held_out = load_rows(sources(given, "val.data."), masker, limits, output_dir / _named("val_bad_rows.jsonl", ranks))
    log.info("%s rows, %s tokens for validation", f"{len(held_out):,}", f"{held_out.tokens:,}")
    return rows, Validation(held_out, seq_len, ranks.device, ranks)


def _named(file: str, ranks: Ranks) -> str:
    """A file a rank: all ranks read all rows, and would write to the same file."""
    return file if ranks.leads else f".rank_{ranks.rank}_{file}"


def mixture_of(config: SFTConfig, rows: Rows) -> Mixture:
    """Raises DataError for a ratio of a dataset without rows."""
    ratios = [subset.ratio for subset in config.data.datasets if subset.ratio is not None] or None
    for title, (first, end) in zip(rows.titles, pairwise(rows.firsts), strict=True):
        if ratios is not None and first == end:
            raise DataError.at("data.subsets", f"no row of {title} can be used, and it has a ratio")
    return Mixture(rows, ratios, shuffle=config.data.shuffle, seed=config.data_seed)


def check_batch_size(config: SFTConfig, rows: Rows) -> None:
    """Raises ConfigError."""
    data = config.data
    times = data.batch_size / rows.tokens
    if times > MOST_EPOCHS_A_STEP and (data.epochs is None or data.epochs > MOST_EPOCHS_A_STEP):
        raise ConfigError(
            f"data.batch_size is {data.batch_size:,}, and all rows together have {rows.tokens:,} tokens: a step would "
            f"hold each of them {times:,.0f} times, which is limited to {MOST_EPOCHS_A_STEP}; lower data.batch_size",
            "data.batch_size",
        )


def check_vocabulary(rows: Rows, embedded: int) -> None:
    """Raises ConfigError for a token without a row of the model's embedding, which has `embedded`."""
    largest = rows.largest_id
    if largest >= embedded:
        raise ConfigError.at(
            "model.path",
            f"its tokenizer gives token ids up to {largest} in these rows, and the model's embedding has "
            f"{embedded} rows; give a tokenizer and a model that belong together",
        )


def last_step(config: SFTConfig, rows: Rows) -> int:
    data = config.data
    if data.epochs is None:
        assert config.max_steps is not None
        return config.max_steps
    mixture, count = mixture_of(config, rows), 0
    with progress("counting steps") as report:
        for _ in islice(steps(mixture, rows, data.batch_size, data.epochs), config.max_steps):
            count += 1
            if count % COUNTED_AT_ONCE == 0:
                report(mixture.epoch / data.epochs, f"{count:,} steps")
    return count
