"""`primerl rl` and `primerl sft`: what users start."""

from __future__ import annotations

import os

from primerl.config.load import ConfigError, fail, load
from primerl.startup import importing


def rl(arguments: list[str]) -> int:
    from primerl.config.rl import RLConfig
    from primerl.launch import run

    try:
        return run.run(load(RLConfig, arguments, program="primerl rl"))
    except ConfigError as error:
        return fail(str(error))


def sft(arguments: list[str]) -> int:
    from pathlib import Path

    from primerl.config import resolve
    from primerl.config.trainer import SFTConfig
    from primerl.launch import preflight
    from primerl.launch.starting import OMP_WAIT_POLICY
    from primerl.train.conversations import RowError, read_conversations

    try:
        config = load(SFTConfig, arguments, program="primerl sft")
        preflight.check_output_dir(config.output_dir, clean=config.clean_output_dir)
        if config.model.path is not None:
            preflight.check_model(Path(resolve.absolute(config.model.path)))
        if not Path(config.data.path).is_file():
            raise ConfigError(f"data.path: there is no file {config.data.path}; give a JSONL file of conversations")
        try:
            read_conversations(Path(config.data.path))
        except RowError as error:
            raise ConfigError(str(error)) from None
        # What the launcher alone understands stays here.
        settings = config.model_dump(mode="json", exclude_none=True, exclude={"clean_output_dir", "dry_run"})
        with preflight.claimed(config.output_dir, clean=config.clean_output_dir) as folder:
            resolve.write_text(folder / "configs" / "sft.toml", resolve.dump_toml(settings))
            if config.dry_run:
                print(f"everything checked; the resolved config is {folder / 'configs' / 'sft.toml'}")
                return 0
            # Read when torch is loaded.
            os.environ.setdefault("OMP_WAIT_POLICY", OMP_WAIT_POLICY)
            with importing():
                from primerl.train.sft import main

            return int(main(settings))
    except ConfigError as error:
        return fail(str(error))
