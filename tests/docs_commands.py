"""Runs the commands of one page of the documentation, as a reader does who works through it from the top."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs_pages import Block, Command, Page, PageError
from primerl.cli import COMMANDS, main
from primerl.cli.processes import settings_from
from primerl.cli.run.start import DETACH
from primerl.config.command_line.load import load
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig

TIMEOUT_S = 400
SECRET = "the-value-of-a-secret"
# Config classes of `primerl NAME @ FILE`, in addition to rl, run and sft.
SCHEMAS = {
    "inference": "primerl.config.schema.inference_run:InferenceRunConfig",
    "trainer": "primerl.config.schema.trainer:TrainerConfig",
    "orchestrator": "primerl.config.schema.orchestrator:OrchestratorConfig",
    "env-worker": "primerl.config.schema.env_worker:EnvWorkerConfig",
}
# Programs that bash runs unchanged.
TOOLS = {"cat", "cp", "head", "ls", "mkdir", "primerl", "primerl-orchestrate", "python", "tail"}
# Arguments that pip may install: a clone or the wheel, with extras.
OURS = re.compile(r"(?:\.|[^\[]*primerl-[^\[]*\.whl\)?)(?:\[([\w,]+)\])?")
OPERATORS = ("|", ">", "<", ";", "&", "$(", "`")


@dataclass
class Reader:
    """Who follows a page: the folder they work in, and the programs they call."""

    repository: Path
    folder: Path
    programs: Path
    """Holds `primerl` and `python`, of this source tree."""
    live: Callable[[], Path]
    """An active run."""
    environment: dict[str, str]
    installed: Path
    """Where `pip install -e` puts packages."""

    def follow(self, page: Page) -> None:
        for block in page.blocks:
            if block.file is not None:
                target = self.folder / block.file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text)
            elif block.is_shell:
                self._run(block)

    def _run(self, block: Block) -> None:
        for command in block.commands():
            if block.is_run:
                self._do(command)
            else:
                self.parse(command)

    def parse(self, command: Command) -> None:
        """Checks the words of a command that is not run."""
        if not command.is_primerl:
            return
        name, *arguments = command.words[1:]
        if name not in COMMANDS:
            raise PageError(f"{command}: there is no command {name!r}")
        with contextlib.chdir(self.folder):
            if "@" not in arguments:
                known = captured([name, *words_of(arguments), "--help"])[1]
                options = {word.split("=")[0] for word in arguments if word.startswith("--")}
                missing = {option for option in options if option not in known and "." not in option}
                assert not missing, f"{command}: no such option: {missing}"
            elif name == "sft":
                load(SFTConfig, arguments, program="primerl sft")
            elif name in SCHEMAS:
                settings_from(arguments, SCHEMAS[name], name)
            elif name == "eval":
                load(EvalConfig, arguments, program="primerl eval")
            elif name == "serve":
                words = [word for word in arguments if word != "--tinker"]
                load(ServeConfig, words, program="primerl serve --tinker")
            else:
                load_run([word for word in arguments if word not in DETACH], program="primerl rl")

    def _do(self, command: Command) -> None:
        program, words = command.words[0], command.words[1:]
        if program == "source" and words == [".venv/bin/activate"]:
            pass  # done already: the tests run in that environment
        elif program == "cd":
            self.folder = (self.folder / words[0]).resolve()
        elif program == "export":
            self.environment.update(word.split("=", 1) for word in words)
        elif program == "make":
            self._shell(command, f"make --dry-run --directory {self.repository} {' '.join(words)}")
        elif program == "pip":
            self._install(command)
        elif program == "primerl" and not needs_shell(command):
            self._primerl(command)
        elif program in TOOLS:
            self._shell(command, trained(command))
        else:
            raise PageError(
                f"{command}: no rule for {program!r}: mark the block `<!-- not run: why -->`, or label it `text` if it "
                "is no command"
            )

    def _primerl(self, command: Command) -> None:
        block, arguments = command.block, command.words[1:]
        if trains(arguments):
            if "trains with" in block.marks and "--dry-run" not in arguments:
                return self._shell(command, trained(command))
            if "--dry-run" not in arguments:
                # A folder without a run, so that none is resumed, or in the way.
                words = [word for word in arguments if word not in (*DETACH, "--clean-output-dir")]
                arguments = [*words, "--dry-run", "--output-dir", "outputs/dry-run"]
        elif arguments[0] == "simulate" and "@" in arguments:
            arguments = [*arguments, "--max-steps", "4"]
        elif arguments[0] == "top":
            arguments = ["top", os.fspath(self.live()), "--once"]
        elif serves(arguments):
            return self._until_it_speaks(command)
        return self._here(command, arguments)

    def _here(self, command: Command, arguments: list[str]) -> None:
        """In this process, which has imported most of what a command needs."""
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(self.folder):
            for name, value in self._variables().items():
                patch.setenv(name, value)
            patch.setattr(sys, "path", [os.fspath(self.installed), *sys.path])  # as PYTHONPATH has it
            code, output = captured(arguments)
        assert code == 0, f"{command}: exit code {code}\n{output}"

    def _install(self, command: Command) -> None:
        """Builds and installs a package of the page; one of a registry has to be an extra of this project."""
        option, *wanted = command.words[2:]
        if option == "-e":
            # Nothing is fetched, and this environment is not changed.
            uv = Path(sys.executable).parent / "uv"
            options = "--quiet --offline --no-deps --no-build-isolation"
            return self._shell(command, f"{uv} pip install {options} --target {self.installed} {wanted[0]}")
        project = tomllib.loads((self.repository / "pyproject.toml").read_text())["project"]
        for word in (option, *wanted):
            # A clone or the wheel: the name on the public index is not ours.
            found = OURS.fullmatch(word)
            assert found is not None, f"{command}: mark it `not run`"
            extras = set((found[1] or "").split(",")) - {""}
            assert extras <= project["optional-dependencies"].keys(), command
        return None

    def _shell(self, command: Command, line: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=self._variables(),
            input=SECRET,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"

    def _variables(self) -> dict[str, str]:
        path = f"{self.programs}:{os.environ['PATH']}"
        source = os.pathsep.join(map(os.fspath, (self.installed, self.repository / "python")))
        return {**os.environ, **self.environment, "PATH": path, "PYTHONPATH": source}

    def _until_it_speaks(self, command: Command) -> None:
        """Runs a command that serves until it is interrupted, up to its first line."""
        port = "--port 0" if "--port" in command.words else ""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command.line} {port}"],
            cwd=self.folder,
            env=self._variables(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            assert process.stdout is not None
            hangs = threading.Timer(TIMEOUT_S, process.kill)
            hangs.start()
            try:
                assert process.stdout.readline().strip(), f"{command}: not a word within {TIMEOUT_S} s"
            finally:
                hangs.cancel()
                with contextlib.suppress(ProcessLookupError):  # it has ended, which the assertion reports
                    os.killpg(process.pid, signal.SIGTERM)


def trains(arguments: list[str]) -> bool:
    """Whether a command starts a run."""
    first, *rest = arguments if arguments[0] != "rl" or arguments[1:2] != ["run"] else arguments[1:]
    is_start = first == "sft" or (first in ("rl", "run") and "".join(rest[:1]).startswith(("@", "-")))
    return bool((is_start or rest[:1] == ["resume"]) and not {"--help", "--help-all", "-h"} & set(rest))


def serves(arguments: list[str]) -> bool:
    """Whether a command runs until it is interrupted."""
    name, *rest = arguments
    asks = {"--help", "--help-all", "--check", "--mark-only"} & set(rest)
    follows = rest[:1] == ["logs"] and "-f" in rest
    return follows or (name in ("page", "dashboard", "deploy", "inference", "orchestrator") and not asks)


def trained(command: Command) -> str:
    """The line of a command that is run for real, with the options that make it small."""
    is_small = not (command.words[0] == "python" or (command.is_primerl and trains(command.words[1:])))
    return command.line if is_small else f"{command.line} {command.block.marks.get('trains with', '')}"


def words_of(arguments: list[str]) -> list[str]:
    """The word of `primerl run WORD ...`, `primerl template check ...`."""
    return [word for word in arguments[:1] if re.fullmatch(r"[a-z]+", word)]


def needs_shell(command: Command) -> bool:
    """Whether the line has a shell operator outside quotes."""
    bare = re.sub(r"""'[^']*'|"[^"]*\"""", "", command.line)
    return any(operator in bare for operator in OPERATORS)


def captured(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of `primerl ...` in this process."""
    output = io.StringIO()
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(SECRET.encode()))
    try:
        # As for a user: warnings of libraries are not errors.
        with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            warnings.simplefilter("ignore")
            try:
                code = main(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        sys.stdin = stdin
    return code, output.getvalue()
