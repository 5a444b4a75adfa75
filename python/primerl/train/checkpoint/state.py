"""Checkpoints: the state that a trainer resumes from, saved by a thread while training continues."""

from __future__ import annotations

import pickle
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from primerl.train.adapters.merging import adapter_state
from primerl.train.checkpoint.files import NoRoomError, check_room, settle
from primerl.train.checkpoint.proof import damaged, model_facts, other_facts, write_sums
from primerl.train.checkpoint.step_folders import (
    ORCHESTRATOR_FOLDER,
    SCRIPT_FOLDER,
    STATE_FILE,
    SavingError,
    keep_newest,
    remove_unfinished,
    saved_steps,
)
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.optim import Optimizer

GIVEN_UP_S = 10.0
"""After an error: longest wait for the end of what is being written."""
FORMER_STATE_FILE = Path("state.pt")
"""Written by versions in which the tensors had no files of their own."""


@dataclass(frozen=True)
class TrainerState:
    """What step `step` leaves to the next besides tensors: with the same batches, training continues as if it was never
    stopped. It is the same on all ranks."""

    step: int
    tokens_seen: int
    samples_seen: int
    optimizer: str = ""
    """Its type."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where supervised fine-tuning is in its data; the policy trainer's batches are the orchestrator's."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """What the adapter belongs to, if the model has one: then only the adapter is saved."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Config of the model, which `Checkpoints` writes and checks."""
    environments: dict[str, list[int]] = field(default_factory=dict)
    """Trained samples and tokens by environment, of the policy trainer. Empty in checkpoints of versions that did not
    tell them apart: then they are counted from there on."""


class CheckpointError(Exception):
    """A checkpoint cannot be read. The message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    target: Path
    """Its name when it is complete."""
    writing: Future[Any]


class Checkpoints:
    """`<output_dir>/checkpoints/step_<k>/trainer`: `state.pt`, and the tensors in torch's distributed format, of which
    each rank writes and reads what it holds, and its generators' states; any number of ranks may read what another
    number has written.

    A folder of that name is whole: it is filled under another one, synced and renamed by the leading rank when all
    have written. A thread does that: training continues once the tensors are copied.

        save        copies, and starts writing
        complete    the step's line of metrics is on disk: the thread may rename the folder
        finish      waits for the thread
    """

    def __init__(
        self,
        output_dir: Path,
        keep_last: int | None,
        keep_interval: int | None = None,
        ranks: Ranks = ALONE,
        *,
        also_keep: Path | None = None,
        with_orchestrator: bool = False,
    ) -> None:
        """`also_keep`: another folder in which the same steps are kept. `with_orchestrator`: the orchestrator adds its
        part to each checkpoint, in a folder that is made for it."""
        self._folder = output_dir / "checkpoints"
        self._keep_last = keep_last
        self._keep_interval = keep_interval
        self._ranks = ranks
        self._also_keep = also_keep
        self._with_orchestrator = with_orchestrator
        # The thread's messages to other ranks must not mix with those of training.
        self._group = torch.distributed.new_group(timeout=ranks.timeout, backend="gloo") if ranks.size > 1 else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._begun: _Begun | None = None
        self._saving: Future[int] | None = None

    def newest(self) -> TrainerState | None:
        """The newest checkpoint, or None. Raises CheckpointError if it cannot be read."""
        steps = self.steps()
        return self.load(steps[-1]) if steps else None

    def load(self, step: int) -> TrainerState:
        """Raises CheckpointError if it does not exist or cannot be read."""
        folder = self._folder / f"step_{step}"
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._folder}; steps there: {there}")
        if (folder / FORMER_STATE_FILE).exists():
            raise self._former(folder)
        if (folder / SCRIPT_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} was saved by a training script, which alone can resume from it: start that, with "
                "trainer.external, or give another output_dir"
            )
        path = folder / STATE_FILE
        try:
            values = dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise self._unreadable(path, error) from error
        if "model" in values:
            raise self._former(folder)
        # Written by versions that kept only the leading rank's random numbers, and none for policies.
        values.pop("rng", None)
        try:
            return TrainerState(**values)
        except TypeError as error:
            raise CheckpointError(
                f"{path} has other entries than this version of primerl writes ({error}); resume with the version that "
                "wrote it, give another output_dir, or start over from its weights"
            ) from error

    def restore(self, state: TrainerState, model: Any, optimizer: Optimizer) -> None:
        """Raises CheckpointError when what `state` belongs to cannot be read or is of another model or optimizer."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        where, folder = f"the checkpoint of step {state.step}", self._folder / f"step_{state.step}" / "trainer"
        self._check(state, where, model)
        if state.optimizer != optimizer.config.type:
            raise CheckpointError(
                f"{where} is of the optimizer {state.optimizer!r}, and optim.type is {optimizer.config.type!r}; set it "
                "as it was"
            )
        _ignore_warning_of_one_process()
        try:
            reader = FileSystemReader(folder)
            entries = reader.read_metadata().state_dict_metadata
            sizes = {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
            optimizer.begin_state({name[10:]: size for name, size in sizes.items() if name.startswith("optimizer.")})
            tensors = training_tensors(model, optimizer)
            for name, tensor in tensors.items():
                if sizes.get(name) != tensor.shape:
                    here, there = _shape(tensor.shape), _shape(sizes.get(name))
                    raise CheckpointError(
                        f"{where} is of another model: {name} is {here}, and there {there}; set the model and its "
                        "adapter as they were, or start over"
                    )
            if _drops(model) and not any(name.startswith("random.") for name in entries):
                raise self._former(folder.parent)  # without the random numbers that its dropout needs
            states = random_states(self._ranks.rank)
            # There are none for a rank that did not exist.
            states = {name: state for name, state in states.items() if sizes.get(name) == state.shape}
            load(tensors | states, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except (Exception, CheckpointException) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._unreadable(folder, error) from error
        optimizer.use_copies()
        set_random_states(states)

    def _check(self, state: TrainerState, where: str, model: Any) -> None:
        """All ranks have to call it."""
        other = other_facts(state.model_config, model_facts(model))
        if other is not None:
            raise CheckpointError(f"{where} is of another model: {other}; set the model as it was, or start over")
        folder = self._folder / f"step_{state.step}"
        if not state.model_config:
            return  # of a version that wrote no sums either
        try:
            own = damaged(folder, self._ranks.rank, self._ranks.size)
        except (OSError, ValueError) as error:
            own = [_reason(error)]
        found = self._ranks.union(own)
        if found:
            raise CheckpointError(
                f"{folder} is not what was written: {', '.join(found)}; delete {folder.name} to resume from the "
                "checkpoint before it"
            )

    def save(self, state: TrainerState, model: Any, optimizer: Optimizer) -> None:
        """Returns when model and optimizer may change again; the checkpoint appears, whole, after `complete`."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        target = self._folder / f"step_{state.step}"
        folder = self._folder / f".{target.name}.writing"
        if self._ranks.leads:
            remove_unfinished(self._folder)
            (folder / STATE_FILE).parent.mkdir(parents=True)
            if self._with_orchestrator:
                (folder / ORCHESTRATOR_FOLDER).mkdir()
            torch.save(vars(replace(state, model_config=model_facts(model))), folder / STATE_FILE)
        self._ranks.wait()
        _ignore_warning_of_one_process()
        tensors = training_tensors(model, optimizer) | random_states(self._ranks.rank)
        self._check_room(folder, target, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        writing = async_save(
            tensors,
            storage_writer=FileSystemWriter(folder / "trainer"),
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(writing, Future)
        self._begun = _Begun(state.step, folder, target, writing)

    def _check_room(self, folder: Path, target: Path, needed: int) -> None:
        """All ranks have to call it, each with the bytes of all ranks together. Raises SavingError."""
        problems = []
        try:
            check_room(target, needed)
        except NoRoomError as error:
            problems = [str(error)]
        problems = self._ranks.union(problems)
        if problems:
            if self._ranks.leads:
                shutil.rmtree(folder, ignore_errors=True)
            raise SavingError(f"no checkpoint can be written to {self._folder}: {problems[0]}")

    def complete(self) -> None:
        """Let the thread rename what is being saved, if anything is."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._saving = self._thread.submit(self._complete, begun)

    def _complete(self, begun: _Begun) -> int:
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            begun.writing.result()
        except (CheckpointException, OSError):
            self._remove(begun)
            raise
        if self._ranks.leads:
            write_sums(begun.folder)
            settle(begun.folder, begun.target)
            for kept in (self._folder, self._also_keep):
                if kept is not None:
                    keep_newest(kept, self._keep_last, self._keep_interval)
        return begun.step

    def _remove(self, begun: _Begun) -> None:
        """Frees the room on a full disk."""
        if self._ranks.leads:
            shutil.rmtree(begun.folder, ignore_errors=True)

    def close(self) -> None:
        """Give up a checkpoint that was started and not completed."""
        begun, self._begun = self._begun, None
        if begun is not None:
            # Another rank may be gone, so the wait is bounded; the next start removes what is left.
            wait([begun.writing], GIVEN_UP_S)
            self._remove(begun)

    def finish(self) -> int | None:
        """Complete what is being saved and wait for it; returns the step of what was. Raises SavingError."""
        from torch.distributed.checkpoint.api import CheckpointException

        self.complete()
        saving, self._saving = self._saving, None
        try:
            return None if saving is None else saving.result()
        except (CheckpointException, OSError) as error:
            raise SavingError(f"no checkpoint can be written to {self._folder}: {_reason(error)}") from error

    def saved(self) -> int | None:
        """The same if the save has finished, without waiting."""
        return self.finish() if self._saving is not None and self._saving.done() else None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        return saved_steps(self._folder)

    def _former(self, folder: Path) -> CheckpointError:
        return CheckpointError(
            f"{folder} is of an earlier version of primerl, which alone can resume from it; give another output_dir, "
            "or start over from its weights"
        )

    def _unreadable(self, path: Path, error: BaseException) -> CheckpointError:
        folder = next(parent for parent in (path, *path.parents) if parent.name.startswith("step_"))
        return CheckpointError(
            f"{path} cannot be read ({_reason(error)}); delete {folder} to resume from the checkpoint before it"
        )


def training_tensors(model: Any, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a step changes, in fp32, under names that do not depend on the number of ranks."""
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    state = model.state_dict(keep_vars=True)
    state = adapter_state(state) or state
    weights = {f"model.{name}": optimizer.master(tensor).detach() for name, tensor in state.items() if name not in tied}
    return weights | {f"optimizer.{name}": tensor.detach() for name, tensor in optimizer.state().items()}


def _ignore_warning_of_one_process() -> None:
    """torch warns without other ranks, even if it knows that there are none; also in its thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _reason(error: BaseException) -> str:
    """The last line, which of an error of several ranks is what happened. Of a file that is no pickle torch tells how
    to load what is not to be trusted."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _shape(size: Any) -> str:
    return "missing" if size is None else "x".join(map(str, size)) or "a number"


def _drops(model: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())


def random_states(rank: int) -> dict[str, torch.Tensor]:
    """States of this rank's generators, under names that no other rank has: torch lets each rank write its own."""
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    for name, state in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)
