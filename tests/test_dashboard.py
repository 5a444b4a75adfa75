"""The dashboard: all runs on one page, whatever is wrong with one of them, and who may see it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import httpx
import page_journal as journal
import pytest
from docs_pages import shown
from primerl.process import redaction
from primerl.runs import secrets as stored_secrets
from primerl.runs.dashboard.server import Dashboard
from run_helpers import begin, end, told

CHROMIUM = browser.installed()
STEPS = 200
SECRET = "sk-not-to-be-printed"
REWARD = "reward/all/mean"


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids: dict[str, str] = {}
        self.board = Dashboard()

    def ask(self, path: str, *, code: int = 200, **query: object) -> Any:
        answer = httpx.get(
            f"{self.board.url}{path}", params={name: str(one) for name, one in query.items()}, timeout=60
        )
        assert answer.status_code == code, answer.text
        return answer.json()

    def named(self, *names: str) -> str:
        return ",".join(self.ids[name] for name in names)


def trained(folder: Path, seed: int) -> str:
    run = begin(folder, name=folder.name, config=f'seed = {seed}\nwandb.api_key = "{SECRET}"\n')
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({"step": step, REWARD: seed + step / STEPS, f"only/{folder.name}": 1.0}) + "\n")
    summary = {"exit_code": 1, "reason": f"the key {SECRET} is refused"} if seed == 2 else {"exit_code": 0}
    (folder / "run" / "summary.json").write_text(json.dumps(summary))
    end(run, summary["exit_code"])
    return run


def with_journal(folder: Path, model: Path) -> None:
    journal.begin(folder, model, steps=4, batch=4, group=4)
    writer, generator = journal.Journal(folder), random.Random(0)
    writer.write(journal.start())
    for step in (1, 2):
        rollouts = range(4 * (step - 1), 4 * step)
        writer.write([journal.lease(step, 4)])
        writer.write(journal.turned(generator, rollout, step - 1) for rollout in rollouts)
        writer.write(journal.finished(rollout, generator.random()) for rollout in rollouts)
        writer.write(journal.trained(4 + step, step))


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Two sound runs with a journal, one that is damaged, one of another version, and one that was deleted."""
    folder = tmp_path_factory.mktemp("dashboard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMERL_STATE_DIR", str(folder / "state"))
        patch.setattr(redaction, "_known", set())
        stored_secrets.put("KEY", SECRET)
        runs = Runs(folder)
        with_journal(folder / "base", model)
        for seed, name in enumerate(("base", "other", "damaged", "newer", "deleted")):
            output = folder / name
            if name not in ("base", "deleted"):
                shutil.copytree(folder / "base" / "journal", output / "journal")
            runs.ids[name] = trained(output, seed)
        # By its tokenizer texts are shown.
        (folder / "base" / "configs").mkdir()
        (folder / "base" / "configs" / "orchestrator.toml").write_text(f'[model]\npath = "{model}"\n')
        with (folder / "damaged" / "metrics.jsonl").open("a") as file:
            file.write("{\n")
        for file in (folder / "damaged" / "journal").iterdir():
            file.write_bytes(file.read_bytes()[:40])
        for file in (folder / "newer" / "journal").iterdir():
            file.write_bytes(b"PRIMERL\x7f" + file.read_bytes()[8:])
        shutil.rmtree(folder / "deleted")
        try:
            yield runs
        finally:
            runs.board.stop()


def test_the_list_has_every_run(runs: Runs) -> None:
    found = {run["name"]: run for run in runs.ask("/api/runs")["runs"]}
    assert list(found) == ["deleted", "newer", "damaged", "other", "base"]
    assert {name: run["status"] for name, run in found.items()} == {
        "deleted": "COMPLETED",
        "newer": "COMPLETED",
        "damaged": "FAILED",
        "other": "COMPLETED",
        "base": "COMPLETED",
    }
    assert found["base"]["step"] == STEPS
    assert "is gone" in found["deleted"]["reason"]


def test_curves_of_several_runs(runs: Runs) -> None:
    names = f"{REWARD},only/other"
    asked = {"runs": runs.named("base", "other"), "names": names, "points": 50}
    found = runs.ask("/api/curves", **asked)
    assert found["steps"] == [1, STEPS]
    assert {"only/base", "only/other", REWARD} <= set(found["names"])
    base, other = (found["runs"][runs.ids[name]] for name in ("base", "other"))
    assert len(base[REWARD]["x"]) <= 50
    assert base[REWARD]["x"][-1] == STEPS
    assert other[REWARD]["y"][-1] == pytest.approx(2.0)
    assert (base["only/other"]["x"], other["only/other"]["y"][0]) == ([], 1.0)
    part = runs.ask("/api/curves", **{**asked, "from": 50, "to": 60})["runs"][runs.ids["base"]][REWARD]
    assert (part["x"][0], part["x"][-1], len(part["x"])) == (50, 60, 11)


def test_what_is_wrong_with_a_run_is_told_of_that_run(runs: Runs) -> None:
    found = runs.ask("/api/curves", runs=runs.named("base", "damaged", "deleted"), names=REWARD)
    assert set(found["runs"]) == {runs.ids["base"], runs.ids["damaged"]}
    assert found["problems"] == {
        runs.ids["damaged"]: f"its metrics.jsonl is damaged: line {STEPS + 1} is not as a run writes it, and omitted",
        runs.ids["deleted"]: f"its folder {runs.folder / 'deleted'} is gone",
    }
    found = runs.ask("/api/rollouts", runs=runs.named("base", "damaged", "newer", "deleted"))
    assert set(found["runs"]) == {runs.ids["base"]}
    problems = {name: found["problems"][runs.ids[name]] for name in ("damaged", "newer", "deleted")}
    assert all("its journal cannot be read" in problems[name] for name in ("damaged", "newer")), problems
    assert "is gone" in problems["deleted"]
    told = runs.ask("/api/compare", runs=runs.named("base", "damaged", "deleted"))
    assert [run["reward"] is None for run in told["runs"]] == [False, False, True]


def test_rollouts_of_the_same_example(runs: Runs) -> None:
    asked = {"runs": runs.named("base", "other"), "environment": "task"}
    every = runs.ask("/api/rollouts", **asked)["runs"]
    first = every[runs.ids["base"]]["rollouts"][0]
    found = runs.ask("/api/rollouts", example=first["example"], **asked)["runs"]
    for one in found.values():
        assert {row["example"] for row in one["rollouts"]} == {first["example"]}
        assert 0 < one["matching"] < 8
    none = runs.ask("/api/rollouts", example=999_999, **asked)["runs"]
    assert all(one["matching"] == 0 for one in none.values())
    path = f"/api/runs/{runs.ids['base']}/rollouts/{first['rollout']}"
    assert runs.ask(path)["example"] == first["example"]
    assert len(runs.ask(f"{path}/turns/0", limit=7)["ids"]) == 7
    missing = runs.ask(f"/api/runs/{runs.ids['base']}/rollouts/999", code=404)
    assert "there is no rollout 999" in missing["error"]["message"]
    page = runs.ask(f"/api/runs/{runs.ids['base']}/page")["url"]
    assert "primerl" in httpx.get(page, timeout=60).text


def test_the_same_example_is_found_whatever_its_number_is(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"runs": runs.named("base", "other"), "environment": "task"}
    base, other = runs.ids["base"], runs.ids["other"]
    every = runs.ask("/api/rollouts", **asked)["runs"]
    numbers = sorted({row["example"] for row in every[base]["rollouts"]})
    first, last = numbers[0], numbers[-1]
    assert first != last
    keys = [f"key-{number}" for number in range(last + 1)]
    turned = {**dict(enumerate(keys)), first: keys[last], last: keys[first]}
    files = [runs.folder / name / "run" / "listings.json" for name in ("base", "other")]

    def write(file: Path, keys: list[str]) -> None:
        file.write_text(json.dumps([[0, {"digest": "d", "environment": "task", "keys": keys}], [1, {"digest": "e"}]]))

    def found(**more: object) -> tuple[dict[str, set[int]], dict[str, str]]:
        answer = runs.ask("/api/rollouts", example=first, of=base, **asked | more)
        listed = answer["runs"].items()
        return {run: {row["example"] for row in one["rollouts"]} for run, one in listed}, answer["problems"]

    try:
        write(files[0], keys)
        # Of an earlier version, which wrote no keys: the same number, and a word of it.
        shown, problems = found()
        assert shown == {base: {first}, other: {first}}
        assert set(problems) == {other}
        assert "it has no keys" in problems[other]
        write(files[1], [turned[number] for number in range(last + 1)])
        assert found() == ({base: {first}, other: {last}}, {})
        # Of any environment a number is nothing but that.
        assert found(environment="") == ({base: {first}, other: {first}}, {})
        write(files[1], ["key-unknown"])
        assert found() == ({base: {first}}, {other: "this example is not among the first 1 of its 'task'"})
        files[1].write_text("[3")
        assert "it has no keys" in found()[1][other]
        none = runs.ask("/api/rollouts", code=404, **asked | {"example": last + 1, "of": base})["error"]
        assert (none["code"], none["param"]) == ("unknown_example", "example")
        said = f"there is no example {last + 1}: environment 'task' has {last + 1}, numbered from 0 to {last}"
        assert none["message"] == said
        alone = runs.ask("/api/rollouts", runs=base, environment="task", example=last + 1)
        assert (alone["runs"], alone["problems"]) == ({}, {base: said})
        command = ("run", "compare", "base", "other", "--env", "task", "--example")
        assert said in told(*command, str(last + 1), code=2, capsys=capsys)
        gone = told("run", "compare", "deleted", "base", *command[4:], "1", code=2, capsys=capsys)
        assert f"its folder {runs.folder / 'deleted'} is gone" in " ".join(gone.split())
        asked = {"runs": runs.named("deleted", "base"), "environment": "task", "example": 1}
        problems = runs.ask("/api/rollouts", of=runs.ids["deleted"], **asked)["problems"]
        assert f"the folder of {runs.ids['deleted']}" in problems[base]
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_rollouts_of_an_example_in_the_terminal(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    (shown_command,) = shown(__file__, "docs/dashboard.md")
    every = runs.ask("/api/rollouts", runs=runs.named("base"), environment="task")["runs"][runs.ids["base"]]
    example = str(every["rollouts"][0]["example"])
    names = {"first": "base", "second": "other", "reverse-text-eval": "task", "3": example}
    command = [names.get(word, word) for word in shown_command[1:]]
    three = [*command[:4], "damaged", *command[4:]]
    found = json.loads(told(*three, "--json", capsys=capsys))
    assert (found["environment"], found["example"]) == ("task", int(example))
    assert "its journal cannot be read" in found["problems"][runs.ids["damaged"]]
    for name in ("base", "other"):
        one = found["runs"][runs.ids[name]]
        assert len(one["rollouts"]) == one["matching"] > 0
        assert all(rollout["example"] == int(example) for rollout in one["rollouts"])
        assert all(rollout["prompt"] for rollout in one["rollouts"])
        assert all((rollout["answer"] is not None) == (name == "base") for rollout in one["rollouts"])
    printed = told(*three, capsys=capsys)
    assert printed.startswith(f"example {example} of 'task':\n  ")
    assert "its journal cannot be read" in printed
    for name in ("base", "other"):
        rollouts = found["runs"][runs.ids[name]]["rollouts"]
        rows = [line for line in printed.splitlines() if line.startswith(f"{name} (")]
        assert len(rows) == len(rollouts)
        assert all(f"{one['reward']:.3f}" in row for one, row in zip(rollouts, rows, strict=True))
    listings = runs.folder / "base" / "run" / "listings.json"
    try:
        listings.write_text(json.dumps([[0, {"environment": "task"}]]))
        assert "'other-task': " in told(
            "run", "compare", "base", "other", "--env", "other-task", "--example", "1", code=2, capsys=capsys
        )
    finally:
        listings.unlink()
    assert "go together" in told("run", "compare", "base", "other", "--example", "1", code=2, capsys=capsys)
    nothing = told(*command[:-1], "99999", capsys=capsys)
    assert nothing.startswith("no rollout of example 99999 of 'task' is known")


def test_no_secret_is_shown(runs: Runs) -> None:
    ids = ",".join(runs.ids.values())
    answers = [runs.ask("/api/runs"), runs.ask("/api/compare", runs=ids)]
    assert SECRET not in json.dumps(answers)
    assert "the key <secret> is refused" in json.dumps(answers)


@pytest.mark.parametrize(
    ("path", "query", "code", "said"),
    [
        ("/api/curves", {"runs": "00000000"}, 404, "run '00000000' does not exist"),
        ("/api/curves", {"points": "many"}, 400, "points: 'many' is not a number from 3 to 1000"),
        ("/api/curves", {"names": ",".join(map(str, range(17)))}, 400, "names: 17 are asked for, at most 16"),
        ("/api/curves", {"step": "3"}, 400, "'step' is unknown; expected runs, names"),
        ("/api/rollouts", {"limit": "0"}, 400, "limit: '0' is not a number from 1 to 200"),
        ("/api/rollouts", {"example": "-1"}, 400, "example: '-1' is not a number"),
        ("/api/nothing", {}, 404, "there is no /api/nothing"),
        ("/api/runs/../../etc/passwd", {}, 404, "there is no"),
    ],
)
def test_a_question_that_cannot_be_answered(runs: Runs, path: str, query: dict[str, str], code: int, said: str) -> None:
    assert said in runs.ask(path, code=code, **query)["error"]["message"]


def test_only_this_machine_is_answered_without_a_key(runs: Runs) -> None:
    for host, code in (("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403), ("localhost:1", 200)):
        assert httpx.get(f"{runs.board.url}/api/runs", headers={"Host": host}, timeout=60).status_code == code, host
    answer = httpx.get(f"{runs.board.url}/", timeout=60)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_another_address_asks_for_the_key(runs: Runs) -> None:
    board = Dashboard("0.0.0.0", key="the-key")
    url = board.url.replace("0.0.0.0", "127.0.0.1")
    try:
        assert httpx.get(f"{url}/", timeout=60).status_code == 200
        for given, code in (
            ({}, 401),
            ({"Authorization": "Bearer no"}, 401),
            ({"Authorization": "Bearer the-key"}, 200),
        ):
            assert httpx.get(f"{url}/api/runs", headers=given, timeout=60).status_code == code
        key = {"Authorization": "Bearer the-key"}
        page = httpx.get(f"{url}/api/runs/{runs.ids['base']}/page", headers=key, timeout=60)
        assert (page.status_code, page.json()["error"]["code"]) == (409, "page_is_local")
    finally:
        board.stop()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (Debian: apt install chromium)")
    with browser.tab(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.processes
def test_the_keyboard_is_enough(runs: Runs, window: browser.Tab) -> None:
    tab = window
    tab.size(1280, 900)
    tab.goto(f"{runs.board.url}/")
    lines = "document.querySelectorAll('.chart path:not(.band)').length"
    tab.until(f"{lines} === 4")
    tab.key("ArrowDown")
    tab.key("ArrowDown")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "draw newer"
    tab.key(" ")
    tab.until(f"{lines} === 3")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "draw newer"
    tab.evaluate("document.querySelector('.chart svg').focus()")
    tab.key("+")
    tab.until(
        "location.hash.includes('from=50') && document.querySelector('input[aria-label=\"first step\"]').value === '50'"
    )
    tab.key("0")
    tab.until("!location.hash.includes('from=')")
    tab.key("c")
    tab.until("document.querySelectorAll('.compare table').length >= 2")
    assert "seed" in tab.text()
    assert "its metrics.jsonl is damaged: line" in tab.text()
    tab.key("r")
    tab.until("document.querySelectorAll('.columns .turn').length > 0")
    tab.evaluate("document.querySelector('.turn button').click()")
    tab.until("document.querySelectorAll('.turn .text').length >= 2")
    assert tab.complaints == []


@pytest.mark.processes
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_nothing_is_pushed_off_the_page(runs: Runs, window: browser.Tab, width: int, dark: bool) -> None:
    for view, drawn in (("", ".chart path"), ("compare", ".compare table"), ("rollouts", ".columns .turn")):
        window.size(width, 844, dark=dark)
        window.goto(f"{runs.board.url}/#/{view}")
        window.until(f"document.querySelector('{drawn}') !== null")
        assert window.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    back = window.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(16, 19, 23)" if dark else "rgb(246, 247, 249)")


@pytest.mark.processes
def test_what_an_address_names_and_cannot_be_shown_is_said(runs: Runs, window: browser.Tab) -> None:
    window.size(1280, 900)
    for view, drawn in (("", ".chart path"), ("compare", ".compare table"), ("rollouts", ".columns .turn")):
        window.goto(f"{runs.board.url}/#/{view}?runs={runs.ids['base']},00c0ffee")
        window.until(f"document.querySelector('{drawn}') !== null")
        assert "00c0ffee: the run does not exist, or was removed" in window.text(), view
        window.goto(f"{runs.board.url}/#/{view}?runs=00c0ffee")
        window.until("document.querySelector('.problems') !== null && document.querySelector('p.empty') !== null")
        assert "00c0ffee: the run does not exist" in window.text(), view
    window.goto(f"{runs.board.url}/#/?from=900000&to=900001")
    window.until("document.querySelector('.charts p.empty') !== null")
    assert "has a value at steps 900000 to 900001" in window.text()
    window.goto(f"{runs.board.url}/#/compare?runs={runs.ids['deleted']}")
    window.until("document.querySelector('.compare table') !== null")
    assert "Not known." in window.text()
    assert "No rule finds" not in window.text()
    listings = runs.folder / "base" / "run" / "listings.json"
    try:
        listings.write_text(json.dumps([[0, {"environment": "task", "keys": ["a", "b", "c"]}]]))
        both = f"runs={runs.named('base', 'other')}&environment=task"
        window.goto(f"{runs.board.url}/#/rollouts?{both}")
        window.until("document.querySelector('.columns .turn') !== null")
        window.goto(f"{runs.board.url}/#/rollouts?{both}&example=99&of={runs.ids['base']}")
        window.until("!document.getElementById('problem').hidden && document.querySelector('.columns') === null")
        assert "environment 'task' has 3, numbered from 0 to 2" in window.text()
    finally:
        listings.unlink()
    # It was refused on purpose, which the browser notes.
    window.complaints[:] = [one for one in window.complaints if "404" not in one]
    window.goto(f"{runs.board.url}/#/nosuch")
    window.until("!document.getElementById('problem').hidden")
    assert "There is no view “/nosuch”" in window.text()
    assert window.evaluate("document.querySelector('.runs table') !== null || document.querySelector('.runs') !== null")
    assert window.complaints == []
