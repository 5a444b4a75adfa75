"""The hosted models, tiny, through the commands that users have: checked, fine-tuned, trained whole and by an adapter
on an engine of this machine, verified, and their published names compared with those that vLLM loads.

Weights are random, and no reward moves them: a bonus for entropy does, so that versions differ.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_helpers import VLLM_PYTHON
from hosted_models import HOSTED
from hub_folders import write_hub_folder
from primerl.inference.vllm.checkpoint import CheckpointError, Frozen, read, tensors_of

STEPS = 3
IN_HALF_PRECISION = 2e-2
"""Mean difference, nats, that bfloat16 may make."""
HOSTED_TOML = """\
model = "{model}"
max_steps = {steps}
batch_size = 8
rollouts_per_example = 4
learning_rate = 1e-2
output_dir = "{folder}/dry"
seq_len = 256

[sampling]
max_tokens = 16

[[env]]
id = "primeintellect/reverse-text"
taskset = {{ split = "train", letters = "a-j", min_length = 3, max_length = 6 }}
"""
FULL_TOML = """\
max_steps = {steps}
output_dir = "{folder}/whole"
seq_len = 256
model.path = "{model}"
[orchestrator]
batch_size = 8
group_size = 4
sampling.max_tokens = 16
[[orchestrator.train.env]]
id = "reverse-text"
taskset = {{ split = "train", letters = "a-j", min_length = 3, max_length = 6 }}
"""
SFT_TOML = """\
max_steps = {steps}
output_dir = "{folder}/sft"
threads = 1
model.path = "{model}"
data = {{ path = "{folder}/rows.jsonl", batch_size = 128, seq_len = 128 }}
optim.lr = 1e-3
"""
TRAINS = [
    *("--trainer.threads", "1", "--trainer.optim.lr", "1e-2", "--trainer.loss.entropy-weight", "1"),
    *("--ckpt.interval", str(STEPS), "--keep-broadcasts"),
]
EXACT = re.compile(r"mean \|difference\| (\S+).*max +\|difference\| (\S+)", re.DOTALL)


class FailedError(Exception):
    """A command ended with another code than 0; the message is its reason."""


@dataclass(frozen=True)
class Column:
    title: str
    measure: Callable[[Path, Path], str]
    """Given a folder for its files, and the model's; returns what is in the table. Raises FailedError."""


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "primerl", *arguments]
    environment = {**os.environ, "PRIMERL_STATE_DIR": str(folder / "state")}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment)


def primerl(folder: Path, *arguments: str) -> str:
    """What a command prints. Raises FailedError."""
    done = started(folder, *arguments)
    if done.returncode:
        raise FailedError(_reason(done.stdout + done.stderr))
    return done.stdout


def _reason(printed: str) -> str:
    """The last sentence of what a command printed, on one line. A library's advice is not a reason."""
    stripped = (line.strip() for line in printed.splitlines())
    lines = [line for line in stripped if line and not line.startswith("[transformers]")]
    return (lines[-1] if lines else "it said nothing").replace("|", "/")


def _written(folder: Path, model: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text.format(model=model, folder=folder, steps=STEPS))
    return str(file)


def dry_run(folder: Path, model: Path) -> str:
    primerl(folder, "rl", "@", _written(folder, model, "hosted.toml", HOSTED_TOML), "--dry-run")
    return "yes"


def fine_tuned(folder: Path, model: Path) -> str:
    rows = [{"prompt": f"Reverse: {word}", "completion": word[::-1]} for word in ("abc", "hat", "bead", "fig") * 8]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    primerl(folder, "sft", "@", _written(folder, model, "sft.toml", SFT_TOML))
    lines = (folder / "sft" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    return "yes"


def verified(run: Path, *, exact: bool = True) -> str:
    """Mean and largest difference between the engine and `transformers` alone. Raises FailedError."""
    done = started(run.parent, "verify", str(run))
    found = EXACT.search(done.stdout)
    if found is None or (exact and done.returncode):
        raise FailedError(_reason(done.stdout + done.stderr))
    mean, largest = (float(number) for number in found.groups())
    if mean > IN_HALF_PRECISION:
        raise FailedError(f"log-probabilities differ by {mean:.0e} in the mean")
    return f"{mean:.0e} / {largest:.0e}".replace("e-0", "e-")


def trained_whole(folder: Path, model: Path, *flags: str) -> str:
    primerl(folder, "rl", "@", _written(folder, model, "rl.toml", FULL_TOML), *TRAINS, *flags)
    _versions_differ(folder / "whole")
    return verified(folder / "whole")


def trained_by_adapter(folder: Path, model: Path, *flags: str) -> str:
    """The full form of what the dry run checked."""
    resolved = folder / "dry" / "configs" / "rl.toml"
    if not resolved.is_file():
        raise FailedError("its dry run failed")
    own = ["--output-dir", str(folder / "adapter"), "--no-dry-run"]
    primerl(folder, "rl", "@", str(resolved), *own, *TRAINS, *flags)
    _versions_differ(folder / "adapter")
    return verified(folder / "adapter")


def _versions_differ(run: Path) -> None:
    manifests = run.glob("broadcasts/step_*/manifest.json")
    digests = {json.loads(file.read_text())["digest"] for file in manifests}
    assert len(digests) == STEPS + 1, run


def named_as_vllm_does(folder: Path, model: Path) -> str:
    """By the check that the engine in vLLM makes of a published version, against the model's own folder."""
    published = folder / "whole" / "broadcasts" / f"step_{STEPS}"
    if not published.is_dir():
        raise FailedError("nothing was published")
    tied = bool(json.loads((model / "config.json").read_text()).get("tie_word_embeddings"))
    own = tensors_of(model, tied=tied)
    try:
        read(published, {name: tuple(tensor.shape) for name, tensor in own.items()}, frozen=Frozen(own))
    except CheckpointError as error:
        raise FailedError(_reason(str(error))) from None
    return "yes"


def trained_on_vllm(folder: Path, model: Path) -> str:
    """All weights again, with vLLM's CPU build as the engine, each of whose answers is of the newest version."""
    if not VLLM_PYTHON.exists():
        raise FailedError("there is no vLLM; `make vllm` makes it")
    text = json.loads((model / "config.json").read_text())
    dtype = "bfloat16" if "linear_key_head_dim" in text.get("text_config", text) else "float32"
    run = folder / "vllm"
    engine = ["--inference.backend", "vllm", "--inference.python", str(VLLM_PYTHON), "--inference.dtype", dtype]
    flags = ["--output-dir", str(run), *engine, "--orchestrator.max-async-level", "0", *TRAINS]
    try:
        primerl(folder, "rl", "@", _written(folder, model, "rl.toml", FULL_TOML), *flags)
    except FailedError as error:
        if "which vLLM 0.32 has for GPUs only" in str(error):
            return "on GPUs only"
        raise
    _versions_differ(run)
    proved = (run / "logs" / "orchestrator.log").read_text().count("engine proved its weights")
    assert proved == STEPS + 1, run
    exact = dtype == "float32"
    return verified(run, exact=exact) + ("" if exact else f" ({dtype})")


COLUMNS = (
    Column("dry run of a hosted TOML", dry_run),
    Column("`sft`", fine_tuned),
    Column("`rl`, all weights: verify, mean / max", trained_whole),
    Column("the same by an adapter", trained_by_adapter),
    Column("names as vLLM's loader has them", named_as_vllm_does),
    Column("`rl` on vLLM, on a CPU", trained_on_vllm),
)


@dataclass(frozen=True)
class Row:
    models: tuple[str, ...]
    cells: tuple[str, ...]
    """What was measured, or `no:` and the reason."""

    @property
    def is_whole(self) -> bool:
        return not any(cell.startswith("no: ") for cell in self.cells)

    @property
    def line(self) -> str:
        return f"| {', '.join(self.models)} | {' | '.join(self.cells)} |"


def kinds() -> list[tuple[str, ...]]:
    """The hosted models, those together whose tiny folders are the same."""
    found: dict[str, list[str]] = {}
    for name, config in HOSTED.items():
        found.setdefault(json.dumps(config, sort_keys=True), []).append(name)
    return [tuple(names) for names in found.values()]


def measure(models: tuple[str, ...], folder: Path, columns: Iterable[Column] = COLUMNS) -> Row:
    """Each column, whatever became of the ones before. `folder`: empty, for all of it."""
    model = write_hub_folder(folder / "model", models[0])
    cells = []
    for column in columns:
        try:
            cells.append(column.measure(folder, model))
        except FailedError as error:
            cells.append(f"no: {error}".replace(str(folder), "").strip())
    return Row(models, tuple(cells))


def rows(said: Callable[[str], None] = print) -> Iterator[Row]:
    for models in kinds():
        with tempfile.TemporaryDirectory() as folder:
            row = measure(models, Path(folder))
        said(row.line)
        yield row


def head() -> str:
    return f"| model | {' | '.join(column.title for column in COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}"


def _table(lines: list[str]) -> tuple[int, int]:
    """Where the table begins and ends, whatever columns it has."""
    begin = next(index for index, line in enumerate(lines) if line.startswith(f"| model | {COLUMNS[0].title} |"))
    return begin, next((index for index in range(begin, len(lines)) if not lines[index].startswith("|")), len(lines))


def lines_in(page: Path) -> list[str]:
    """The table's rows on that page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin, end = _table(lines)
    return lines[begin + 2 : end]


def write(page: Path, measured: list[Row]) -> None:
    """Puts these rows in place of those on the page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin, end = _table(lines)
    lines[begin:end] = [*head().splitlines(), *(row.line for row in measured)]
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")
