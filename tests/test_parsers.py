"""Parsers by name: ours, and those that packages register or files describe."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import render_helpers as helpers
from primerl import _core, parsers
from primerl.config.process_files.files import to_toml
from primerl.config.schema import parser_names
from primerl.config.schema.orchestrator import OrchestratorConfig, Parsers
from primerl.render import ParserError, PrimerlError, Renderer, RenderError, describe_parser
from pydantic import ValidationError

ROOT = Path(__file__).parent.parent
ACME = {"format": "tagged", "call": ["<call ", "</call>"], "reasoning": ["<hm>", "</hm>"]}
ACME_FIELDS = {"name_end": ">", "key": ["<", ">"], "value": ["", "</>"]}
ANSWER = "<hm>So.</hm>I look.<call get_weather><city>Zürich</><days>2</></call>"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that registers parsers."""
    formats = {**ACME, "tagged": ACME_FIELDS}
    (tmp_path / "acme_formats.py").write_text(f"ACME = {formats!r}\nFILE = 'acme.json'\nWRONG = 3\n", encoding="utf-8")
    (tmp_path / "acme.json").write_text(json.dumps(formats), encoding="utf-8")
    info = tmp_path / "acme_formats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-formats\nVersion: 1.0\n", encoding="utf-8")
    names = {"acme": "ACME", "acme_file": "FILE", "acme_wrong": "WRONG", "acme_gone": "GONE"}
    lines = [f"{name} = acme_formats:{value}" for name, value in names.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{parsers.GROUP}]", *lines]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def check(renderer: Renderer) -> None:
    message = renderer.parse(renderer.encode(ANSWER), helpers.TOOLS)
    assert message["reasoning_content"] == "So."
    assert message["content"] == "I look."
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich", "days": 2}


@pytest.mark.parametrize("name", ["acme", "acme_file"])
def test_a_registered_parser_reads_answers(package: Path, tmp_path: Path, name: str) -> None:
    described = describe_parser(name)
    assert described["name"] == name
    renderer = Renderer(helpers.write_tiny_model(tmp_path / "model"), tool_parser=described)
    assert (renderer.tool_parser, renderer.reasoning_parser) == (name, name)
    check(renderer)


def test_a_config_names_a_registered_parser_or_a_file(package: Path, tmp_path: Path) -> None:
    assert Parsers(tool="hermes", reasoning="think").model_dump() == {"tool": "hermes", "reasoning": "think"}
    assert Parsers.model_validate({"tool": "acme"}).tool == {"name": "acme", **ACME, "tagged": ACME_FIELDS}
    file = tmp_path / "mine.toml"
    file.write_text('format = "json"\ncall = ["<c>", "</c>"]\n', encoding="utf-8")
    by_file = Parsers.model_validate({"tool": str(file)})
    assert by_file.tool == {"name": "mine", "format": "json", "call": ["<c>", "</c>"]}
    # What a process is given is the description, and is read again as it is.
    assert Parsers.model_validate(by_file.model_dump()) == by_file


def test_the_orchestrator_is_given_the_description(package: Path, tmp_path: Path) -> None:
    def resolved(chosen: Parsers) -> dict[str, Any]:
        config = OrchestratorConfig.model_validate(
            {
                "output_dir": str(tmp_path / "out"),
                "max_steps": 2,
                "batch_size": 4,
                "group_size": 2,
                "seq_len": 512,
                "model": {"path": str(helpers.write_tiny_model(tmp_path / "model")), "name": "m"},
                "sampling": {"max_tokens": 8},
                "train": {"env": [{"id": "task"}]},
                "parsers": chosen,
            }
        )
        return tomllib.loads(to_toml(config))

    config = resolved(Parsers.model_validate({"tool": "acme"}))
    assert config["parsers"]["tool"] == {"name": "acme", **ACME, "tagged": ACME_FIELDS}
    with _core.Orchestrator(config) as orchestrator:
        orchestrator.start()
    config["parsers"]["tool"]["call"] = ["", ""]
    with pytest.raises(PrimerlError, match=r'call: \["", ""\] has an empty marker'):
        _core.Orchestrator(config)


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as error:
        Parsers.model_validate(given)
    return str(error.value)


def test_a_parser_that_cannot_be_used_is_refused_by_field_and_value(package: Path, tmp_path: Path) -> None:
    assert "there is no parser 'hermse'; there are 'hermes', 'qwen3_coder', " in refusal({"tool": "hermse"})
    assert "acme_formats:WRONG (the entry point 'acme_wrong' of primerl.tool_parsers) is 3" in refusal(
        {"tool": "acme_wrong"}
    )
    assert "cannot be imported: AttributeError" in refusal({"tool": "acme_gone"})
    file = tmp_path / "bad.toml"
    file.write_text('format = "json"\ncall = ["", "</c>"]\n', encoding="utf-8")
    assert f'{file}: call: ["", "</c>"] has an empty marker' in refusal({"tool": str(file)})
    file.write_text("format = json", encoding="utf-8")
    assert f"{file} cannot be read: " in refusal({"reasoning": str(file)})
    file.write_text(f"a = {'[' * 3000}{']' * 3000}", encoding="utf-8")
    assert f"{file} cannot be read: a value is nested too deeply" in refusal({"tool": str(file)})
    assert "nowhere.toml cannot be read: " in refusal({"tool": "nowhere.toml"})
    assert "format: unknown variant `xml`" in refusal({"tool": {"format": "xml"}})
    with pytest.raises(ParserError, match="did you mean 'acme'"):
        describe_parser("acmee")
    with pytest.raises(RenderError, match="tool_parser: format: unknown variant `xml`"):
        Renderer(helpers.write_tiny_model(tmp_path / "model"), tool_parser={"format": "xml"})


def test_lists_of_names_are_those_of_the_extension() -> None:
    assert get_args(parser_names.ToolParserName) == _core.TOOL_PARSERS
    assert get_args(parser_names.ReasoningParserName) == _core.REASONING_PARSERS
    page = (ROOT / "docs" / "render.md").read_text(encoding="utf-8")
    for column, names in {"tool_parser": _core.TOOL_PARSERS, "reasoning_parser": _core.REASONING_PARSERS}.items():
        table = page.split(f"| `{column}` |")[1].split("\n\n")[0]
        assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == names
