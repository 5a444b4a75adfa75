"""The model that supervised fine-tuning starts from: a folder that is there, or one that is made."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from primerl.train.config import ConfigError
from primerl.train.distributed import Ranks
from primerl.train.files import whole_folder
from primerl.train.sft_config import SFTConfig
from primerl.train.step_folders import saving

if TYPE_CHECKING:
    from primerl.models.tiny import TinyConfig


def model_folder(config: SFTConfig) -> Path:
    return Path(config.model.path or Path(config.output_dir) / "weights" / "step_0")


@contextmanager
def start_folder(config: SFTConfig, ranks: Ranks) -> Iterator[Path]:
    """The model to start from. One that is made from scratch, by the leading rank, is kept only when the block ends
    well: after a mistake in the settings or the data the same command can be given again.

    Raises:
        ConfigError: there cannot be such a model, or the run has begun with another one.
        SavingError: it cannot be written.
    """
    target, tiny = model_folder(config), config.model.tiny
    makes = tiny is not None and ranks.leads and not target.is_dir()
    try:
        if tiny is not None and not makes and target.is_dir():
            _check(config, tiny, target)
        if tiny is not None and makes:
            _make(target, tiny, config.seed)
        ranks.wait()
        yield target
    except BaseException:
        if makes:
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):
                target.parent.rmdir()  # where nothing else is in it
        raise


def _check(config: SFTConfig, tiny: TinyConfig, target: Path) -> None:
    from primerl.models.tiny import differences

    other = differences(target, tiny)
    if other:
        raise ConfigError(
            f"model.tiny is not what the run in {config.output_dir} was made with: {'; '.join(other)}; set it as it "
            "was, or give another output_dir"
        )


def _make(target: Path, tiny: TinyConfig, seed: int) -> None:
    from primerl.models.tiny import write_model

    with saving(target), whole_folder(target) as folder:
        try:
            write_model(folder, tiny, seed=seed)
        except ValueError as error:
            raise ConfigError(f"model.tiny: {error}") from error
