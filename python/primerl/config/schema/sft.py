"""Supervised fine-tuning: the model it starts from, what it imitates, what it saves."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from primerl.config.errors.foreign_keys import PRIME_RL_SFT, Names
from primerl.config.schema.base import (
    BadKeysError,
    ControlTokens,
    Count,
    Fraction,
    LargeCount,
    Name,
    Section,
    Seed,
    check_dry_run,
)
from primerl.config.schema.deployment import Deployment, Ray, Slurm, check_places
from primerl.config.schema.monitors import Monitored
from primerl.config.schema.trainer import CheckpointWeights, Computation, Lora, Optimizer, TrainerLog, check_resume
from primerl.process.setting_checks import MOST_COUNT, MOST_LARGE_COUNT

# Sums of larger ones would lose the smaller, or overflow.
MOST_RATIO = 1e12
SeqLen = Annotated[int, Field(ge=2, le=MOST_COUNT)]


class TinyModel(Section):
    """Shape of a small Qwen3 model that is made from scratch, with a byte-level tokenizer."""

    hidden_size: Count = 64
    """Width of the residual stream."""
    intermediate_size: Count = 192
    """Width of the feed-forward layers."""
    num_hidden_layers: Count = 2
    """Layers."""
    num_attention_heads: Count = 4
    """Query heads."""
    num_key_value_heads: Count = 2
    """Key and value heads."""
    head_dim: Count = 32
    """Width of a head."""
    vocab_size: Count = 264
    """Rows of the embedding; the tokenizer has 262 entries."""
    tie_word_embeddings: bool = True
    """Use the embedding as output layer too."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Term added in the normalisation."""
    max_position_embeddings: Count = 2048
    """Longest sequence, in tokens."""
    initializer_range: float = Field(default=0.08, gt=0)
    """Standard deviation of the initial weights."""


class SFTModel(Section):
    """The model to start from: exactly one of `path` and `tiny`."""

    path: str | None = None
    """Model folder, or a name of the hub (`owner/name`), which is looked for in this machine's cache, and downloaded
    where it is not there."""
    tiny: TinyModel | None = None
    """Shape of a model that is made from scratch."""
    lora: Lora | None = None
    trust_remote_code: bool = False
    """Run code that comes with the model, where its config.json names some (`auto_map`) and transformers does not know
    its type. Such code can do whatever you can: read it first."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either `path` (a model folder) or a table `[model.tiny]`, not both")
        return self


class LossMask(Section):
    """Whose messages are trained on."""

    system: bool = False
    """What system and developer messages say."""
    user: bool = False
    """What the user says."""
    assistant: bool = True
    """What the assistant says and thinks, its tool calls, and the token that ends its turn."""
    tool: bool = False
    """What tools answer."""


class Subset(Section):
    """One dataset of a mixture."""

    path: str
    """A file (JSON lines, JSON, parquet, arrow), a folder of such files or of `save_to_disk`, or a dataset of the
    Hugging Face hub."""
    name: str | None = None
    """Configuration of a dataset that has several."""
    split: str = "train"
    """Split, also a part of one: `train[:5%]`. A single file is all of `train`."""
    ratio: float | None = Field(default=None, gt=0, le=MOST_RATIO)
    """Share of the samples that come from this subset, relative to the others'; given for all of them or for none."""
    label: Name | None = None
    """Name in metrics and messages; default: made from `path`."""


class Rows(Section):
    """Rows of conversations: `path`, or several `subsets`."""

    path: str | None = None
    """As in a subset, for a single dataset."""
    name: str | None = None
    """Configuration of a dataset that has several."""
    split: str = "train"
    """Split, also a part of one: `train[:5%]`. A single file is all of `train`."""
    subsets: list[Subset] = []
    """Several datasets, instead of `path`."""
    long_rows: Literal["drop", "truncate", "error"] = "drop"
    """Rows longer than `seq_len`: dropped and counted as unusable, truncated to `seq_len`, or an error that stops the
    run."""
    max_bad_share: Fraction = 0.01
    """Stop before training when more than this share of a dataset's rows cannot be used."""


class SFTData(Rows):
    """Rows to imitate."""

    batch_size: Count = 16384
    """Tokens of a step: whole rows, as many as fit."""
    seq_len: SeqLen = 2048
    """Longest row, and tokens of a packed micro-batch (what is in memory at a time)."""
    epochs: LargeCount | None = None
    """End after so many times the number of rows; without it, at `max_steps`."""
    shuffle: bool = True
    """Read the rows in a random order, another one in each epoch."""
    seed: Seed | None = None
    """Seed of the order of rows; default: the run's own."""
    loss_mask: LossMask = LossMask()
    control_tokens: ControlTokens = "keep"
    """What becomes of the model's control tokens (`<|im_end|>`) in the text of messages, also of those of `val`.
    `keep`: they are control tokens, as in `transformers`, and the rows are named. `neutralize`: they are encoded as
    plain text (docs/templates.md)."""


class ValidationData(Rows):
    """Rows that are measured and never trained on; read in their order, all of them each time."""

    seq_len: SeqLen | None = None
    """As in `data`; default: the value there."""
    loss_mask: LossMask | None = None
    """As in `data`; default: the value there."""


class Validation(Section):
    """Loss on rows that are not trained on (`val/loss`)."""

    interval: LargeCount = 100
    """Steps between validations; the last step always has one."""
    at_start: bool = True
    """Validate before the first step too."""
    data: ValidationData


class SFTCheckpoints(Section):
    """What is saved during training: `checkpoints/step_<N>` to resume from, `weights/step_<N>` to use."""

    interval: LargeCount | None = None
    """Steps between saves; without it, the last step only."""
    keep_last: LargeCount | None = None
    """Newest that are kept; all if unset."""
    keep_interval: LargeCount | None = None
    """Those at multiples of this step are kept whatever `keep_last` says."""
    weights_only: bool = False
    """Save no checkpoints, weights only: the run cannot be resumed."""
    resume_step: int | None = Field(default=None, ge=-1, le=MOST_LARGE_COUNT)
    """Go on from the checkpoint of this step; -1: from the newest, or from the beginning where there is none."""
    weights: CheckpointWeights = CheckpointWeights()


class SFTConfig(Monitored, Computation):
    """Supervised fine-tuning on conversations; the loss is on what the assistant says."""

    foreign_keys: ClassVar[Names] = PRIME_RL_SFT

    output_dir: str = Field(default="outputs/sft", min_length=1)
    """Folder of the run: metrics, weights, checkpoints. If unset, a new one in outputs/sft, named by time and file of
    rows."""
    max_steps: LargeCount | None = None
    """Steps to train; `data.epochs` may end it earlier. One of the two has to be set."""
    seed: Seed = 0
    """Seed of every random choice."""
    clean_output_dir: bool = False
    """Delete what an earlier run left in output_dir."""
    fork_server: bool = True
    """Fork the ranks from a server that imports their libraries once for all of them (Linux), where there are several;
    without, each imports them itself."""
    dry_run: bool = False
    """Check everything and write the resolved config, but start nothing and delete nothing (refused with
    clean_output_dir); where output_dir holds a run, its config stays."""
    model: SFTModel
    data: SFTData
    val: Validation | None = None
    optim: Optimizer = Optimizer()
    ckpt: SFTCheckpoints | None = None
    deployment: Deployment = Deployment()
    slurm: Slurm | None = None
    ray: Ray | None = None
    log: TrainerLog = TrainerLog()

    @model_validator(mode="after")
    def _has_its_nodes(self) -> Self:
        check_places(self.deployment, self.slurm, self.ray, is_sft=True)
        return self

    @model_validator(mode="after")
    def _is_dry_or_cleans(self) -> Self:
        check_dry_run(dry_run=self.dry_run, clean_output_dir=self.clean_output_dir)
        return self

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.max_steps is None and self.data.epochs is None:
            raise ValueError("set `max_steps` or `data.epochs` (or both: training ends with what comes first)")
        return self

    @model_validator(mode="after")
    def _has_rows_to_train_on(self) -> Self:
        data = self.data
        if data.batch_size < data.seq_len:
            raise BadKeysError(
                f"data.batch_size is {data.batch_size}, data.seq_len {data.seq_len}: a step counts its tokens and has "
                "to hold the longest row; raise data.batch_size or lower data.seq_len",
                "data.batch_size",
            )
        if not any(data.loss_mask.model_dump().values()):
            raise BadKeysError(
                "data.loss_mask leaves nothing to train on; set one of its keys to true", "data.loss_mask"
            )
        check_rows(data, "data.")
        if self.val is not None:
            check_rows(self.val.data, "val.data.")
            if any(subset.ratio is not None for subset in self.val.data.subsets):
                raise BadKeysError(
                    "val.data.subsets: a validation reads every row once; leave `ratio` out", "val.data.subsets"
                )
        return self

    @model_validator(mode="after")
    def _can_be_resumed(self) -> Self:
        if self.ckpt is None:
            return self
        check_resume(self.ckpt.resume_step, weights_only=self.ckpt.weights_only)
        if self.ckpt.weights.save_adapter_separately and self.model.lora is None:
            raise BadKeysError(
                "ckpt.weights.save_adapter_separately: there is no `model.lora`, so no adapter to save",
                "ckpt.weights.save_adapter_separately",
            )
        return self


def check_rows(rows: Rows, prefix: str) -> None:
    """Raises ValueError. `prefix`: of the keys."""
    from primerl.train.sft_settings import title_of

    subsets = f"{prefix}subsets"
    if (rows.path is None) == (not rows.subsets):
        is_named = rows.path is None and rows.name is not None
        hint = "; `name` is a configuration of the dataset, which is `path` (prime-rl calls that `name`)"
        raise BadKeysError(
            f"{prefix.rstrip('.')}: give either `path` or `[[{subsets}]]`, not both{hint if is_named else ''}",
            prefix.rstrip("."),
        )
    if rows.subsets and (rows.name is not None or rows.split != "train"):
        raise BadKeysError(f"{subsets}: `name` and `split` belong into each subset", subsets)
    if len({subset.ratio is None for subset in rows.subsets}) > 1:
        raise BadKeysError(f"{subsets}: give `ratio` for all of them, or for none (each row once an epoch)", subsets)
    titles = Counter(title_of(subset.path, subset.name, subset.label) for subset in rows.subsets)
    for title, times in titles.items():
        if times > 1:
            raise BadKeysError(
                f"{subsets}: {times} of them are called {title!r}; set `label` to tell them apart", subsets
            )
