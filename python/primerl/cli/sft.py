"""`primerl sft`: fine-tuning in this process, or in ranks that it starts."""

from __future__ import annotations

import os
from pathlib import Path

from primerl.cli.arguments import keep_state
from primerl.config.command_line import PUBLISHED, with_long_names
from primerl.forking import servers
from primerl.process.imports import importing
from primerl.process.rank_variables import is_rank


def sft(arguments: list[str]) -> int:
    from primerl.config.load import ConfigError, fail, load
    from primerl.config.sft import SFTConfig

    if is_rank(os.environ):
        return sft_rank(arguments)
    arguments = with_long_names(arguments, PUBLISHED)
    try:
        config = load(SFTConfig, arguments, program="primerl sft")
        from primerl.config import own_folder, resolve
        from primerl.config.late import placed

        with placed(config, arguments):
            given = own_folder.located(config)
        keep_state(given.output_dir)
        from primerl.launch import monitors
        from primerl.launch.preflight import sft, training
        from primerl.launch.registration import registered
        from primerl.train.distributed import torchrun

        with placed(given, arguments):
            config, settings = sft.prepared(given)
        with training.claimed(config.output_dir, clean=config.clean_output_dir) as folder:
            goes_on = config.ckpt is not None and config.ckpt.resume_step is not None
            resolve.write_text(folder / sft.CONFIG_FILE, resolve.dump_toml(settings))
            if config.dry_run:
                print(f"everything checked; the resolved config is {folder / sft.CONFIG_FILE}")
                return 0
            # Read when torch is loaded.
            os.environ.setdefault("OMP_WAIT_POLICY", servers.OMP_WAIT_POLICY)
            with (
                registered(given, folder, print, goes_on=goes_on) as session,
                monitors.beside(config, folder, print) as ended,
            ):
                if torchrun.are_wanted(settings):
                    if not config.fork_server:
                        os.environ[servers.VARIABLE] = servers.OFF
                    file = folder / sft.CONFIG_FILE
                    session.exit_code = torchrun.run(config.ranks, ["sft", "@", os.fspath(file)])
                else:
                    with importing():
                        from primerl.train.loop.sft import main

                    session.exit_code = int(main(settings))
                return ended(session.exit_code)
    except ConfigError as error:
        return fail(str(error))


def sft_rank(arguments: list[str]) -> int:
    """One of several processes, by a resolved file: who started them has checked everything."""
    from primerl.cli.processes import BadInputError, read_toml, refuse
    from primerl.config.load import ConfigError
    from primerl.train.distributed import torchrun

    if len(arguments) != 2 or arguments[0] != "@":
        return refuse(ConfigError("as a rank, `primerl sft @ configs/sft.toml` takes a resolved file and nothing else"))
    torchrun.die_with_parent()
    try:
        settings = read_toml(Path(arguments[1]))
    except BadInputError as error:
        return refuse(error)
    with importing():
        from primerl.train.loop.sft import main

    return int(main(settings))
