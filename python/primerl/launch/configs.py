"""The configs of a run's processes: which there are, and where they are written."""

from __future__ import annotations

from primerl.config.process_files import files, resolve, run_file
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.rl import RLConfig
from primerl.launch import secrets
from primerl.launch.interpreters import lookup

# Until the orchestrator says where it listens.
NOWHERE = "http://127.0.0.1:0"


def entries(config: RLConfig) -> list[lookup.Entry]:
    """All environments of the run."""
    return [*config.orchestrator.train.env, *config.orchestrator.eval.env]


def processes(config: RLConfig) -> list[ProcessConfig]:
    """All processes of the run's own, to be placed: those that take GPUs first. Their configs lack the URL."""
    trainer, *others = parts(config, NOWHERE)
    return [trainer, resolve.orchestrator(config), *others]


def parts(config: RLConfig, orchestrator_url: str, run_id: str | None = None) -> list[ProcessConfig]:
    """The trainer, then engines and env workers: all that need the orchestrator's URL. `run_id`: as the list of runs
    has it."""
    return [
        resolve.trainer(config, orchestrator_url),
        *resolve.inference(config, orchestrator_url),
        *resolve.env_workers(config, orchestrator_url, run_id),
    ]


def write(
    config: RLConfig, orchestrator_url: str, variables: secrets.Variables, run_id: str | None = None
) -> list[ProcessConfig]:
    """Returns all but the orchestrator's, which is written before the URL is known. Next to them the whole run's, in
    the full form: `primerl rl @ configs/rl.toml`."""
    run_file.write(config)
    files.write(resolve.orchestrator(config, secrets.names_of_variables(variables)))
    trainer, *served = parts(config, orchestrator_url, run_id)
    others = [*served, trainer]
    for process in others:
        files.write(process)
    return [lookup.equipped(entries(config), process, variables) for process in others]
