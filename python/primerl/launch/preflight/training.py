"""Everything that can be known to be wrong before a process is started or a file is written."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from primerl.config.errors import orchestrator_refusal
from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.process_files import files, resolve
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.rl import RLConfig
from primerl.evals import greedy
from primerl.launch import configs, monitors, secrets, tailnet
from primerl.launch.interpreters import lookup
from primerl.launch.placement import commands
from primerl.launch.placement.protocol import Placement
from primerl.launch.placement.registry import chosen
from primerl.launch.preflight import checker, hub, output_folder, shadowing
from primerl.launch.preflight import environments as environments
from primerl.launch.preflight import policy as policy
from primerl.launch.preflight.model_folder import slower_on_gpu
from primerl.launch.resume import going_back
from primerl.launch.supervise.failures import BAD_INPUT
from primerl.net import addresses
from primerl.process import import_path, signals
from primerl.process.problems import Problem
from primerl.run_key import VARIABLE, run_key


def check(
    config: RLConfig, say: Callable[[str], None] = lambda _: None, placement: Placement | None = None
) -> secrets.Variables:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] with every problem found, one a line.
    Returns what env workers are to get in their environment.

    Args:
        say: Told what takes long, and what should be known of an environment that can be used.
        placement: Where the processes would run; the config's where it is omitted.
    """
    variables, with_key = _quick_checks(config, _model, placement or chosen(config.deployment, config.ray))
    # The slow checks run side by side, and only when the quick ones found nothing.
    _warn_of_repeats(config, say)
    slower = slower_on_gpu(Path(files.absolute(config.model.path)), config.trainer.dtype)
    if slower is not None:
        say(slower)
    if config.inference.replicas:
        policy.say_drawback(config, say)
    lookup.provided(configs.entries(config), config.timeouts.install_s, say)
    problems = Problems()
    problems.found += _slow_checks(config, variables, say)
    problems.check()
    return with_key


def check_ahead(config: RLConfig, placement: Placement | None = None) -> None:
    """All that can be judged before anything large is fetched: the weights of a model of the hub, or what another run
    has stored. Raises ConfigError with every problem, one a line."""
    placement = placement or chosen(config.deployment, config.ray)
    if not hub.is_hub_name(config.model.path):
        if config.checkpoint_id is not None:
            _quick_checks(config, _model, placement)
        return

    def model(given: RLConfig) -> None:
        policy.check(hub.with_model(given, weights=False), weights=False)

    _quick_checks(config, model, placement)


def _quick_checks(
    config: RLConfig, model: Callable[[RLConfig], None], placement: Placement
) -> tuple[secrets.Variables, secrets.Variables]:
    """Returns variables of env workers, without and with the tailnet's key. `model` judges that."""
    problems = Problems()
    variables: secrets.Variables = {}
    with_key: secrets.Variables = {}

    def placed(given: RLConfig) -> None:
        commands.plan(placement, configs.processes(given))

    for find in (
        *(_output_dir, _resume_step, model, _loss, _store, placed, _exposure, _environments),
        *(monitors.check, tailnet.check_programs),
    ):
        signals.check()
        with problems.noted():
            find(config)
    with problems.noted():
        variables = secrets.of_workers(config)
        with_key = tailnet.with_key(config, variables)
    problems.check()
    return variables, with_key


def _warn_of_repeats(config: RLConfig, say: Callable[[str], None]) -> None:
    measured = config.orchestrator.eval.env
    found = greedy.repeated((one.label, one.rollouts_per_example, one.sampling.temperature) for one in measured)
    if found is not None:
        say(found)


def _output_dir(config: RLConfig) -> None:
    output_folder.check_output_dir(
        config.output_dir, clean=config.clean_output_dir, goes_on=output_folder.can_go_on, kind="rl"
    )


def _resume_step(config: RLConfig) -> None:
    going_back.check(config, Path(files.absolute(config.output_dir)))


def _model(config: RLConfig) -> None:
    policy.check(config)


def _loss(config: RLConfig) -> None:
    """Whether there is such a function; the trainer, which imports it, is started last."""
    custom = config.trainer.loss.custom
    problem = None if custom is None else import_path.missing(custom)
    if problem is not None:
        raise ConfigError.at("trainer.loss.custom", problem)


def _environments(config: RLConfig) -> None:
    environments.check_installed(configs.entries(config))


def _store(config: RLConfig) -> None:
    """Whether there is such a kind of store; whether it can be written to is found out during training."""
    if config.store is None:
        return
    from primerl.stores.choice import open_store
    from primerl.stores.entries import StoreError

    try:
        open_store(config.store.url)
    except StoreError as error:
        raise ConfigError.like(error) from None


def _exposure(config: RLConfig) -> None:
    """The orchestrator's own rule, which it tells when it listens."""
    host = config.orchestrator.host
    if run_key() is not None or not addresses.is_reached_from_elsewhere(host):
        return
    raise ConfigError.at(
        "orchestrator.host",
        f"{host} can be reached from other machines, and {VARIABLE} is not set; set it in the "
        "environment of the run and of everything that talks to it, or listen on 127.0.0.1",
    )


def _slow_checks(config: RLConfig, variables: secrets.Variables, say: Callable[[str], None]) -> list[str]:
    wanted = environments.of_run(config, variables)
    begins = config.clean_output_dir
    words = functools.partial(orchestrator_refusal.in_words_of, config)
    resolved = resolve.orchestrator(config)
    step = None if begins else going_back.needed(config, Path(files.absolute(config.output_dir)))
    return check_beside(resolved, wanted, config.timeouts.check_s, say, begins=begins, back_to=step, words=words)


def check_beside(
    process: ProcessConfig,
    wanted: list[environments.Wanted],
    check_s: float,
    say: Callable[[str], None],
    *,
    begins: bool,
    back_to: int | None = None,
    words: Callable[[orchestrator_refusal.Refusal], str] = operator.attrgetter("message"),
) -> list[str]:
    """What the orchestrator says of its config, and each environment of its settings. `begins`: whatever its folder
    holds, which it has to fit otherwise. `back_to`: the checkpoint that it has to fit instead. `words`: how its
    refusal is worded."""
    with tempfile.TemporaryDirectory(prefix="primerl-check-") as folder:
        file = Path(folder) / "orchestrator.toml"
        elsewhere = {"output_dir": os.fspath(Path(folder) / "run")} if begins else {}
        file.write_text(files.to_toml(process.config.model_copy(update=elsewhere)), encoding="utf-8")
        back = [] if back_to is None else ["--resume-step", str(back_to)]
        # Side by side, and in the hands of this thread: whatever ends it ends them.
        with (
            checker.running(
                *("primerl", "orchestrator", "--config", os.fspath(file), "--check", "--json"), *back
            ) as orchestrator,
            environments.checking(wanted, Path(folder)) as processes,
            ThreadPoolExecutor(1) as watching,
        ):
            try:
                watched = watching.submit(_ended, orchestrator, check_s, processes.values())
                found = environments.problems(wanted, processes, check_s, say)
                done = watched.result()
            finally:
                orchestrator.kill()  # which ends the thread too
    refusal = _orchestrator_said(done, file, check_s, words)
    return [refusal] if refusal and done is not None else [*filter(None, [refusal]), *found]


def _ended(
    orchestrator: subprocess.Popen[str], check_s: float, others: Iterable[subprocess.Popen[str]]
) -> subprocess.CompletedProcess[str] | None:
    """Waits for the orchestrator's check, which takes a part of the others' time: a refusal is reported at once."""
    done = checker.ended(orchestrator, check_s)
    if done is not None and done.returncode != 0:
        for other in others:
            other.kill()
    return done


def _orchestrator_said(
    done: subprocess.CompletedProcess[str] | None,
    file: Path,
    check_s: float,
    words: Callable[[orchestrator_refusal.Refusal], str],
) -> str | None:
    """What the orchestrator itself says about its config and the model's template and tokenizer."""
    if done is None:
        return Problem(
            f"the orchestrator's own check did not end within timeouts.check_s = {check_s:g} s; raise it where the "
            "machine is slow, or run `primerl orchestrator --check` to see what it does",
            "timeouts.check_s",
        )
    if done.returncode == 0:
        return None
    refusal = orchestrator_refusal.read(done.stdout)
    if refusal is not None and done.returncode == BAD_INPUT:
        return words(refusal.without(f"{file}: "))
    # Whole: a value that TOML or the orchestrator cannot hold is shown with the line it is on.
    said = done.stderr.strip().removeprefix("error: ").replace(f"{file}: ", "")
    if not said or "Traceback" in said:
        return checker.said(done)
    # It refuses with code 2; anything else ended the process, such as a file that is imported in a library's place.
    return said if done.returncode == BAD_INPUT else said + shadowing.hint()
