"""What the page's scripts decide, without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
WEB = Path("rust/primerl-orchestrator/src/page/web")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(NODE is None, reason="no node is installed (Debian: apt install nodejs)"),
]


@pytest.fixture
def evaluate(repository: Path, tmp_path: Path) -> Any:
    """The value of an expression in a module that has imported a script."""
    shutil.copytree(repository / WEB, tmp_path / "web")
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def evaluate(imports: str, body: str) -> Any:
        assert NODE is not None
        (tmp_path / "main.js").write_text(f"{imports}\n{body}\n")
        done = subprocess.run([NODE, str(tmp_path / "main.js")], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return evaluate


def live(**run: Any) -> dict[str, Any]:
    return {"is_live": True, "status": {"run": {"step": 9, "max_steps": 9, "finished": None, **run}}}


def test_a_run_that_ended_well_is_not_called_lost(evaluate: Any) -> None:
    seen = [live(finished="all steps are trained"), live(), live(step=8), live(step=0, max_steps=0), None]
    seen.append({**live(), "is_live": False})
    told = evaluate(
        'import { gone } from "./web/ending.js";', f"console.log(JSON.stringify({json.dumps(seen)}.map(gone)))"
    )
    assert told == [
        {"kind": "finished", "title": "finished: all steps are trained"},
        {"kind": "", "title": "all 9 steps are trained; the run has ended"},
        {"kind": "stopped", "title": "the run has ended, or cannot be reached"},
        {"kind": "stopped", "title": "the run has ended, or cannot be reached"},
        {"kind": "lost", "title": "cannot be reached"},
        {"kind": "lost", "title": "cannot be reached"},
    ]


FAKE = """
class Node {
  constructor(name) { this.name = name; this.parentNode = null; this.moved = 0; }
  get previousElementSibling() { const all = this.parentNode.children; return all[all.indexOf(this) - 1] ?? null; }
  after(other) { this.parentNode.put(other, this.parentNode.children.indexOf(this) + 1); }
}
class Place {
  children = [];
  prepend(node) { this.put(node, 0); }
  put(node, at) {
    const old = this.children.indexOf(node);
    if (old >= 0) { this.children.splice(old, 1); if (old < at) at -= 1; }
    this.children.splice(at, 0, node);
    node.parentNode = this;
    node.moved += 1;
  }
}
const place = new Place();
const nodes = Object.fromEntries([..."abcd"].map((name) => [name, new Node(name)]));
const seen = [];
for (const order of ["c", "ac", "abcd", "abcd", "bd"]) {
  arrange(place, [...order].map((name) => nodes[name]));
  seen.push(place.children.map((node) => node.name).join(""));
}
console.log(JSON.stringify([seen, Object.values(nodes).map((node) => node.moved)]));
"""


def test_curves_are_in_one_order_whenever_they_come(evaluate: Any) -> None:
    seen, moved = evaluate('import { arrange } from "./web/common.js";', FAKE)
    # Of the last, those that are not shown any more are taken out by the caller.
    assert seen[:4] == ["c", "ac", "abcd", "abcd"]
    assert seen[4].startswith("bd")
    # What was in its place stays there, with its focus.
    assert moved == [1, 2, 1, 2]


HEALTH = """
class Fake {
  constructor(tag) { this.tagName = tag; this.children = []; this.text = ""; this.on = {}; this.childNodes = []; }
  set textContent(text) { this.text = text; }
  addEventListener(event, act) { this.on[event] = act; }
  setAttribute() {}
  append(...nodes) { this.children.push(...nodes); this.childNodes = this.children; }
  replaceChildren(...nodes) { this.children = nodes; this.childNodes = nodes; }
  isEqualNode() { return false; }
  all() { return [this, ...this.children.flatMap((one) => (one instanceof Fake ? one.all() : []))]; }
}
globalThis.document = { createElement: (tag) => new Fake(tag) };
"""


def test_what_is_wrong_is_said_and_leads_to_its_curve(evaluate: Any) -> None:
    finding = {
        "rule": "no_signal",
        "what": "no group differs",
        "advice": "harder examples",
        "curve": "advantage/all/std",
    }
    shown = evaluate(
        'import { health } from "./web/panels.js";',
        f"""{HEALTH}
const drawn = [];
const texts = (found) => {{
  const node = new Fake("section");
  health(node, found, (name) => drawn.push(name));
  return node;
}};
const ill = texts({json.dumps({"steps": 20, "findings": [finding]})});
ill.all().find((one) => one.on.click).on.click();
const said = (node) => node.all().map((one) => one.text).filter(Boolean);
const quiet = (steps) => said(texts({{steps, findings: []}}));
console.log(JSON.stringify([said(ill), drawn, quiet(20), quiet(2)]));""",
    )
    assert shown == [
        ["Health", "no group differs", "harder examples", "advantage/all/std"],
        ["advantage/all/std"],
        ["Health", "No rule finds anything wrong."],
        ["Health", "Too few steps to tell."],
    ]


def test_a_key_that_is_missing_or_wrong_is_asked_for(evaluate: Any) -> None:
    seen = evaluate(
        'import { Refused, tellProblem } from "./web/common.js";',
        f"""{HEALTH}
Fake.prototype.focus = () => {{}};
Fake.prototype.querySelector = function (tag) {{ return this.all().find((one) => one.tagName === tag) ?? null; }};
const stored = new Map();
const getItem = (name) => stored.get(name) ?? null;
globalThis.sessionStorage = {{ getItem, setItem: (name, value) => stored.set(name, value) }};
const problem = new Fake("p");
const seen = [];
const use = () => seen.push("used");
const tell = (error, more = {{ named: " (KEY)" }}) => {{
  tellProblem(problem, error, {{ owner: "run", button: "Show it", use, ...more }});
  const shown = problem.all().flatMap((one) => one.children);
  seen.push([problem.hidden, problem.text, ...shown.map((one) => one.text ?? one)]);
}};
const refused = new Refused(401, "no key");
tell(null);
tell(new Refused(500, "broken"));
tell(refused);
problem.querySelector("input").value = "typed";
tell(refused);
problem.querySelector("form").on.submit({{ preventDefault() {{}} }});
seen.push([...stored.values()]);
tell(refused);
stored.clear();
problem.replaceChildren();
tell(refused, {{ known: "; it was printed" }});
console.log(JSON.stringify(seen));""",
    )
    asked = [False, "no key", "", "This run has a key (KEY). ", "", "Show it"]
    assert seen == [
        [True, ""],
        [False, "broken"],
        asked,
        asked,  # what is being typed stays
        "used",
        ["typed"],
        [False, "no key", "", "That is not the run's key (KEY). ", "", "Show it"],
        [False, "no key", "", "This run has a key; it was printed. ", "", "Show it"],
    ]


def test_where_a_conversation_forked_is_found(evaluate: Any) -> None:
    turns = [
        [{"turn": 0, "parent": None, "session": "a"}, "Say A.\n", ["A", "!"], True],
        [{"turn": 1, "parent": 0, "session": "a"}, "\nAgain.", ["B"], True],
        # Its history was changed: another answer than the one that was given.
        [{"turn": 2, "parent": None, "session": "a"}, "Say A.\na?\nAgain.", ["C"], True],
        [{"turn": 3, "parent": None, "session": "b"}, "Say A.\n", ["A"], True],
        # A prompt that is cut cannot be compared, nor what comes after it.
        [{"turn": 4, "parent": None, "session": "b"}, "Say", ["A"], False],
        [{"turn": 5, "parent": None, "session": "b"}, "Say A.", ["A"], True],
    ]
    shown = evaluate(
        'import { Conversation, diverges } from "./web/fork.js";',
        f"""const known = new Conversation();
const add = ([turn, text, pieces, is_whole]) => known.add(turn, {{prompt: {{text, is_whole}}, pieces, next: null}});
const halves = diverges({json.dumps(chr(0x1F600))}, {json.dumps(chr(0x1F601))}).shared;
const long = "x".repeat(999);
console.log(JSON.stringify([{json.dumps(turns)}.map(add), halves, diverges(long, long + "y")]));""",
    )
    forks, halves, longer = shown
    assert forks == [
        None,
        None,
        {"shared": 7, "context": "Say A.\n", "was": "A!\nAgain.B", "now": "a?\nAgain.", "of": 1},
        None,
        None,
        None,
    ]
    assert halves == 0, "half a character is none"
    assert longer == {"shared": 999, "context": "…" + 120 * "x", "was": "", "now": "y"}


def test_every_curve_of_the_overview_is_explained(evaluate: Any, repository: Path) -> None:
    text = (repository / WEB / "overview.js").read_text(encoding="utf-8")
    drawn = text[text.index("const CHARTS") : text.index("const FIRST")]
    names = [*re.findall(r'"((?:\w+/)+\w+)"', drawn), "reward/all/mean", "metric/x/mean"]
    assert len(names) > 20
    found = evaluate(
        'import { helpOf } from "./web/help.js";',
        f"""const names = {json.dumps(names)};
const without = names.filter((name) => !helpOf(name));
console.log(JSON.stringify([without, helpOf("not/known"), helpOf("entropy/all/mean")]));""",
    )
    assert found[:2] == [[], None]
    assert set(found[2]) == {"means", "normal", "todo"}
