"""What a training loop of one's own does with a run, wherever the orchestrator is: it takes batches, publishes weights
and saves checkpoints."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from primerl.own_trainer.checkpoints import ScriptCheckpoints
from primerl.own_trainer.given_metrics import as_numbers
from primerl.own_trainer.lifetime import Lifetime
from primerl.own_trainer.policy import Policies
from primerl.train.checkpoint import on_request
from primerl.train.checkpoint.files import lines_of_steps
from primerl.train.checkpoint.step_folders import set_aside_later
from primerl.train.data.batch import Batch
from primerl.train.loop.metrics import MetricsWriter
from primerl.train.model.packed_model import DTYPES, load_model
from primerl.train.weights.publish import WeightsPublisher

if TYPE_CHECKING:
    import torch

    from primerl.config.schema.trainer import Checkpoints, Weights
    from primerl.train.settings import CheckpointConfig, WeightsConfig


Value = TypeVar("Value")
SAMPLES, TOKENS = "progress/num_samples", "progress/num_tokens"


@dataclass(frozen=True)
class Trained:
    """What was trained since the run began, as a run's own trainer counts it."""

    samples: float = 0.0
    tokens: float = 0.0

    @classmethod
    def until(cls, output_dir: Path, step: int) -> Trained:
        """As the metrics of that step say. Lines of later steps may follow."""
        for _, line in lines_of_steps(output_dir / "metrics.jsonl", step):
            if line["step"] == step:
                return cls(line.get(SAMPLES) or 0.0, line.get(TOKENS) or 0.0)
        return cls()

    def plus(self, samples: int, tokens: int) -> Trained:
        return Trained(self.samples + samples, self.tokens + tokens)

    def metrics(self) -> dict[str, float]:
        return {SAMPLES: self.samples, TOKENS: self.tokens}


class TrainingLoop(abc.ABC):
    """Base of `primerl.Run` and `primerl.Connection`.

    A loop begins with `restore`, if it saves checkpoints, and `publish`: the weights that the run begins with, or
    resumes with. Then comes one `publish` for each of `batches`.

    If a script has several ranks, each makes the same calls; rank 0 publishes and saves what it has.
    """

    output_dir: Path
    """The run's folder."""
    model_path: str
    """Folder to load the model from."""
    max_steps: int
    """`batches` ends after so many."""

    def __init__(
        self,
        output_dir: Path,
        model_path: str,
        max_steps: int,
        weights: Weights | WeightsConfig,
        ckpt: Checkpoints | CheckpointConfig | None,
        *,
        lifetime: Lifetime,
        keep_all: bool,
        trusted: bool,
    ) -> None:
        """`keep_all`: no published weights are deleted. `trusted`: code that comes with the model may be run."""
        self.output_dir, self.model_path, self.max_steps = output_dir, model_path, max_steps
        self._lifetime = lifetime
        self._publisher = WeightsPublisher(
            output_dir,
            weights.keep_last,
            keep_all,
            dtype=None if weights.dtype is None else DTYPES[weights.dtype],
            max_shard_bytes=weights.max_shard_bytes,
        )
        self._trusted = trusted
        self._policies = Policies(model_path, trusted=trusted, casts=weights.dtype is not None)
        self._interval = None if ckpt is None else ckpt.interval
        self._checkpoints = ScriptCheckpoints(
            output_dir, *((1, None) if ckpt is None else (ckpt.keep_last, ckpt.keep_interval))
        )
        self._metrics: MetricsWriter | None = None
        self._next_version = 0
        self._resumed = self._owes_weights = False
        self._batch: Batch | None = None
        self._trained = Trained()
        self._asked: tuple[int, bool] | None = None
        """Whether a checkpoint was asked for, as of a step."""

    def batches(self) -> Iterator[Batch]:
        """Batches of steps 1, 2, ... to `max_steps`, or of those after the one that was resumed from. The weights of a
        step have to be published before the next.

        The weights of the model folder are published as version 0 if you have not published your own.

        Raises:
            RunFailedError: the run has failed; the message names what.
        """
        self._lifetime.check()
        if self._owes_weights:
            raise RuntimeError(f"publish the weights of your checkpoint first, as version {self._next_version}")
        if self._next_version == 0:
            self.publish(load_model(self.model_path, self._dtype, "cpu", trust_remote_code=self._trusted))
        for step in range(self._next_version, self.max_steps + 1):
            batch = self._take(step)
            if batch is None:
                return
            self._batch = batch
            yield batch
            if self._next_version == step:
                raise RuntimeError(
                    f"step {step} was trained but not published; call run.publish(model) after each batch"
                )

    def publish(self, model: Any, metrics: Mapping[str, float] | None = None) -> int:
        """Publishes the model's weights as the next policy version, and returns it.

        Call it once after each batch; generation continues with the new weights once an engine has proved them.

        Args:
            model: of `transformers`, with the tensors of the run's. Wrappers of DDP, DataParallel and torch.compile may
                be around it; a LoRA adapter of peft is merged in what is written.
            metrics: of the step, written to `metrics.jsonl` and shown on the run's page with those of the batch, by
                names of docs/metrics.md (`loss/mean`, `optim/grad_norm`) or your own, but for names in
                `batch.metrics`. Numbers, or tensors and arrays of one.

        Raises:
            RuntimeError: there was no batch since the last one was published.
            TypeError, ValueError: it is not such a model, or its tensors are not those of the run's; or a metric is no
                number or has a name that is taken. Nothing was written.
        """
        self._lifetime.check()
        if self._batch is None and self._next_version > 0 and not self._owes_weights:
            raise RuntimeError(
                f"policy {self._next_version - 1} is published already, and publish makes the next one: call it once "
                "after each batch of run.batches()"
            )
        version, batch = self._next_version, self._batch
        policy, numbers = model, dict[str, float]()

        def check() -> None:
            nonlocal policy, numbers
            policy = self._policies.checked(model)
            numbers = as_numbers(metrics, () if batch is None else (*batch.metrics, SAMPLES, TOKENS))

        self._together(f"checking policy {version}", check)
        if not self._resumed:
            # In a folder with an earlier run, a script that does not resume from a checkpoint starts over.
            self.resume_after(0)

        self._together(f"publishing policy {version}", lambda: self._hand_over(policy, version, batch, numbers))
        self._batch = None
        self._next_version += 1
        self._owes_weights = False
        return version

    def _hand_over(self, policy: Any, version: int, batch: Batch | None, numbers: Mapping[str, float]) -> None:
        """Writes the weights and the metrics of the step that they are of, and announces them."""
        manifest = self._publisher.publish(policy, version)
        trained, written = self._trained, version if batch is None else version - 1
        try:
            if batch is not None:
                trained = trained.plus(*self._counts(batch))
                # Before the run can end, which the last version does: it is over when all steps are written here.
                self._writer(written).write(version, {**batch.metrics, **trained.metrics(), **numbers})
            self._announce(version, manifest, policy)
        except BaseException:
            # A step that is published again is written again, by a writer that drops its line.
            with contextlib.suppress(OSError):  # closing retries a write that has failed
                self._close_metrics()
            raise
        # Lines of later steps are dropped by now, once the weights to begin with are accepted.
        self._writer(written)
        self._trained = trained

    def restore(self, device: str | torch.device = "cpu") -> dict[str, Any] | None:
        """What the newest checkpoint of `save` holds, its tensors on `device`; None if there is none. Training resumes
        after its step: load it, and publish the weights next.

        Raises:
            CheckpointError: it is damaged, or was saved by a run's own trainer.
        """
        self._lifetime.check()
        found = self._checkpoints.load(device)
        if found is None:
            return None
        step, state = found
        self.resume_after(step)
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Saves a checkpoint of the step that was published last, on disk when this returns, with the orchestrator's
        part, so that `ckpt.resume_step` can go back to it.

        Args:
            state: what `restore` is to return: tensors, numbers, strings, and dicts and lists of them, such as
                `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.

        Raises:
            SavingError: it cannot be written.
        """
        step = self._published()
        self._together(
            f"saving the checkpoint of step {step}",
            lambda: self._report_saved(self._checkpoints.save(step, state), step),
        )

    @property
    def checkpoint_due(self) -> bool:
        """Whether the step that was published last is one to save: by `ckpt.interval`, the last, or asked for (as by
        the time limit of a job)."""
        step = self._next_version - 1
        if step < 1:
            return False
        if step == self.max_steps or (self._interval is not None and step % self._interval == 0):
            return True
        if self._asked is None or self._asked[0] != step:
            # Once a step: it may be asked for between two looks.
            wanted = self._together(
                f"looking whether step {step} is to be saved", lambda: (self.output_dir / on_request.FILE).exists()
            )
            self._asked = (step, wanted)
        return self._asked[1]

    def checkpoint_saved(self) -> None:
        """For scripts that save by other means than `save`: what was published last is on disk, with all that training
        needs. Earlier batches may be deleted."""
        step = self._published()
        self._together(f"reporting the checkpoint of step {step}", lambda: self._report_saved(step, None))

    def resume_after(self, step: int) -> None:
        """For such scripts: training resumes after `step`; publish its weights next, as version `step`.

        Raises:
            PrimerlError: there is no such step, or the batches after it are gone.
        """
        self._lifetime.check()

        def resume() -> None:
            self._resume(step)
            # A script that starts over, or resumes from an earlier one, saves these steps again.
            set_aside_later(self.output_dir, step)
            self._close_metrics()
            self._trained = Trained.until(self.output_dir, step)

        self._together(f"resuming after step {step}", resume)
        self._next_version, self._batch = step, None
        self._resumed, self._owes_weights = True, step > 0

    def _published(self) -> int:
        if self._next_version == 0:
            raise RuntimeError("call run.publish(model) first: what it publishes is what the checkpoint holds")
        self._lifetime.check()
        return self._next_version - 1

    def _writer(self, written: int) -> MetricsWriter:
        """Lines of steps after `written` are dropped when it opens."""
        if self._metrics is None:
            self._metrics = MetricsWriter(self.output_dir, after=written)
        return self._metrics

    def _close_metrics(self) -> None:
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()

    def _together(self, name: str, do: Callable[[], Value]) -> Value:
        """What is done once, whatever the number of ranks, and returned in each."""
        return do()

    def _counts(self, batch: Batch) -> tuple[int, int]:
        """Samples and tokens of a step, over all ranks."""
        return counts(batch)

    @property
    @abc.abstractmethod
    def _dtype(self) -> str:
        """Number format of a model that the loop has not loaded itself."""

    @abc.abstractmethod
    def _take(self, step: int) -> Batch | None:
        """The batch of `step`, waited for; None if there are no more."""

    @abc.abstractmethod
    def _announce(self, version: int, manifest: Path, model: Any) -> None: ...

    @abc.abstractmethod
    def _resume(self, step: int) -> None: ...

    @abc.abstractmethod
    def _report_saved(self, oldest: int, saved: int | None) -> None:
        """Batches up to `oldest` are not asked for again; `saved`: the checkpoint that was just written, to which the
        orchestrator adds its part."""


def counts(batch: Batch) -> tuple[int, int]:
    """Samples and tokens of a rank's batch."""
    lengths = [length for packed in batch.micro_batches for length in packed.sequence_lengths]
    return len(lengths), sum(lengths)
