"""Tests README, docs/ and the examples' READMEs: every command is run, every TOML block read, every link followed.
`docs/README.md` ("Writing a page") has the conventions; a command is treated like this:

- A page is followed from its top, in a folder like a fresh clone that also has what a reader is supposed to have (see
  `reader`). A block whose first line is a comment with a file's name (`# rl.toml`) is written there.
- A command that starts a run gets `--dry-run` appended: everything is checked, nothing is started. After
  `<!-- trains with: OPTIONS -->` it is run for real, with these options appended (`--max-steps 2`), and so is a script.
- A command that runs until Ctrl-C (`page`, `dashboard`, `logs -f`) is ended after its first line, and gets any free
  port; `top` shows an active run.
- `make TARGET` is a `make --dry-run`. `pip install -e FOLDER` installs into a folder of the test; what else pip would
  fetch has to be an extra of this project. Other programs than those of `docs_commands.TOOLS` need a mark.
- After `<!-- run by: tests/test_x.py -->` that test takes the commands from the page (`docs_pages.shown`) and runs
  them, with what it needs.
- After `<!-- not run: why -->` nothing is run, but a command of primerl has to parse, and its config has to load. These
  are the skipped tests, with their reasons.
- A TOML block that is not a file is a fragment: merged into a whole config of its form, it has to be valid. Its keys
  decide the form, or a comment does: `<!-- fragment of: sft.toml -->`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_commands import Reader
from docs_pages import Block, Page, PageError, pages, reads, shown
from end_to_end import read_lines
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import keys_of_one_form, load_run
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig
from primerl.config.schema.simulate import SimulateConfig
from primerl.evals import endpoints
from primerl.launch.preflight import training
from run_helpers import CONFIG, write_run
from sft_helpers import write_rows

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = pages(REPOSITORY)
BLOCKS = [block for page in PAGES for block in page.blocks]
# Models that the examples start from and other commands create: here with random weights.
IMITATORS = (
    "outputs/reverse-text/sft/weights/step_600",
    "outputs/reverse-text-ci/sft/weights/step_300",
    "outputs/sort-letters/sft/weights/step_300",
)
TRAINED = "outputs/reverse-text/rl/weights/step_60"
# 128 rollouts, so that a page may ask for the 100th.
FINISHED = ["--max-steps", "4", "--orchestrator.batch-size", "32", "--keep-broadcasts"]
# Keeps a run active: its rollouts wait for a worker that never comes.
NO_WORKER = ["--orchestrator.train.env.0.num-workers", "0"]
HOSTED = """
model = "models/mine"
max_steps = 2
batch_size = 8
rollouts_per_example = 4
[sampling]
max_tokens = 16
[[env]]
id = "reverse-text"
"""
SFT = """
output_dir = "outputs/sft"
max_steps = 2
[model]
path = "models/mine"
[data]
path = "data/chats.jsonl"
"""

pytestmark = pytest.mark.usefixtures("own_logging")


def of(found: list[Any]) -> dict[str, Any]:
    """Parameters, named by their place."""
    return {"argvalues": found, "ids": [getattr(item, "place", getattr(item, "name", "")) for item in found]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small run's config, its model, rows, and the programs of this source tree."""
    folder = tmp_path_factory.mktemp("docs")
    write_run(folder)
    (folder / "hosted.toml").write_text(HOSTED)
    (folder / "sft.toml").write_text(SFT)
    rows = [{"prompt": f"Reverse: {number:03d}", "completion": f"{number:03d}"[::-1]} for number in range(200)]
    for name in ("chats", "held-out"):
        write_rows(folder / f"{name}.jsonl", *rows)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    write_rows(folder / "conversations.jsonl", {"messages": turns, "tools": []})
    programs = folder / "bin"
    programs.mkdir()
    for name, words in (
        ("python", ""),
        ("primerl", "-m primerl"),
        ("primerl-orchestrate", "-c 'import sys; from primerl.cli import orchestrate; sys.exit(orchestrate())'"),
    ):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def finished(small: Path) -> Path:
    """The folder of a finished run."""
    command = [sys.executable, "-m", "primerl", "rl", "@", "rl.toml", "--output-dir", "rl", *FINISHED]
    variables = {**os.environ, "PRIMERL_STATE_DIR": os.fspath(small / "state")}
    done = subprocess.run(command, cwd=small, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return small / "rl"


@pytest.fixture(scope="module")
def live(small: Path) -> Iterator[Callable[[], Path]]:
    """The folder of an active run, started on demand."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> Path:
        if not processes:
            command = [sys.executable, "-m", "primerl", "rl", "@", "rl.toml", "--output-dir", "live", *NO_WORKER]
            processes.append(subprocess.Popen(command, cwd=small, stdout=subprocess.PIPE, text=True))
            output = processes[0].stdout
            assert output is not None
            assert any("the run's page" in line for line in output)
            # Its further output is unused, but must not fill the pipe.
            threading.Thread(target=output.read, daemon=True).start()
        return small / "live"

    yield start
    for process in processes:
        process.terminate()
        process.wait(timeout=400)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def checked_once() -> Iterator[None]:
    """The slow checks of a dry run, once for each config: what a page changes often does not affect them."""
    check, known = training._slow_checks, {}

    def remembered(config: RLConfig, *others: Any) -> list[str]:
        rollouts = config.orchestrator
        settings = [(entry.id, entry.arguments) for entry in (*rollouts.train.env, *rollouts.eval.env)]
        asked = [settings, os.getcwd(), config.model.path, config.seq_len, rollouts.model_dump(mode="json")]
        key = json.dumps(asked, default=str)
        if key not in known:
            known[key] = check(config, *others)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_slow_checks", remembered)
        yield


@pytest.fixture
def reader(
    small: Path, live: Callable[[], Path], tmp_path: Path, request: pytest.FixtureRequest, checked_once: None
) -> Iterator[Callable[[Page], Reader]]:
    """A folder like a fresh clone, with what pages suppose in addition: see `supposed`."""
    folder = small / "reader"
    environment = {"PRIMERL_STATE_DIR": os.fspath(tmp_path / "state"), "WANDB_API_KEY": "0" * 40}

    def ready(page: Page) -> Reader:
        shutil.copytree(REPOSITORY / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("docs", "scripts", "Makefile", "pyproject.toml"):
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
        supposed(folder, tmp_path / "state", small, page, lambda: request.getfixturevalue("finished"))
        package = tmp_path / "installed" / "my_environment"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from reverse_text import ReverseTaskset\n__all__ = ['ReverseTaskset']\n")
        place = folder / page.name if page.name.startswith("examples/") else folder / "page"
        return Reader(REPOSITORY, place.parent, small / "bin", live, dict(environment), tmp_path / "installed")

    yield ready
    command = [sys.executable, "-m", "primerl", "run"]
    variables = {**os.environ, **environment}
    # Runs that a page has started in the background.
    if (tmp_path / "state").is_dir():
        listed = subprocess.run([*command, "list", "--json"], env=variables, capture_output=True, check=True).stdout
        for run in json.loads(listed):
            if run["status"] in ("PENDING", "RUNNING"):
                stop = [*command, "stop", run["id"]]
                subprocess.run(stop, env=variables, check=True, capture_output=True, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


def supposed(folder: Path, state: Path, small: Path, page: Page, finished: Callable[[], Path]) -> None:
    """Files that a page may name without creating them. A page that trains creates its runs itself."""
    commands = [command for block in page.shell() for command in block.commands()]
    trained = any("trains with" in command.block.marks for command in commands)
    named = {word for command in commands for word in command.words}
    for name in ("models/mine", "path/to/model", "tiny", "Qwen/Qwen3-0.6B", *IMITATORS, *{TRAINED} & named):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(small / "tiny")
    (folder / "data").mkdir()
    for name in ("chats", "held-out"):
        (folder / "data" / f"{name}.jsonl").symlink_to(small / f"{name}.jsonl")
    (folder / "mine.jsonl").symlink_to(small / "conversations.jsonl")
    for name in ("rl.toml", "run.toml", "base.toml"):
        shutil.copyfile(small / "rl.toml", folder / name)
    (folder / "mine.toml").write_text("max_steps = 3\n")
    (folder / "trainer.toml").write_text("optim.lr = 1e-4\n")
    for name in ("sft.toml", "hosted.toml"):
        shutil.copyfile(small / name, folder / name)
    shutil.copyfile(REPOSITORY / "examples/plans/demo.toml", folder / "plan.toml")
    if not trained:
        for name in {"outputs/reverse-text/rl", "outputs/run", "OUTPUT_DIR", "RUN"} & named:
            shutil.copytree(finished(), folder / name, symlinks=True)
        if any(command.words[:2] == ["primerl", "run"] and command.words[3:4] == ["rl"] for command in commands):
            shutil.copytree(finished().parent / "state", state)


@pytest.mark.processes
@pytest.mark.timeout(900)  # most of the time is imports, which are slow on a busy machine
@pytest.mark.parametrize("page", **of([page for page in PAGES if any(page.shell())]))
def test_the_commands_of_a_page_work(page: Page, reader: Callable[[Page], Reader]) -> None:
    reader(page).follow(page)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```\nenv workers <-> orchestrator\n```\n", r"page.md:1: env .*no rule for 'env'.*label it `text`"),
        ("```\nit's a picture\n```\n", "page.md:1: .*is no command: No closing quotation"),
        ("```shell\nls\n```\n", "page.md:1: unknown language 'shell'"),
        ("<!-- not-run: a reason -->\n```\nls\n```\n", "page.md:2: unknown mark 'not-run'"),
        ("```\nprimerl rl @ missing.toml\n```\n", "exit code 2.*missing.toml"),
        ("```\nprimerl config explain trainer.optim.lrr\n```\n", "exit code 2.*trainer.optim.lr"),
        ("```\nls | grep missing\n```\n", "exit code 1"),
        ("<!-- not run: a reason -->\n```\nprimerl trian @ rl.toml\n```\n", "no command 'trian'"),
        ("<!-- not run: a reason -->\n```\nprimerl deploy x --serve\n```\n", "no such option: {'--serve'}"),
        ("<!-- not run: a reason -->\n```\nprimerl rl @ a.toml\n```\n", "there is no file a.toml|a.toml"),
    ],
)
def test_what_does_not_work_is_found(
    text: str, complaint: str, reader: Callable[[Page], Reader], tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(text)
    page = Page(tmp_path / "page.md", "page.md")
    with pytest.raises((PageError, AssertionError, ConfigError), match=f"(?s){complaint}"):
        reader(page).follow(page)


def test_commands_and_headings_are_found(tmp_path: Path) -> None:
    """A page without any would pass everything."""
    assert sum(len(block.commands()) for block in BLOCKS if block.is_shell) > 100
    (tmp_path / "page.md").write_text("# A `key`, & more\n## Same\n## Same\n[x](#same-1) `[no](link.md)`\n")
    page = Page(tmp_path / "page.md", "page.md")
    assert page.anchors == {"a-key--more", "same", "same-1"}
    assert page.links == ["#same-1"]


@pytest.mark.parametrize("block", **of([block for block in BLOCKS if "run by" in block.marks]))
def test_what_another_test_runs_is_run_there(block: Block) -> None:
    test = REPOSITORY / block.marks["run by"]
    assert block.is_shell, f"{block.place}: only commands are marked"
    assert test.is_file(), f"{block.place}: there is no {block.marks['run by']}"
    assert reads(test.read_text(), block.page), f"{block.place}: {test.name} does not take its commands from the page"


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("def test_it():\n    [words] = shown(__file__, 'docs/x.md')\n", True),
        ("def test_it():\n    [words] = shown(__file__, 'docs/x.md', {'a': 'b'})\n", True),
        ("def test_it():\n    [words] = shown(__file__, 'docs/y.md')\n", False),
        # Words of the commands, and of the page, are not the commands.
        ("# docs/x.md\ndef test_it():\n    primerl('deploy', '-k', '4', 'docs/x.md')\n", False),
        ("'shown(__file__, \"docs/x.md\")'\n", False),
    ],
)
def test_a_test_that_only_has_the_words_does_not_run_them(source: str, is_read: bool) -> None:
    assert reads(source, "docs/x.md") == is_read


def test_commands_are_taken_from_the_page_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "<!-- run by: tests/test_x.py -->\n```\nKEY=... primerl rl @ a.toml  # here\nprimerl rl -k \\\n    '4 b'\n```\n"
    )
    (tmp_path / "page.md").write_text(text + text.replace("test_x", "test_y") + "```\nprimerl other\n```\n")
    monkeypatch.setattr("docs_pages.REPOSITORY", tmp_path)
    assert shown("/anywhere/test_x.py", "page.md", {"KEY=...": None, "a.toml": "b.toml"}) == [
        ["primerl", "rl", "@", "b.toml"],
        ["primerl", "rl", "-k", "4 b"],
    ]
    with pytest.raises(PageError, match=r"page\.md: c\.toml for test_x\.py are not there"):
        shown("test_x.py", "page.md", {"c.toml": "b.toml"})
    with pytest.raises(PageError, match=r"page\.md: commands for test_z\.py are not there"):
        shown("test_z.py", "page.md")


@pytest.mark.parametrize("block", **of([block for block in BLOCKS if "not run" in block.marks]))
def test_what_is_not_run_says_why(block: Block) -> None:
    assert block.is_shell, f"{block.place}: only commands are marked"
    assert len(block.marks["not run"]) > 10, f"{block.place}: give the reason"
    pytest.skip(f"{block.place}: {block.marks['not run']}")


@pytest.mark.parametrize("block", **of([block for block in BLOCKS if block.language == "toml"]))
def test_a_config_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = tomllib.loads(block.text)
    if block.file is not None and Path(block.file).name == "pyproject.toml":
        assert {"name", "version"} <= given["project"].keys()
        return
    if block.file is not None and Path(block.file).name == "endpoints.toml":
        Path("block.toml").write_text(block.text, encoding="utf-8")
        assert endpoints.read(Path("block.toml"))
        return
    form, base = form_of(block, given)
    # `[env.taskset]` and the like belong to the `[[env]]` before them.
    continues = base is not None and isinstance(given.get("env"), dict)
    Path("block.toml").write_text(f"{base}\n{block.text}" if continues else block.text)
    if base is not None:
        Path("base.toml").write_text(base)
    files = ["@", "block.toml"] if base is None or continues else ["@", "base.toml", "@", "block.toml"]
    if form == "rl":
        load_run(files, program="primerl rl")
    else:
        classes = {"sft": SFTConfig, "simulate": SimulateConfig, "eval": EvalConfig, "serve": ServeConfig}
        classes["inference"] = InferenceRunConfig
        load(classes[form], files, program=f"primerl {form}")


def form_of(block: Block, given: dict[str, Any]) -> tuple[str, str | None]:
    """Which command reads it, and for a fragment what it is merged into."""
    whole = {"rl.toml": CONFIG, "sft.toml": SFT, "hosted.toml": HOSTED}
    named = block.marks.get("fragment of")
    if named is not None and named not in whole:
        raise PageError(f"{block.place}: fragment of {named!r}: expected one of {', '.join(whole)}")
    if named is not None or block.file is None:
        is_short = given.keys() & keys_of_one_form()[0] or isinstance(given.get("model"), str)
        named = named or ("hosted.toml" if is_short else "rl.toml")
        base = whole[named]
        if "subsets" in given.get("data", {}):  # in place of a single dataset
            base = base.replace('path = "data/chats.jsonl"\n', "")
        return "sft" if named == "sft.toml" else "rl", base
    if block.file in ("eval.toml", "serve.toml", "inference.toml"):
        return block.file.removesuffix(".toml"), None
    if given.keys() & {"data"} and "orchestrator" not in given:
        return "sft", None
    if "environment" in given:
        return "simulate", None
    # A second file of a run is a fragment as well.
    is_whole = "max_steps" in given and (given.keys() & frozenset.union(*keys_of_one_form()))
    return "rl", None if is_whole else CONFIG


@pytest.mark.parametrize("page", **of(PAGES))
def test_links_lead_somewhere(page: Page) -> None:
    by_path = {other.path: other for other in PAGES}
    for link in page.links:
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.path.parent / file).resolve() if file else page.path
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if anchor:
            assert anchor in by_path[target].anchors, f"{page.name}: {link}: there is no such heading"


def test_every_page_is_in_the_index() -> None:
    docs = REPOSITORY / "docs"
    (index,) = [page for page in PAGES if page.name == "docs/README.md"]
    listed = {(docs / link.partition("#")[0]).resolve() for link in index.links if "://" not in link}
    missing = [page.name for page in PAGES if docs in page.path.parents and page.path not in listed | {index.path}]
    assert not missing, f"docs/README.md does not list {', '.join(missing)}"


@pytest.mark.processes
def test_metrics_that_the_recipe_names_are_recorded(finished: Path) -> None:
    recipe = (REPOSITORY / "docs/recipes/not-learning.md").read_text()
    cells = re.findall(r"^\| (`[^|]*)\|", recipe, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([\w<>{},]+/[\w/<>{},]+)`", cell)}
    plain = {name.replace("<environment>", "reverse-text").replace("<n>", "0") for name in named}
    expected = {name for written in plain for name in alternatives(written)}
    assert len(expected) > 30
    recorded = {name for line in read_lines(finished / "metrics.jsonl") for name in line}
    assert expected <= recorded, expected - recorded


def alternatives(name: str) -> list[str]:
    """`a/{b,c}` is `a/b` and `a/c`."""
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    inside, _, after = rest.partition("}")
    return [whole for part in inside.split(",") for whole in alternatives(before + part + after)]
