"""`primerl template check`: which conversations extend, which fork, and why."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from primerl.cli.arguments import CommandParser
from primerl.cli.journal import add_json
from primerl.config.errors.fail import fail

TITLE = "Not checked"
NOTES = {
    "extends": "the recorded tokens stay as they were sampled, and only the new messages are rendered",
    "forks": "the conversation is rendered in full, and trained as a branch of its own",
    "refused": "the template does not take the conversation; a request with it is refused, too",
}


def template(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl template",
        description="What a model's chat template does to conversations. A turn extends where the template's text for "
        "the new messages is proven not to depend on what came before; otherwise it forks.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="show for every turn whether it extends or forks, and why")
    check.add_argument("model", type=Path, help="model folder: tokenizer.json and a chat template")
    check.add_argument(
        "--conversations",
        type=Path,
        metavar="FILE.jsonl",
        help="your own: a JSON object a line, with messages and optional tools, documents, chat_template_kwargs",
    )
    add_json(check)
    chosen = parser.parse_args(arguments)
    return check_template(chosen.model, chosen.conversations, chosen.json)


def check_template(model: Path, conversations: Path | None, as_json: bool) -> int:
    from primerl.render import Renderer, RenderError

    try:
        renderer = Renderer(model)
        scenarios = renderer.check_template()
        own = [] if conversations is None else renderer.check_template(conversations)
    except RenderError as error:
        return fail(str(error), title=TITLE)
    stops = [renderer.decode([token]) for token in renderer.stop_token_ids]
    if as_json:
        about = {
            "model": str(model),
            "stop_tokens": stops,
            "tool_parser": renderer.tool_parser,
            "reasoning_parser": renderer.reasoning_parser,
            "tokenizer": renderer.backend,
            "tokenizer_reason": renderer.backend_reason,
        }
        print(json.dumps({**about, "scenarios": scenarios, "conversations": own}))
        return 0
    print(f"{model}: a turn ends with {' or '.join(stops) or 'no known token'}")
    print(f"  tool calls: parser {renderer.tool_parser}; reasoning: parser {renderer.reasoning_parser}")
    if renderer.backend_reason is not None:
        print(f"  encoded by the slower library, the fast one cannot be trusted: {shortened(renderer.backend_reason)}")
    print("\n".join(section("built-in scenarios", scenarios)))
    if conversations is not None:
        print("\n".join(section(str(conversations), own)))
    return 0


def section(title: str, turns: list[dict[str, Any]]) -> list[str]:
    from primerl.runs.tables import table

    header = ("conversation", "answer", "then", "verdict", "why")
    rows = [
        (
            turn["conversation"],
            f"messages[{turn['answer']}]",
            ", ".join(turn["new_messages"]),
            turn["verdict"],
            why(turn),
        )
        for turn in turns
    ]
    totals = Counter(turn["verdict"] for turn in turns)
    reasons = dict.fromkeys(f"  {turn['reason']}: {turn['detail']}" for turn in turns if turn["verdict"] == "forks")
    lines = [f"{totals[verdict]} {verdict}: {note}" for verdict, note in NOTES.items() if totals[verdict]]
    return [
        title,
        *(table(header, rows) if rows else ["  no turn follows an assistant message"]),
        *reasons,
        *lines,
    ]


def why(turn: dict[str, Any]) -> str:
    if turn["verdict"] == "extends":
        text = f"closed by {turn['closes_with']}, {turn['tokens']} tokens"
        return text + (", keeps what a full render would rewrite" if turn["keeps_history"] else "")
    return str(turn["reason"] if turn["verdict"] == "forks" else turn["detail"])


def shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} .."
