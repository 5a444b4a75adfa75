"""The live page over files that are written here: lists to be walked, groups, rollouts that go on, ended runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import browser
import httpx
import page_journal as journal
import pytest
from primerl._core import PageServer
from primerl.train.loop.metrics import MetricsWriter

CHROMIUM = browser.installed()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt install chromium)"),
]
LONG_NAME = "an-environment-with-quite-a-long-name-that-somebody-has-given-it"
GROUP = 40
STEPS = 6
FAILS = 7


@dataclass
class Run:
    output: Path
    url: str
    writer: journal.Journal
    generator: random.Random = field(default_factory=lambda: random.Random(0))

    def ask(self, path: str, **query: object) -> dict[str, object]:
        answer = httpx.get(
            f"{self.url}/page/{path}", params={name: str(value) for name, value in query.items()}, timeout=60
        )
        return dict(answer.json())


@contextmanager
def opened(folder: Path, model: Path, *, group: int) -> Iterator[Run]:
    output = folder / "run"
    journal.begin(output, model, steps=STEPS, batch=group, group=group, environments=(LONG_NAME,))
    writer = journal.Journal(output)
    writer.write(journal.start())
    server = PageServer(output, model)
    try:
        yield Run(output, server.url, writer)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    assert CHROMIUM is not None
    with browser.tab(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(window: browser.Tab) -> browser.Tab:
    """Without the page of the test before, whose server is gone, and what it complained of."""
    window.call("Page.navigate", url="about:blank")
    window.size(1280, 900)
    window.complaints.clear()
    return window


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Groups of forty, every rollout with two turns; in the last group one has failed."""
    with opened(tmp_path_factory.mktemp("files"), model, group=GROUP) as run:
        for step in range(1, STEPS + 1):
            first = (step - 1) * GROUP
            rollouts = range(first, first + GROUP)
            run.writer.write([journal.lease(step, GROUP)])
            for rollout in rollouts:
                turns = (None, 0)
                run.writer.write(journal.turned(run.generator, rollout, step - 1, parent=turn) for turn in turns)
            fails = first + FAILS if step == STEPS else None
            for rollout in rollouts:
                error = "ValueError: the judge is away" if rollout == fails else None
                run.writer.write([journal.finished(rollout, (rollout % 8) / 8, error)])
            if fails is None:
                run.writer.write(journal.trained(100 + step, step))
        with MetricsWriter(run.output) as metrics:
            for step in range(1, 101):
                metrics.write(
                    step, {"reward/all/mean": (step % 2) * 0.5 + step / 100, "mismatch_kl/all/mean": step * 1.5e-6}
                )
        yield run


ROWS = "[...document.querySelectorAll('.list tbody tr')]"
FIRST = "document.querySelector('.list tbody a')?.textContent"
LINK = "[...document.querySelectorAll('.pages a')].find(link => link.textContent === {!r})"


def follow(tab: browser.Tab, name: str) -> None:
    before = tab.evaluate(FIRST)
    tab.evaluate(f"{LINK.format(name)}.click()")
    tab.until(f"{FIRST} !== {before!r}")


def test_a_list_is_walked_by_pages_that_replace_each_other(run: Run, tab: browser.Tab) -> None:
    tab.goto(f"{run.url}/#/rollouts")
    tab.until(f"{ROWS}.length === 100 && {FIRST} === '239'")
    assert "1 to 100 of 240" in tab.text()
    assert tab.evaluate(f"{LINK.format('Newer')}.hasAttribute('href')") is False
    follow(tab, "Older")
    assert tab.evaluate(f"{ROWS}.length") == 100
    assert tab.evaluate("location.hash") == "#/rollouts?cursor=140"
    follow(tab, "Older")
    assert tab.evaluate(f"{ROWS}.length") == 40
    assert "201 to 240 of 240" in tab.text()
    follow(tab, "Newer")
    assert tab.evaluate(FIRST) == "139"
    # As by the browser's own button: a page is a place.
    tab.evaluate("history.back()")
    tab.until(f"{FIRST} === '39'")
    follow(tab, "Newest")
    assert tab.evaluate("location.hash") == "#/rollouts"
    assert tab.complaints == []


def test_a_list_goes_by_reward_within_a_range(run: Run, tab: browser.Tab) -> None:
    tab.goto(f"{run.url}/#/rollouts?order=highest_reward&max_reward=0.5&environment={LONG_NAME}")
    tab.until(f"{ROWS}.length === 100")
    column = f"{ROWS}.map(row => Number(row.children[6].textContent))"
    rewards = tab.evaluate(column)
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] == 0.5
    expected = sum(number % 8 <= 4 for number in range(240))
    # One that failed has none, whatever was reported.
    assert f"of {expected - ((200 + FAILS) % 8 <= 4)} that pass, of the last 240" in tab.text()
    follow(tab, "Lower")
    assert max(tab.evaluate(column)) <= rewards[-1]


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_a_long_name_pushes_no_column_out(run: Run, tab: browser.Tab, width: int) -> None:
    tab.size(width, 900)
    tab.goto(f"{run.url}/#/rollouts")
    tab.until(f"{ROWS}.length === 100")
    cut = tab.evaluate("(one => [one.title, one.scrollWidth > one.clientWidth])(document.querySelector('.list .cut'))")
    assert cut == [LONG_NAME, True]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.evaluate("document.querySelector('.scroll').scrollLeft = 10000")
    # The first column is there whatever is looked at, and the last one whole.
    boxes = "[row.firstChild, row.lastChild].map(cell => cell.getBoundingClientRect())"
    edges = tab.evaluate(f"(row => {boxes}.map(at => [at.left, at.right]))({ROWS}[0])")
    assert 0 <= edges[0][0] < 60
    assert edges[1][1] <= width
    if width == 1400:
        assert tab.evaluate("(one => one.scrollWidth === one.clientWidth)(document.querySelector('.scroll'))")


def test_a_group_of_several_turns_has_its_prompt_and_its_failures(run: Run, tab: browser.Tab) -> None:
    group = run.ask("rollouts", limit=1)["rollouts"][0]["group"]  # type: ignore[index]
    tab.goto(f"{run.url}/#/groups/{group}")
    tab.until("document.querySelectorAll('.columns .tokens span').length > 30 * 32")
    first = run.ask(f"rollouts/{(STEPS - 1) * GROUP}/turns/0")["prompt"]["text"]  # type: ignore[index]
    shown = tab.evaluate("[...document.querySelectorAll('.first .prompt')].map(one => one.textContent)")
    assert len(shown) == 1
    assert len(shown[0]) == len(str(first))
    assert "32 of 40 shown" in tab.text()
    more = "[...document.querySelectorAll('button')].find(one => one.textContent === 'Show 8 more')"
    tab.evaluate(f"{more}.click()")
    tab.until("document.querySelectorAll('.columns > section').length === 40")
    name = f"Rollout {(STEPS - 1) * GROUP + FAILS}"
    failed = f"[...document.querySelectorAll('.columns > section')].find(one => one.innerText.includes({name!r}))"
    text = tab.until(f"{failed}.innerText.includes('the judge is away') && {failed}.innerText")
    assert "reward –" in " ".join(text.split())
    assert tab.evaluate(f"{more} === undefined || {more}.hidden")
    assert tab.complaints == []


def test_a_group_without_a_turn_has_no_prompt(model: Path, tab: browser.Tab, tmp_path: Path) -> None:
    with opened(tmp_path, model, group=4) as run:
        run.writer.write([journal.lease(1, 4)])
        tab.goto(f"{run.url}/#/groups/0")
        tab.until("document.querySelectorAll('.columns > section').length === 4")
        assert "First prompt" not in tab.text()
        run.writer.write([journal.turned(run.generator, 2, 0)])
        tab.until("document.body.innerText.includes('First prompt')")
        # It came to its column, too.
        tab.until("document.querySelectorAll('.columns .tokens').length === 1")


def test_a_rollout_is_read_on_while_it_goes_on(model: Path, tab: browser.Tab, tmp_path: Path) -> None:
    with opened(tmp_path, model, group=4) as run:
        run.writer.write([journal.lease(1, 4)])
        tab.goto(f"{run.url}/#/rollouts/1")
        tab.until("document.body.innerText.includes('No turn has ended yet')")
        run.writer.write([journal.turned(run.generator, 1, 0)])
        tab.until("document.querySelectorAll('.tokens').length === 1")
        tab.evaluate("window.kept = document.querySelector('.tokens')")
        tab.key("2")
        tab.until("document.querySelector('.scale').innerText === 'not trained yet'")
        run.writer.write([journal.turned(run.generator, 1, 0, parent=0)])
        tab.until("document.querySelectorAll('.tokens').length === 2")
        run.writer.write([journal.finished(1, 1.0)])
        tab.until("document.querySelector('.fate').innerText === 'waits'")
        for rollout in (0, 2, 3):
            run.writer.write([journal.turned(run.generator, rollout, 0), journal.finished(rollout, 0.0)])
        run.writer.write(journal.trained(9, 1))
        tab.until("document.querySelector('.fate').innerText === 'trained'")
        # Advantages have come to the tokens that were there.
        tab.until("document.querySelector('.tokens > span').style.backgroundColor !== ''")
        assert tab.evaluate("window.kept === document.querySelector('.tokens')")
        assert tab.complaints == []


def test_the_token_that_is_looked_at_is_not_covered(run: Run, tab: browser.Tab) -> None:
    tab.size(1280, 500)
    tab.goto(f"{run.url}/#/rollouts/3")
    tab.until("document.querySelectorAll('.tokens').length === 2")
    tab.evaluate("""{
        const shown = document.querySelector('.inspect');
        window.changes = 0;
        const watch = new MutationObserver((seen) => (window.changes += seen.length));
        watch.observe(shown, { attributes: true, childList: true });
    }""")
    for turn, edge in ((1, "end"), (0, "start")):
        at = tab.evaluate(f"""(() => {{
            const token = [...document.querySelectorAll('.tokens')][{turn}].lastElementChild;
            token.scrollIntoView({{ block: {edge!r} }});
            window.looked = token;
            window.changes = 0;
            const box = token.getBoundingClientRect();
            return [box.left, box.top, box.height];
        }})()""")
        left, top, height = at
        for move in range(30):
            tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 1 + move % 3, y=top + height / 2)
        tab.until("window.looked.classList.contains('at') && !document.querySelector('.inspect').hidden")
        assert tab.evaluate("window.changes") <= 4, "it flickers"
        apart = tab.evaluate("""(() => {
            const nodes = [window.looked, document.querySelector('.inspect')];
            const [token, told] = nodes.map((one) => one.getBoundingClientRect());
            return told.bottom <= token.top || told.top >= token.bottom;
        })()""")
        assert apart, f"it covers the token of turn {turn}"


REASON = "env_task_0 exited with code 7\nthe end of /logs/env_worker_0.log:\n  <b>SystemExit</b>: 7"


def test_a_run_that_failed_says_so(model: Path, tab: browser.Tab, tmp_path: Path) -> None:
    with opened(tmp_path, model, group=4) as run:
        run.writer.write(
            [journal.lease(1, 4), journal.turned(run.generator, 0, 0), journal.finished(0, 0.0, "it broke")]
        )
        status = {"trainer": {"doing": "loading the model (for 12 s)", "idle_share": 1.0}, "rollouts": {"failed": 0}}
        journal.write_summary(run.output, 1, REASON, status=status)
        tab.goto(f"{run.url}/#/")
        tab.until(
            "document.querySelector('#end').innerText.startsWith('failed after 34 s: env_task_0 exited with code 7')"
        )
        text = tab.until("document.body.innerText.includes('1 failed') && document.body.innerText")
        assert "No step was trained." in text
        assert "loading the model" not in text
        assert tab.evaluate("document.querySelectorAll('#end b').length") == 1, "what was written is text"
        assert tab.evaluate("document.querySelector('#state').className") == "failed"
        # Every view says so, and all of it.
        tab.goto(f"{run.url}/#/rollouts")
        tab.until("document.querySelector('#end details') !== null")
        tab.evaluate("document.querySelector('#end summary').click()")
        assert "<b>SystemExit</b>: 7" in tab.evaluate("document.querySelector('#end').innerText")
        assert tab.complaints == []


@pytest.mark.parametrize(("code", "said"), [(0, "finished after 34 s"), (130, "stopped after 34 s")])
def test_how_else_a_run_ends(model: Path, tab: browser.Tab, tmp_path: Path, code: int, said: str) -> None:
    with opened(tmp_path, model, group=4) as run:
        journal.write_summary(run.output, code, "interrupted" if code else "finished")
        tab.goto(f"{run.url}/#/")
        tab.until(f"document.querySelector('#state').innerText.startsWith({said!r})")
        assert tab.evaluate("document.querySelector('#end').hidden") is (code == 0)


def test_a_long_curve_is_a_mean_over_a_faint_band_and_no_label_is_cut(run: Run, tab: browser.Tab) -> None:
    tab.goto(f"{run.url}/#/")
    tab.until("document.querySelectorAll('.chart path.band').length >= 2")
    labels = tab.evaluate("""[...document.querySelectorAll('.chart text')].map((text) => {
        const [own, chart] = [text, text.closest('svg')].map((node) => node.getBoundingClientRect());
        return [text.textContent, own.left >= chart.left, own.right <= chart.right + 1];
    })""")
    assert all(left and right for _, left, right in labels), labels
    texts = [text for text, _, _ in labels]
    assert any(text.endswith("e-4") for text in texts)
    assert not any("0e-" in text for text in texts), "zeros that say nothing"
    # A hundred steps in a chart of this width.
    assert {"20", "40", "60", "80", "100"} <= set(texts)
