"""`primerl.render` as Python meets it: its documentation runs, and no value gets past it that is not JSON."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import UserDict
from pathlib import Path
from typing import Any, get_args

import primerl
import primerl.render as rendering
import pytest
import render_helpers as helpers
from primerl.config.schema.orchestrator import Parsers
from primerl.render import NotExtendableError, Renderer, RenderError

DOCUMENTATION = Path(__file__).parents[1] / "docs" / "render.md"
STUBS = Path(primerl.__file__).with_name("_core.pyi")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.write_qwen(tmp_path_factory.mktemp("qwen"), helpers.trl_template("qwen3"))


@pytest.fixture(scope="module")
def renderer(qwen: Path) -> Renderer:
    return Renderer(qwen)


def test_the_page_runs_from_top_to_bottom(qwen: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) >= 8
    code = "\n".join(snippets).replace("path/to/model", str(qwen))
    variables: dict[str, Any] = {}
    exec(compile(code, "docs/render.md, its snippets joined", "exec"), variables)
    assert variables["prompt"] == variables["renderer"].render(
        [*variables["messages"], variables["answer"].message, *variables["new"]], [variables["tool"]]
    )


def examples() -> list[tuple[str, str]]:
    """The indented examples in docstrings of the renderer's classes."""
    found = []
    for class_ in ast.parse(STUBS.read_text(encoding="utf-8")).body:
        if not isinstance(class_, ast.ClassDef) or class_.name not in {"Renderer", "AnswerStream", "ParsedAnswer"}:
            continue
        for node in ast.walk(class_):
            documented = isinstance(node, ast.ClassDef | ast.FunctionDef)
            docstring = (ast.get_docstring(node) if documented else None) or ""
            for block in re.findall(r"\n\n((?:    .*\n?|\n)+)", docstring):
                code = textwrap.dedent(block)
                if "renderer." in code and not code.startswith(("model_dir", "answer:", "sampled:")):
                    found.append((getattr(node, "name", ""), code))
    return found


def test_the_examples_of_the_docstrings_run(renderer: Renderer) -> None:
    assert {name for name, _ in examples()} >= {"AnswerStream", "render_text", "render_with_mask", "extend"}
    for name, code in examples():
        names = {"renderer": renderer, "NotExtendableError": NotExtendableError}
        exec(compile(code, f"docstring of {name}", "exec"), names)


def test_every_parser_is_on_the_page_and_in_the_config(qwen: Path) -> None:
    text = DOCUMENTATION.read_text(encoding="utf-8")
    for kind in ("tool", "reasoning"):
        with pytest.raises(RenderError, match="there are ") as error:
            Renderer(qwen, **{f"{kind}_parser": "unheard-of"})
        names = str(error.value).partition("there are ")[2].split(", ")
        literal, _ = get_args(Parsers.model_fields[kind].annotation)
        assert list(get_args(literal)) == names
        assert len(names) > 3
        assert [name for name in names if f"| `{name}` |" not in text] == []


def test_what_cannot_be_appended_says_why(renderer: Renderer) -> None:
    with pytest.raises(NotExtendableError, match="no new message") as error:
        renderer.extend({"role": "assistant", "content": "y"}, [1], [])
    assert error.value.reason == "no_new_messages"
    assert issubclass(NotExtendableError, RenderError)
    assert NotExtendableError.__module__ == RenderError.__module__
    assert set(rendering.__all__) <= set(dir(rendering))


def test_a_finished_stream_takes_nothing(renderer: Renderer) -> None:
    stream = renderer.answer_stream()
    stream.finish()
    with pytest.raises(RenderError, match="finished"):
        stream.push([1])
    with pytest.raises(RenderError, match="finished"):
        stream.finish()


def nested(depth: int, kind: str) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"list": [value], "tuple": (value,), "dict": {"a": value}, "mapping": UserDict(a=value)}[kind]
    return value


def within_itself() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


WRONG = {
    "a deep list": (lambda: nested(100_000, "list"), "nested more than 127 deep"),
    "a deep tuple": (lambda: nested(100_000, "tuple"), "nested more than 127 deep"),
    "a deep dict": (lambda: nested(100_000, "dict"), "nested more than 127 deep"),
    "a deep mapping": (lambda: nested(5_000, "mapping"), "nested more than 127 deep"),
    "a cycle": (within_itself, "holds itself"),
    "a huge integer": (lambda: 1 << 64, "more than 64 bits"),
    "a hugely negative integer": (lambda: -(1 << 63) - 1, "more than 64 bits"),
    "a really huge integer": (lambda: 10**5000, "more than 64 bits"),
    "nan": (lambda: float("nan"), "NaN is not JSON"),
    "infinity": (lambda: [float("inf")], "inf is not JSON"),
    "half a pair": (lambda: "\ud800", "surrogate"),
    "half a pair in a key": (lambda: {"\udfff": 1}, "surrogate"),
    "a key that is a number": (lambda: {1: "x"}, "the key 1 is not a string"),
    "a key that is none": (lambda: {None: "x"}, "the key None is not a string"),
    "bytes": (lambda: b"x", "bytes is not JSON"),
    "a set": (lambda: {"x"}, "set is not JSON"),
    "an object": (object, "object is not JSON"),
}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("name", WRONG)
def test_no_value_is_taken_that_is_no_json(name: str, renderer: Renderer) -> None:
    make, message = WRONG[name]
    value = make()
    places: dict[str, Any] = {
        r"messages\[1\].extra": lambda: renderer.render([USER, {**USER, "extra": value}]),
        r"messages\[0\].content\[0\]": lambda: renderer.render_text([{"role": "user", "content": [value]}]),
        r"messages\[0\].tool_calls\[0\].function.arguments": lambda: renderer.render_with_mask(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}]
        ),
        r"tools\[0\]": lambda: renderer.render([USER], [value]),
        r"documents\[0\].text": lambda: renderer.render([USER], documents=[{"text": value}]),
        "template_kwargs.x": lambda: renderer.render([USER], template_kwargs={"x": value}),
        r"conversations\[0\]\[0\].x": lambda: renderer.render_many_with_mask([[{**USER, "x": value}]]),
        "answer.x": lambda: renderer.extend({"role": "assistant", "x": value}, [], [USER]),
        r"new_messages\[0\].x": lambda: renderer.extend(
            {"role": "assistant", "content": ""}, [], [{**USER, "x": value}]
        ),
        r"tools\[0\].x": lambda: renderer.parse_answer([1], [{"x": value}]),
    }
    for place, call in places.items():
        with pytest.raises(ValueError, match=f"(?s)^{place}.*{message}") as error:
            call()
        assert isinstance(error.value, RenderError)
        assert len(str(error.value)) < 300


def test_mappings_and_sequences_of_any_kind_are_values(renderer: Renderer) -> None:
    message = UserDict(role="user", content="x", extra=(1, -(1 << 63), (1 << 64) - 1, 1.5, True, None, range(2)))
    assert renderer.render_text((message,)) == renderer.render_text([USER])


def test_deep_json_text_in_arguments_is_text(renderer: Renderer) -> None:
    text = "[" * 100_000
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    assert text in renderer.render_text([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])
    answer = renderer.parse_answer(renderer.encode('<tool_call>{"name": "f", "arguments": ' + text), helpers.TOOLS)
    assert answer.message.get("tool_calls") is None
    assert len(answer.malformed) == 1
    closed = '<tool_call>{"name": "f", "arguments": {"a": ' + text + "]" * 100_000 + "}}</tool_call>"
    answer = renderer.parse_answer(renderer.encode(closed), helpers.TOOLS)
    assert answer.message["content"] == closed
    assert len(answer.malformed) == 1


def test_text_that_is_no_unicode_is_no_text(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        renderer.encode("\ud800")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% for x in range(1000000) %}x{% endfor %}", "range"),
    ],
)
def test_a_template_that_does_not_end_is_an_error(template: str, message: str, tmp_path: Path) -> None:
    renderer = Renderer(helpers.write_family(tmp_path / "model", template))
    with pytest.raises(RenderError, match=message):
        renderer.render_text([USER])
