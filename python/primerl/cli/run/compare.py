"""`primerl run compare`: what differs between runs, and whether one is better."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from primerl.cli.arguments import count
from primerl.cli.run.common import BAD_INPUT, add_json, gone, natural, parser_of, show, size
from primerl.config.errors.fail import fail
from primerl.launch.secrets import note_of_run
from primerl.process.printing import printable
from primerl.runs.registry import Registry, Run, UnknownRunError
from primerl.runs.state import StateError

MOST = 8
ANSWER, PROMPT = 60, 1000
"""Characters of an answer and of a prompt that are shown."""


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "compare",
        "Compares runs with the first one: what differs in their configs, the newest evaluations with the intervals of "
        "their differences, rewards, checkpoints and costs.",
        of_run=False,
    )
    parser.add_argument("ids", metavar="ID", nargs="+", help="ids of two runs or more, their beginnings, or names")
    add_json(parser, "print one JSON object")
    parser.add_argument(
        "--example",
        type=natural,
        metavar="N",
        help="instead: the rollouts of this example, by its number in the first run, in each of them; with --env",
    )
    parser.add_argument("-e", "--env", metavar="NAME", help="the environment that --example is of")
    parser.add_argument(
        "-n", "--num", type=count, default=20, metavar="N", help="rollouts of each run (20; at most 200)"
    )
    chosen = parser.parse_args(arguments)
    if not 2 <= len(chosen.ids) <= MOST:
        return fail(f"expected from 2 to {MOST} runs, not {len(chosen.ids)}", title="Nothing was compared")
    try:
        with Registry(reading=True) as registry:
            runs, unknown = _found(registry, chosen.ids)
    except StateError as error:
        return fail(str(error), title="Nothing was compared")
    if unknown:
        return fail("\n".join(unknown), title="Nothing was compared")
    if len({run.id for run in runs}) < len(runs):
        return fail("a run is given twice; give different ones", title="Nothing was compared")
    if (chosen.example is None) != (chosen.env is None):
        said = "--example and --env go together: an example is one of an environment"
        return fail(said, title="Nothing was compared")
    if chosen.example is not None:
        return _example(runs, chosen)
    return _compare(runs, chosen)


def _found(registry: Registry, ids: list[str]) -> tuple[list[Run], list[str]]:
    """The runs, and a complaint for each id that names none."""
    runs, unknown = [], []
    for given in ids:
        try:
            runs.append(registry.find(given))
        except UnknownRunError as error:
            unknown.append(str(error))
    return runs, unknown


def _compare(runs: list[Run], chosen: argparse.Namespace) -> int:
    from primerl.runs.dashboard.told import compared

    for run in runs:
        note_of_run(run.output_dir)
    found = compared(runs)
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return BAD_INPUT if all(one["problem"] for one in found["runs"]) else 0


def _example(runs: list[Run], chosen: argparse.Namespace) -> int:
    from primerl.runs.dashboard.told import MOST_ROLLOUTS
    from primerl.runs.example import rollouts_of
    from primerl.runs.listings import UnknownExampleError, environments_of

    said = gone(runs[0])
    if said is not None:  # by which the example is known
        return fail(said, title="Its folder is gone")
    if chosen.num > MOST_ROLLOUTS:
        return fail(f"--num {chosen.num}: at most {MOST_ROLLOUTS} of each run are shown", title="Nothing was compared")
    known = environments_of(runs[0].output_dir)
    if known and chosen.env not in known:
        return fail(f"--env {chosen.env!r}: {runs[0].id} has {', '.join(known)}", title="Nothing was compared")
    for run in runs:
        note_of_run(run.output_dir)
    try:
        found = rollouts_of(runs, chosen.env, chosen.example, chosen.num)
    except UnknownExampleError as error:
        return fail(f"{runs[0].id}: {error}", title="Nothing was compared")
    if chosen.json:
        print(json.dumps(found, indent=2))
        return 0 if found["runs"] else BAD_INPUT
    rows = [
        [_name(run), _when(one), one["status"], one["reward"], one["sampled_tokens"], _line(one["answer"])]
        for run in runs
        for one in found["runs"].get(run.id, {"rollouts": []})["rollouts"]
    ]
    prompts = (one["prompt"] for told in found["runs"].values() for one in told["rollouts"])
    prompt = next(filter(None, prompts), None)
    if prompt is not None:
        print(f"example {chosen.example} of {chosen.env!r}:\n{textwrap.indent(_cut(prompt.strip()), '  ')}")
    if rows:
        show(["run", "at", "status", "reward", "tokens", "answer"], rows, right=(3, 4))
    elif found["runs"]:
        print(f"no rollout of example {chosen.example} of {chosen.env!r} is known")
    for run in runs:
        if run.id in found["problems"]:
            print(f"{run.id}: {found['problems'][run.id]}")
    return 0 if found["runs"] else BAD_INPUT


def _name(run: Run) -> str:
    return f"{run.name} ({run.id})"


def _when(rollout: dict[str, Any]) -> str | None:
    if rollout["step"] is not None:
        return f"step {rollout['step']}"
    return None if rollout["evaluates"] is None else f"v{rollout['evaluates']}"


def _cut(prompt: str) -> str:
    left = len(prompt) - PROMPT
    shown = "\n".join(printable(line.expandtabs()) for line in prompt[:PROMPT].splitlines())
    return shown if left <= 0 else f"{shown}... ({left:,} more characters; --json has all of it)"


def _line(text: str | None) -> str | None:
    if text is None:
        return None
    line = printable(" ".join(text.split()))
    return line if len(line) <= ANSWER else f"{line[:ANSWER]}..."


def _print(found: dict[str, Any]) -> None:
    runs = found["runs"]
    names = [f"{run['name']} ({run['id']})" for run in runs]
    show(["", *names], _overview(runs), right=tuple(range(1, len(names) + 1)))
    if found["config"]:
        print("\nconfigs: what differs")
        show(["key", *names], [[row["key"], *map(_text, row["values"])] for row in found["config"]])
    else:
        print("\nconfigs: nothing differs")
    if found["evaluations"]:
        print(
            "\nevaluations: the newest of each environment, with 95 % intervals; differences to the first, tested by "
            "pairs of examples where p is given"
        )
        show(["environment", "score", *names], [_scores(row) for row in found["evaluations"]])
    for run in runs:
        if run["problem"]:
            print(f"{run['id']}: {run['problem']}")


def _overview(runs: list[dict[str, Any]]) -> list[list[Any]]:
    def row(title: str, pick: Any) -> list[Any]:
        return [title, *(pick(run) for run in runs)]

    def costs(name: str, form: str) -> Any:
        return lambda run: None if run["cost"].get(name) is None else format(run["cost"][name], form)

    return [
        row("status", lambda run: run["status"]),
        row("steps", lambda run: run["step"]),
        row("reward, last 5 steps", lambda run: run["reward"]),
        row("wall time, s", costs("wall_s", ",.0f")),
        row("tokens sampled", costs("sampled_tokens", ",.0f")),
        row("tokens trained", costs("trained_tokens", ",.0f")),
        row("CPU hours", costs("cpu_hours", ".3g")),
        row("GPU hours", costs("gpu_hours", ".3g")),
        row("checkpoints", lambda run: _saved(run["checkpoints"])),
    ]


def _saved(rows: list[dict[str, Any]]) -> str | None:
    if not rows:
        return None
    return f"{len(rows)}, the last of step {rows[-1]['step']}, {size(sum(row['bytes'] for row in rows))}"


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _scores(row: dict[str, Any]) -> list[Any]:
    cells = [_score(*pair) for pair in zip(row["values"], row["differences"], strict=True)]
    return [row["environment"], row["score"], *cells]


def _score(value: dict[str, Any] | None, difference: dict[str, Any] | None) -> str | None:
    if value is None:
        return None
    text = f"{value['mean']:.3f}"
    if value["low"] is not None:
        text += f" [{value['low']:.3f}, {value['high']:.3f}]"
    text += "" if value["complete"] else " (incomplete)"
    if difference is None:
        return text
    text += f", {difference['by']:+.3f}"
    if difference["low"] is not None:
        text += f" [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    if difference["significant"] is None:
        return text
    text += " significant" if difference["significant"] else " not significant"
    return text if difference["p"] is None else f"{text} (p {difference['p']:.2g}, {difference['pairs']} pairs)"
