"""`primerl sft`: fine-tuning in this process, or in ranks that it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.cli.arguments import keep_state
from primerl.config.command_line.arguments import PUBLISHED, with_long_names
from primerl.forking import servers
from primerl.process import signals
from primerl.process.imports import importing
from primerl.process.rank_variables import is_rank
from primerl.process.setting_checks import from_mapping
from primerl.train.distributed.torchrun import NODE_RANK, RENDEZVOUS

if TYPE_CHECKING:
    from primerl.config.schema.sft import SFTConfig
    from primerl.launch.placement.protocol import Placement, Plan


def sft(arguments: list[str]) -> int:
    if is_rank(os.environ):
        return sft_rank(arguments)
    if RENDEZVOUS in os.environ:
        from primerl.train.distributed import torchrun

        return torchrun.run(0, ["sft", *arguments])
    if NODE_RANK in os.environ and arguments[:1] == ["@"]:
        return sft_on_node(arguments)
    arguments = with_long_names(arguments, PUBLISHED)
    from primerl.config.errors.fail import ConfigError, fail

    try:
        with signals.held(second_passes=True), importing():
            given = _read(arguments)
        return _checked_and_run(given, arguments)
    except ConfigError as error:
        return fail(str(error))


def _read(arguments: list[str]) -> SFTConfig:
    from primerl.config.command_line.load import load
    from primerl.config.errors.error_locations import placed
    from primerl.config.process_files import run_file
    from primerl.config.schema.sft import SFTConfig

    config = load(SFTConfig, arguments, program="primerl sft")
    with placed(config, arguments):
        given = run_file.located(config)
    keep_state(given.output_dir)
    return given


def _checked_and_run(given: SFTConfig, arguments: list[str]) -> int:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError]."""
    with signals.held(second_passes=True), importing():
        from primerl.config.errors.error_locations import placed
        from primerl.config.process_files.files import dump_toml, write_text
        from primerl.launch import monitors, placing, sft_ranks
        from primerl.launch.placement.protocol import machines
        from primerl.launch.preflight import output_folder, sft
        from primerl.launch.registration import registered
        from primerl.launch.resume.position import last_metrics
        from primerl.launch.slurm import submission, within

    with placed(given, arguments):
        begun = placing.begun(given, print, saves=given.ckpt is not None and not given.ckpt.weights_only)
        given, limit = begun.config, begun.limit
        config, settings = sft.prepared(given)
        elsewhere = not machines(begun.placement).is_launchers_own()
        plan = sft_ranks.plan(config, begun.placement) if begun.submits or elsewhere else None
        if begun.submits:
            return submission.submit(config, print, command="sft", goes_on=lambda _: _resumes(config))
    with output_folder.claimed(config.output_dir, clean=config.clean_output_dir, kind="sft") as folder:
        goes_on = _resumes(config) or limit is not None
        if config.dry_run:
            _end_dry_run(config, settings, folder, plan)
            return 0
        with (
            registered(given, folder, print, goes_on=goes_on) as session,
            monitors.beside(config, folder, print) as ended,
            within.InBackground(limit),
        ):
            before = last_metrics(folder)
            write_text(folder / sft.CONFIG_FILE, dump_toml(settings))
            session.exit_code = _train(config, settings, folder, begun.placement if elsewhere else None)
            # A step, and going back to one, changes these.
            session.has_begun = last_metrics(folder) != before
            session.did_nothing = session.exit_code == 0 and not session.has_begun and before != {}
            code = ended(session.exit_code)
    return within.ended(config, code, limit, print)


def _end_dry_run(config: SFTConfig, settings: dict[str, Any], folder: Path, plan: Plan | None) -> None:
    """`plan`: where ranks on other machines would be."""
    from primerl.config.process_files.files import dump_toml, write_text
    from primerl.launch.preflight import output_folder
    from primerl.launch.preflight.model_folder import slower_on_gpu
    from primerl.launch.preflight.sft import CONFIG_FILE

    if plan is not None:
        print(f"where the ranks would run:\n{plan.table()}")
    path = config.model.path
    slower = None if path is None else slower_on_gpu(Path(path), config.dtype)
    if slower is not None:
        print(slower)
    if not output_folder.never_began(folder):
        print(output_folder.checked_and_left(folder))
        return
    write_text(folder / CONFIG_FILE, dump_toml(settings))
    print(f"everything checked; the resolved config is {folder / CONFIG_FILE}")


def _train(config: SFTConfig, settings: dict[str, Any], folder: Path, elsewhere: Placement | None) -> int:
    """Returns the exit code. `elsewhere`: where the ranks are, if not on this machine."""
    from primerl.launch import sft_ranks
    from primerl.launch.preflight.sft import CONFIG_FILE
    from primerl.train.distributed import torchrun

    if elsewhere is not None:
        return sft_ranks.run(config, folder, elsewhere, print)
    if torchrun.are_wanted(config.ranks):
        if not config.fork_server:
            os.environ[servers.VARIABLE] = servers.OFF
        return torchrun.run(config.ranks, ["sft", "@", os.fspath(folder / CONFIG_FILE)])
    with signals.held(second_passes=True), importing():
        from primerl.train.loop.sft import main
        from primerl.train.sft_settings import SFTConfig as Settings

    return int(main(from_mapping(Settings, settings)))


def _resumes(config: SFTConfig) -> bool:
    return config.ckpt is not None and config.ckpt.resume_step is not None


def sft_on_node(arguments: list[str]) -> int:
    """All ranks on the node of a cluster on which a placement has started this process, by a resolved file."""
    from primerl.cli.processes import BadInputError, read_toml, refuse
    from primerl.train.distributed import torchrun

    try:
        ranks = read_toml(Path(arguments[1])).get("ranks", 1) if len(arguments) == 2 else 1
    except BadInputError as error:
        return refuse(error)
    # Not for what is started from here.
    os.environ.pop(NODE_RANK)
    return torchrun.run(ranks, ["sft", *arguments]) if torchrun.are_wanted(ranks) else sft_rank(arguments)


def sft_rank(arguments: list[str]) -> int:
    """One of several processes, by a resolved file: who started them has checked everything."""
    from primerl.cli.processes import BadInputError, refuse, settings_of
    from primerl.config.errors.fail import ConfigError
    from primerl.train.distributed import torchrun
    from primerl.train.sft_settings import SFTConfig

    if len(arguments) != 2 or arguments[0] != "@":
        return refuse(ConfigError("as a rank, `primerl sft @ configs/sft.toml` takes a resolved file and nothing else"))
    torchrun.die_with_parent()
    try:
        config = settings_of(SFTConfig, arguments, "primerl.config.schema.sft:SFTConfig", "sft")
    except BadInputError as error:
        return refuse(error)
    with importing():
        from primerl.train.loop.sft import main

    return int(main(config))
