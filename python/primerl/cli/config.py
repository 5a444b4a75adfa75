"""`primerl config`: what the keys of a config mean."""

from __future__ import annotations

import json
import os
from pathlib import Path

from primerl.cli.arguments import CommandParser
from primerl.config.describe.forms import FORMS
from primerl.config.errors.fail import fail

TITLE = "No config"


def config(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    if chosen.what == "explain":
        return explain(chosen.key, chosen.of)
    if chosen.what == "schema":
        print(json.dumps(schema(chosen.of), indent=2))
        return 0
    return reference(chosen.output)


def parser() -> CommandParser:
    main = CommandParser(prog="primerl config", description="What the keys of a config mean.")
    commands = main.add_subparsers(dest="what", required=True, metavar="COMMAND")
    explained = commands.add_parser(
        "explain", help="type, default, bounds and meaning of a key, or the keys of a section"
    )
    explained.add_argument("key", help="dotted, such as trainer.optim.lr or orchestrator.train.env[].ratio")
    explained.add_argument("--of", choices=FORMS, help="of this command's config only; default: of all")
    schema_of = commands.add_parser("schema", help="JSON schema of a config, for editors")
    schema_of.add_argument("--of", choices=FORMS, default="rl", help="the command whose config it is (rl)")
    page = commands.add_parser("reference", help="every key of every config, as a page of Markdown")
    page.add_argument("--output", type=Path, help="write it to this file in place of printing it")
    return main


def explain(key: str, of: str | None) -> int:
    from primerl.config.describe.help import UnknownFieldError
    from primerl.config.describe.help import explain as text_of

    try:
        print(text_of(key, of))
    except UnknownFieldError as error:
        return fail(str(error), title="Not explained")
    return 0


def schema(form: str) -> dict[str, object]:
    """JSON schema of what a file may hold: a key that has to be set may be in another file, or on the command line."""
    found = FORMS[form].cls.model_json_schema(by_alias=False)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **found,
        "title": f"{FORMS[form].command} @ FILE.toml",
    }


def reference(output: Path | None) -> int:
    from primerl.config.describe.reference import page

    text = page()
    if output is None:
        print(text, end="")
        return 0
    from primerl.config.process_files.files import write_text

    try:
        write_text(output, text)
    except OSError as error:
        return fail(f"--output {os.fspath(output)} cannot be written: {error}", title=TITLE)
    return 0
