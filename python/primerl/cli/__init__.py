"""The `primerl` command. Nothing heavy is imported before the subcommand is known.

Exit codes of every subcommand: 0 done, 1 failed, 2 bad input (nothing was trained or lost), 130 interrupted.
An interrupted command of one process, such as a fine-tuning, exits with 128 plus the signal's number; a launcher exits
with 130 for every signal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module

from primerl.cli.command_end import CommandEnd
from primerl.launch.supervise.trees import MARK
from primerl.process import streams, utf8
from primerl.process.rank_variables import NotARankError, forget_unless_rank, is_rank
from primerl.process.signals import INTERRUPTED, AsInterrupts, Terminated

COMMANDS = {
    "rl": ("primerl.cli.run:rl", "train a model by asynchronous reinforcement learning: starts all processes"),
    "run": ("primerl.cli.run:run", "start runs and look after them: list, logs, stop, resume, metrics, ..."),
    "sft": ("primerl.cli.sft:sft", "fine-tune a model on conversations"),
    "eval": ("primerl.cli.evaluation:evaluate", "measure an endpoint or a checkpoint on environments"),
    "gepa": ("primerl.cli.gepa:gepa", "find a better system prompt for an environment (GEPA)"),
    "verify": ("primerl.cli.results:verify", "recompute the log-probabilities of every trained token of a run"),
    "report": ("primerl.cli.results:report", "show how a run went: table, reward curve"),
    "trace": (
        "primerl.cli.journal:trace",
        "show what happened to a rollout, group or step; where time went; check invariants",
    ),
    "top": ("primerl.cli.looking:top", "show what a run does now, in the terminal"),
    "page": ("primerl.cli.looking:page", "show a finished run in the browser (a running one serves its own page)"),
    "dashboard": ("primerl.cli.dashboard:dashboard", "show all runs on one page in the browser, and compare them"),
    "buffer": ("primerl.cli.journal:buffer", "show the difficulty buffer of a run"),
    "convert": ("primerl.cli.convert:convert", "write a file of prime-rl, Hosted Training or verifiers as primerl's"),
    "config": ("primerl.cli.config:config", "explain a key of a config; JSON schemas; the reference page"),
    "doctor": ("primerl.cli.doctor:doctor", "show what this machine has, and what it means for a run"),
    "models": ("primerl.cli.models:models", "check what can be done with a model, by its config.json"),
    "simulate": ("primerl.cli.planning:simulate", "plan capacity: a run in virtual time, and what limits it"),
    "template": (
        "primerl.cli.templates:template",
        "check which conversations a model's chat template lets grow, and why",
    ),
    "deploy": ("primerl.cli.deploy:deploy", "serve an adapter of the store, which then is never cleaned up"),
    "undeploy": ("primerl.cli.deploy:undeploy", "let an adapter be cleaned up again"),
    "deployments": ("primerl.cli.deploy:deployments", "list the adapters in stores, and which are deployed"),
    "store": ("primerl.cli.store:store", "list what runs have stored, and delete it"),
    "secret": ("primerl.cli.secret:secret", "keep values that env workers alone get to see"),
    "lab": ("primerl.cli.lab:lab", "set up a folder: configs, endpoints and an environment to start from (lab setup)"),
    "env": (
        "primerl.cli.environments:env",
        "write, install and list environments; their secrets (env secret); remove virtualenvs (env prune)",
    ),
    "serve": ("primerl.cli.serve:serve", "serve the Tinker API: its SDK's training scripts, on your own machine"),
    "orchestrator": ("primerl.cli.processes:orchestrator", "one process of a run: rollouts, batches, weights"),
    "inference": ("primerl.cli.processes:inference", "one process of a run: an inference engine"),
    "env-worker": ("primerl.cli.processes:env_worker", "one process of a run: runs an environment's rollouts"),
    "store-worker": ("primerl.cli.processes:store_worker", "one process of a run: copies what it saves to the store"),
    "trainer": ("primerl.cli.processes:trainer", "one process of a run: trains and publishes weights"),
    "monitor": ("primerl.cli.processes:monitor", "one process of a run: reports it to W&B, Prime or your own monitors"),
}
SAME = {
    "train": ("rl",),
    "secrets": ("secret",),
    "vf-eval": ("eval",),
    "vf-gepa": ("gepa", "run"),
    "vf-init": ("env", "init"),
    "vf-install": ("env", "install"),
    "vf-setup": ("lab", "setup"),
}
"""Published names of commands that are called otherwise here."""
FAILED, BAD_INPUT = 1, 2
LAUNCHERS = (["rl"], ["run"], ["eval"], ["gepa"])
"""Commands that exit with 130 for every signal."""


def main(argv: list[str] | None = None) -> int:
    if argv is None:
        utf8.ensure()
        streams.ensure()
    arguments = with_our_name(sys.argv[1:] if argv is None else argv)
    # A process of a run dies by the signal, which its guard reports to the launcher.
    if MARK in os.environ or is_rank(os.environ):
        return answered(arguments)
    code: int | None = None
    with AsInterrupts() as asked:
        try:
            code = answered(arguments)
        except Exception as error:
            # What an import raises that was broken off is anything.
            if asked.number is None and not follows_interrupt(error):
                raise
            tell_interrupted()
    # An exception that was dropped, or another error that was made of it.
    return interrupted(arguments, asked.number) if code is None or asked.number is not None else code


def with_our_name(arguments: list[str]) -> list[str]:
    """Arguments of the command that a published name stands for."""
    if arguments[:1] == ["--plain"]:
        arguments = arguments[1:]  # nothing is decorated that is no terminal's
    return [*SAME[arguments[0]], *arguments[1:]] if arguments and arguments[0] in SAME else arguments


def follows_interrupt(error: BaseException) -> bool:
    """Whether the error was raised where a Ctrl-C was handled."""
    earlier: BaseException | None = error
    while earlier is not None and not isinstance(earlier, KeyboardInterrupt):
        earlier = earlier.__cause__ or earlier.__context__
    return earlier is not None


def tell_interrupted() -> None:
    # A terminal that was closed takes nothing any more.
    with contextlib.suppress(OSError):
        print("interrupted", file=sys.stderr)


def interrupted(arguments: list[str], number: int | None) -> int:
    """The exit code; `number` is None for Ctrl-C."""
    return INTERRUPTED if number is None or arguments[:1] in LAUNCHERS else 128 + number


def answered(arguments: list[str]) -> int:
    try:
        code = command(arguments)
        sys.stdout.flush()  # here, where a full disk can be reported
        return code
    except KeyboardInterrupt as error:
        # Python notes an interrupt that leaves the `exec` of a string (as dataclasses do) as unhandled,
        # and would end by the signal whatever is returned; the next `exec` forgets it.
        exec("")
        tell_interrupted()
        return interrupted(arguments, error.number if isinstance(error, Terminated) else None)
    except ModuleNotFoundError as error:
        return lacks_extra(error, arguments)
    except BrokenPipeError:
        # The reader of a pipe has left (`primerl report ... | head`).
        discard_output()
        return FAILED
    except OSError as error:
        # Anything but the output was opened by name.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        discard_output()
        print(f"primerl: the output cannot be written: {error}", file=sys.stderr)
        return FAILED


def command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else BAD_INPUT
    name, *rest = arguments
    if name in ("-V", "-v", "--version"):
        from primerl._core import __version__

        print(f"primerl {__version__}")
        return 0
    if name not in COMMANDS:
        return unknown(name)
    try:
        forget_unless_rank(os.environ, name)
    except NotARankError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    module, function = COMMANDS[name][0].split(":")
    try:
        return int(getattr(import_module(module), function)(rest))
    except CommandEnd as end:
        return int(end.code or 0)


def lacks_extra(error: ModuleNotFoundError, arguments: list[str]) -> int:
    """Reports the extra that brings a missing module; any other missing module is a fault, and raised again."""
    from primerl.process.extras import MissingExtraError, explained

    found = explained(error, f"`primerl {arguments[0]}`")
    if not isinstance(found, MissingExtraError):
        raise error
    print(f"error: {found}", file=sys.stderr)
    return BAD_INPUT


def discard_output() -> None:
    """What is still buffered: Python would try it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def orchestrate() -> int:
    """`primerl-orchestrate`: the native binary's flags, in the wheel."""
    from primerl.cli.processes import leave, native_orchestrator

    utf8.ensure()
    streams.ensure()
    return leave(native_orchestrator(sys.argv[1:]))


def usage() -> str:
    commands = "\n".join(f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: primerl COMMAND [@ FILE.toml] [--dotted.key value ...]\n\n"
        f"{commands}\n\n"
        "`primerl COMMAND --help` shows the most used keys of its config, `primerl config explain KEY` what one means\n"
        "(each can be set in the file or on the command line).\n"
        "Exit codes: 0 done, 1 failed, 2 bad input (nothing was trained or lost), 130 interrupted."
    )


def unknown(name: str) -> int:
    import difflib

    from primerl.cli.services import refused

    if (said := refused(name)) is not None:
        print(f"primerl: {said}", file=sys.stderr)
        return BAD_INPUT
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; commands are {', '.join(COMMANDS)}"
    print(f"primerl: unknown command {name!r}{hint}", file=sys.stderr)
    return BAD_INPUT
