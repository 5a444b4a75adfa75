"""Measures the hosted models on tiny folders of their architectures, and writes the table of `docs/models.md`.

    python scripts/hosted_models.py            # some fifteen minutes on two cores; needs `make build vllm`
    python scripts/hosted_models.py --print    # shows the table only

Exits with 1 if something is missing for a model; the table has the reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

import hosted_table  # noqa: E402 (the tests' own modules)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="leave docs/models.md as it is")
    chosen = parser.parse_args()
    print(hosted_table.head(), flush=True)
    rows = list(hosted_table.rows(lambda line: print(line, flush=True)))
    if not chosen.print:
        hosted_table.write(REPOSITORY / "docs" / "models.md", rows)
    return 0 if all(row.is_whole for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
