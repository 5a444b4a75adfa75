"""Write sloppy demonstrations for supervised fine-tuning, one JSON object `{"messages": [...]}` a line.

    python examples/sort-letters/make_data.py --output data.jsonl --rows 9600 --seed 0

In 70 % of them every turn sorts only its own letters and forgets the earlier ones.
Examples of the evaluation split are never among them.
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
from typing import Any

from sort_letters.letters import examples, gold, message


def demonstrations(rows: int, seed: int, forgetful: float) -> Iterator[dict[str, Any]]:
    mistakes = random.Random(f"sort-letters/mistakes/{seed}")
    for turns in itertools.islice(examples("train", seed), rows):
        forgets = mistakes.random() < forgetful
        messages = []
        for turn, letters in enumerate(turns):
            answer = "".join(sorted(letters)) if forgets else gold(turns, turn)
            messages += [
                {"role": "user", "content": message(turns, turn)},
                {"role": "assistant", "content": answer},
            ]
        yield {"messages": messages}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--rows", type=int, default=9_600, help="demonstrations to write (300 steps of 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the letters and their mistakes")
    parser.add_argument(
        "--forgetful", type=float, default=0.7, help="share of demonstrations that sort each turn alone"
    )
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    if not 0 <= options.forgetful <= 1:
        parser.error("--forgetful is a share between 0 and 1")
    temporary = options.output.with_name(f"{options.output.name}.{os.getpid()}.tmp")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        for row in demonstrations(options.rows, options.seed, options.forgetful):
            file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(options.output)
    print(f"wrote {options.rows} demonstrations to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
