"""`primerl run`, and the same words under `primerl rl`: runs as things with an id. One module a word."""

from __future__ import annotations

import sys
from importlib import import_module

BAD_INPUT = 2
WORDS = {
    "init": ("template", "print a commented rl.toml to start from"),
    "list": ("listing", "list the runs and how they stand"),
    "get": ("get", "print all that is known of a run, as JSON"),
    "validate": ("validate", "check a config and start nothing (--dry-run)"),
    "components": ("components", "list the processes of a run, by their logs"),
    "logs": ("logs", "print the logs of a run's processes, and follow them"),
    "stop": ("stop", "stop a run; it can be resumed"),
    "resume": ("resume", "resume a run with the config it was started with"),
    "restart": ("restart", "stop a run, and resume it"),
    "delete": ("delete", "remove a run from the list, and delete its files if asked to"),
    "checkpoints": ("checkpoints", "list what a run has saved"),
    "metrics": ("metrics", "show the metrics of a run"),
    "rollouts": ("records:rollouts", "print the rollouts of a step, as JSON"),
    "progress": ("records:progress", "print which steps have rollouts, as JSON"),
    "distributions": ("records:distributions", "print the histogram of a step's rewards, as JSON"),
    "compare": ("compare", "compare runs: configs, evaluations, costs"),
    "models": ("models", "list the models that can be trained here"),
}
SAME = {"ls": "list", "pause": "stop"}
"""Words of `prime train` that are called otherwise here."""
USAGE = """usage: primerl run @ FILE.toml [--dotted.key value ...] [-d]    start a run (as `primerl rl`)
       primerl run WORD ...

{words}

-d, --detach   in the background: prints the run's id once its checks have passed, and leaves it to itself;
               what the launcher says is in logs/launcher.log of the run's folder
ID is a run's id, the beginning of one, or its name. `primerl run WORD --help` has each word's options, and
`primerl rl WORD` is the same. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""


def run(arguments: list[str], program: str = "primerl run") -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(words="\n".join(f"  {word:<15}{text}" for word, (_, text) in WORDS.items())))
        return 0 if arguments else BAD_INPUT
    first, *rest = arguments
    first = SAME.get(first, first)
    if first in WORDS:
        module, _, function = WORDS[first][0].partition(":")
        return int(getattr(import_module(f"primerl.cli.run.{module}"), function or "main")(rest))
    if first.startswith(("@", "-")) or first.endswith(".toml"):
        from primerl.cli.run.start import main

        return main(arguments)
    return unknown(first, program)


def unknown(word: str, program: str) -> int:
    import difflib

    from primerl.cli.services import instead

    if (found := instead("rl", word)) is not None:
        hint = found.format(program=program)
    elif near := difflib.get_close_matches(word, WORDS, n=1):
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"expected `@ FILE.toml`, or one of {', '.join(WORDS)}"
    print(f"{program}: unknown word {word!r}; {hint}", file=sys.stderr)
    return BAD_INPUT


def rl(arguments: list[str]) -> int:
    """`primerl rl`: a start in the foreground, or a word of `primerl run`."""
    if not is_word(arguments):
        from primerl.cli.run.start import start_rl

        # `prime train FILE.toml`
        is_file = bool(arguments) and arguments[0].endswith(".toml") and not arguments[0].startswith(("@", "-"))
        return start_rl(["@", *arguments] if is_file else arguments)
    return run(arguments[1:], "primerl rl run") if arguments[0] == "run" else run(arguments, "primerl rl")


def is_word(arguments: list[str]) -> bool:
    """Whether `primerl rl ARGUMENTS` is about runs rather than a start in the foreground."""
    return bool(arguments) and not arguments[0].startswith(("@", "-")) and not arguments[0].endswith(".toml")
