"""The model that supervised fine-tuning starts from: a folder that is there, or one that is made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primerl.models.tiny import differences, write_model
from primerl.train.config import ConfigError
from primerl.train.distributed import ALONE, Ranks
from primerl.train.files import whole_folder
from primerl.train.sft_config import SFTConfig
from primerl.train.step_folders import saving


def model_folder(config: SFTConfig) -> Path:
    return Path(config.model.path or Path(config.output_dir) / "weights" / "step_0")


@contextmanager
def start_folder(config: SFTConfig, ranks: Ranks) -> Iterator[Path]:
    """The model to start from. One that is made from scratch is kept only when the block ends well: after a mistake in
    the data the same command can be given again."""
    target = model_folder(config)
    if config.model.tiny is not None and target.is_dir():
        other = differences(target, config.model.tiny)
        if other:
            raise ConfigError(
                f"model.tiny is not what the run in {config.output_dir} was made with: {'; '.join(other)}; set it as "
                "it was, or give another output_dir"
            )
    if ranks.size > 1 and config.model.tiny is not None:
        with _made_for_all(config, target, ranks):
            yield target
        return
    if config.model.tiny is None or target.is_dir():
        yield target
        return
    try:
        with whole_folder(target) as folder:
            try:
                with saving(target):
                    write_model(folder, config.model.tiny, seed=config.seed)
            except ValueError as error:
                raise ConfigError(f"model.tiny: {error}") from error
            yield folder
    finally:
        if target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()


@contextmanager
def _made_for_all(config: SFTConfig, target: Path, ranks: Ranks) -> Iterator[None]:
    """The same where ranks read what the leading one makes."""
    makes = ranks.leads and not target.is_dir()
    try:
        if makes:
            with start_folder(config, ALONE):
                pass
        ranks.wait()
        yield
    except BaseException:
        if makes:
            shutil.rmtree(target.parent, ignore_errors=True)
        raise
