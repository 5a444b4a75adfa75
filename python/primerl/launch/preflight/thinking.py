"""What a chat template does with the options of reasoning, `enable_thinking` and `reasoning_effort`: it is rendered
with each of their values. An option that changes nothing is refused, since the run would not be what its config says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError

OPTIONS: dict[str, tuple[Any, ...]] = {"enable_thinking": (True, False), "reasoning_effort": ("low", "medium", "high")}
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2 is 4."}
PROBES = ([QUESTION], [{"role": "system", "content": "Be brief."}, QUESTION], [QUESTION, ANSWER, QUESTION])
"""Conversations that a template may write differently."""
NOW = 1.75e9
"""For templates that write the date."""
LONGEST_SHOWN = 60


def effects(folder: Path) -> dict[str, str | None]:
    """For each option what the template of this folder writes for its values, in words; None where it changes nothing.

    Raises ConfigError where the folder has no template that can be used.
    """
    renderer = _renderer(folder)
    return {name: _effect(renderer, name, values) for name, values in OPTIONS.items()}


def check(folder: Path, given: Mapping[str, Any], where: str) -> None:
    """Refuses options in `given`, the template's variables, that change nothing, or whose value the template refuses.

    Args:
        where: The key that holds `given`, for the message.
    Raises:
        ConfigError: with the first of them.
    """
    asked = {name: value for name, value in given.items() if name in OPTIONS}
    if not asked:
        return
    renderer = _renderer(folder)
    for name, value in asked.items():
        key = f"{where}.{name}"
        if isinstance(value, list | dict):
            raise ConfigError(f"{where}.{name} is {value!r}; give one value, a word or true or false", key)
        if _effect(renderer, name, (*OPTIONS[name], value)) is None:
            others = [other for other in OPTIONS if other != name and _effect(renderer, other, OPTIONS[other])]
            instead = f"; it has {others[0]} instead" if others else ""
            raise ConfigError.at(
                key,
                f"the chat template of {folder} does nothing with it{instead}; omit it "
                f"(`primerl models check {folder}` shows what a template does)",
            )
        from primerl.render import RenderError

        try:
            renderer.render_text([QUESTION], template_kwargs={**given}, now=NOW)
        except RenderError as error:
            raise ConfigError.at(where, f"the chat template of {folder} refuses {name} = {value!r}: {error}") from None


def _renderer(folder: Path) -> Any:
    from primerl.render import Renderer, RenderError

    try:
        return Renderer(os.fspath(folder))
    except RenderError as error:
        raise ConfigError.at("model.path", str(error)) from None


def _effect(renderer: Any, name: str, values: tuple[Any, ...]) -> str | None:
    for probe in PROBES:
        plain = _text(renderer, probe, {})
        written = {value: _text(renderer, probe, {name: value}) for value in values}
        if plain is None or all(text in (plain, None) for text in written.values()):
            continue
        as_default = [_word(value) for value, text in written.items() if text == plain]
        other = [
            f"{_word(value)} {_difference(plain, text)}"
            for value, text in written.items()
            if text is not None and text != plain
        ]
        return "; ".join([f"default as {' and '.join(as_default)}" if as_default else "default: none of them", *other])
    return None


def _text(renderer: Any, probe: list[dict[str, Any]], kwargs: dict[str, Any]) -> str | None:
    """None where the template refuses it."""
    from primerl.render import RenderError

    try:
        return str(renderer.render_text(probe, template_kwargs=kwargs, now=NOW))
    except RenderError:
        return None


def _difference(plain: str, text: str) -> str:
    start = _alike(plain, text)
    end = _alike(plain[start:][::-1], text[start:][::-1])
    added, lost = text[start : len(text) - end], plain[start : len(plain) - end]
    if not added:
        return f"omits {_shown(lost)}"
    return f"writes {_shown(added)}" + (f" for {_shown(lost)}" if lost else "")


def _alike(one: str, other: str) -> int:
    """Characters at the beginning that are the same."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _shown(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 2]}..")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
