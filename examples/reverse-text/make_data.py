"""Write sloppy demonstrations for supervised fine-tuning, one JSON object `{"prompt", "completion"}` a line.

    python examples/reverse-text/make_data.py --output data.jsonl --rows 19200 --seed 0

20 % of the answers are cut short and, independently, 50 % lack their tags: 40 % are right, and a perfect imitator
earns a mean reward of about 0.46. What is left to learn is left for reinforcement learning.
Strings of the evaluation split are never among them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from reverse_text.strings import Alphabet, prompt, sloppy, strings


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--rows", type=int, default=19_200, help="demonstrations to write (600 steps of 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the strings and their mistakes")
    parser.add_argument("--truncate", type=float, default=0.2, help="share of answers that are cut short")
    parser.add_argument("--untag", type=float, default=0.5, help="share of answers without their tags")
    parser.add_argument("--letters", default="a-z", help="range of letters")
    parser.add_argument("--min-length", type=int, default=4, help="fewest letters of a string")
    parser.add_argument("--max-length", type=int, default=8, help="most letters of a string")
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    for name in ("truncate", "untag"):
        if not 0 <= getattr(options, name) <= 1:
            parser.error(f"--{name} is a share between 0 and 1")
    try:
        options.alphabet = Alphabet(options.letters, options.min_length, options.max_length)
    except ValueError as error:
        parser.error(str(error))
    return options


def demonstrations(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    mistakes = random.Random(f"reverse-text/mistakes/{options.seed}")
    for text in itertools.islice(strings(options.alphabet, "train", options.seed), options.rows):
        yield {"prompt": prompt(text), "completion": sloppy(text, mistakes, options.truncate, options.untag)}


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    temporary = options.output.with_name(f"{options.output.name}.{os.getpid()}.tmp")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        for row in demonstrations(options):
            file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(options.output)
    print(f"wrote {options.rows} demonstrations to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
