"""The whole command, from a model folder, on every kind of file that `docs/sft.md` names."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.data.tables import BUILDERS
from sft_helpers import metrics, write_rows

pytestmark = pytest.mark.processes

ROWS: list[dict[str, Any]] = [{"prompt": text, "completion": text * 2} for text in "abcdefgh"]
# A process for each command, since `transformers` is imported once in a process. What takes long and is not under test
# here is imported before.
RUN = """
import os, sys
import datasets, primerl.cli, primerl.train.loop.sft
assert "transformers" not in sys.modules
outputs, paths = sys.argv[2], sys.argv[3:]
codes = []
for path in paths:
    child = os.fork()
    if not child:
        name = os.path.basename(path)
        arguments = ["sft", "--model.path", sys.argv[1], "--data.path", path, "--output-dir", f"{outputs}/{name}"]
        arguments += "--max-steps 1 --threads 1 --data.batch-size 32 --data.seq-len 32".split()
        try:
            code = primerl.cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        os._exit(code or 0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("codes", codes)
"""


def files(folder: Path) -> dict[str, Path]:
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(ROWS)
    kinds = ("jsonl", "ndjson", "json", "parquet", "arrow", "csv", "saved", "folder")
    paths = {kind: folder / f"rows.{kind}" for kind in kinds}
    for kind in ("jsonl", "ndjson"):
        write_rows(paths[kind], *ROWS)
    paths["json"].write_text(json.dumps(ROWS))
    table.to_parquet(paths["parquet"])
    table.to_csv(paths["csv"])
    table.save_to_disk(paths["saved"])
    paths["arrow"].write_bytes(next(paths["saved"].glob("*.arrow")).read_bytes())
    paths["folder"].mkdir()
    table.to_parquet(paths["folder"] / "train-00000-of-00001.parquet")
    paths["gz"] = folder / "rows.jsonl.gz"
    paths["gz"].write_bytes(gzip.compress(paths["jsonl"].read_bytes()))
    assert {suffix.removeprefix(".") for suffix in BUILDERS} <= paths.keys()
    return paths


@pytest.mark.timeout(300)
def test_every_kind_of_file_trains_from_a_model_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1))
    paths = files(tmp_path)
    given = [str(model), str(tmp_path / "runs"), *map(str, paths.values())]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *given],
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert f"codes {[0] * len(paths)}" in done.stdout, said
    losses = {metrics(tmp_path / "runs" / path.name)[-1]["loss/mean"] for path in paths.values()}
    assert len(losses) == 1, "the same rows in the same order"
