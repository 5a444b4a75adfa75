"""Every published command, with `primerl` in place of `prime` or `uv run`: tests/published_commands.tsv.

`ends` is an exit code, or `starts`: what is read of the command line would be started; other tests do.
Of a command that only a service has, `says` and `note` are empty: its sentence is that of `primerl.cli.services`.
"""

from __future__ import annotations

import contextlib
import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl import cli
from primerl.cli import services
from primerl.launch.preflight import checker
from primerl.models.tiny import TinyConfig, write_model
from run_helpers import begin, end
from test_config import tree
from test_config_hosted import LEAST

HERE = Path(__file__).parent
STARTS = "starts"


@dataclass(frozen=True)
class Published:
    published: str
    run: str
    ends: str
    says: str
    note: str

    @property
    def words(self) -> list[str]:
        # JSON has no blanks there, and keeps its quotes.
        return self.run.split(" ")

    @property
    def service(self) -> str | None:
        """Its row in the table of commands that only a service has, by its longest beginning that has one."""
        words = ["rl" if word == "train" else word for word in self.words]
        beginnings = (" ".join(words[:length]) for length in range(len(words), 0, -1))
        return next((found for found in beginnings if services.instead(found)), None)

    @property
    def instead(self) -> str:
        assert self.service is not None, f"{self.run}: it has neither a sentence of its own nor one of the table"
        return services.INSTEAD[self.service].format(program="primerl rl")


def rows() -> list[Published]:
    with (HERE / "published_commands.tsv").open(encoding="utf-8", newline="") as file:
        return [Published(**row) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


ROWS = rows()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace as `lab setup` writes it, with a small model, configs and a run in the list."""
    folder = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PRIMERL_STATE_DIR", str(folder / "state"))
        assert cli.main(["lab", "setup", "--skip-install"]) == 0
        small = TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16)
        write_model(folder / "outputs" / "tiny", small, seed=3)
        Path("tiny").symlink_to("outputs/tiny")
        Path("my-config.toml").write_text(tomli_w.dumps(LEAST), encoding="utf-8")
        Path("rl.toml").write_text(tomli_w.dumps(tree()), encoding="utf-8")
        chat = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]}
        Path("chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 4, encoding="utf-8")
        sft = {
            "max_steps": 1,
            "model": {"path": "tiny"},
            "data": {"path": "chats.jsonl", "batch_size": 256, "seq_len": 256},
        }
        Path("sft.toml").write_text(tomli_w.dumps(sft), encoding="utf-8")
        for name in ("my-run", "old-run"):
            end(begin(folder / name, name=name))
        (folder / "my-run" / "logs").mkdir()
        (folder / "my-run" / "logs" / "trainer.log").write_text("the trainer speaks\n", encoding="utf-8")
        steps = [{"step": step, "reward/all/mean": step / 10} for step in (1, 2)]
        lines = "".join(f"{json.dumps(step)}\n" for step in steps)
        (folder / "my-run" / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def workspace(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(prepared / "state"))
    monkeypatch.setenv("PRIMERL_FORK_SERVER", "0")
    return prepared


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What would begin: its form and its config. No process is started ahead of it."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(checker, "environments_ahead", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("primerl.forking.servers.begin", lambda *_, **__: None)
    monkeypatch.setattr("primerl.launch.run.run", lambda config, form: found.append((form, config)) or 0)
    monkeypatch.setattr("primerl.launch.evaluation.run", lambda config: found.append(("eval", config)) or 0)
    return found


def asks_for_gpus(row: Published) -> bool:
    return row.run.endswith(" models")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.run, marks=[pytest.mark.processes] if asks_for_gpus(row) else []) for row in ROWS],
)
def test_a_published_command(
    row: Published,
    workspace: Path,
    started: list[tuple[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del workspace
    if "gepa" in row.run and "gepa" not in cli.COMMANDS:
        pytest.skip("primerl gepa is not here")
    variable, equals, level = row.published.partition(" ")[0].partition("=")
    if equals:
        monkeypatch.setenv(variable, level)
    code = 0 if row.ends == STARTS else int(row.ends)
    assert ended(row.words) == code, capsys.readouterr()
    printed = capsys.readouterr()
    if row.ends == STARTS:
        [(form, config)] = started
        said = f"{form} {config.model_dump_json()}"
        assert row.says in said
        assert form != "full" or config.log.level == (level or "info")
        return
    assert not started
    said = printed.err if code else printed.out
    assert (row.says or row.instead) in " ".join(said.split())
    # One sentence, below a title where there is one.
    assert code == 0 or len([line for line in said.splitlines() if not line.endswith(":")]) == 1, said


def ended(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as end:  # help
        return int(end.code or 0)


def test_no_command_is_refused_unpublished() -> None:
    """Each row of the table is a command of the list, and each command of the list has one row of the page."""
    assert {row.service for row in ROWS if not row.says} == services.INSTEAD.keys()
    assert len({row.published for row in ROWS}) == len(ROWS)


def test_the_page_has_every_command(repository: Path) -> None:
    """docs/migration.md, *Commands*: a row for each, in the order of the list."""
    text = (repository / "docs" / "migration.md").read_text(encoding="utf-8")
    section = text.split("\n## Commands\n")[1].split("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == [line_of(row) for row in ROWS]


def line_of(row: Published) -> str:
    """As the page has it; a command of which the help was asked for, as it is meant."""
    if not row.says:
        return f"| `{row.published}` | - | {row.instead} |"
    meant = row.published.removeprefix("prime ").removeprefix("uv run ")
    shown = meant if row.run.endswith(" --help") else row.run.removesuffix(" --skip-install")
    return f"| `{row.published}` | `primerl {shown}` | {row.note} |"
