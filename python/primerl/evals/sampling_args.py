"""Sampling arguments as verifiers' commands and files have them."""

from __future__ import annotations

from typing import Any

from primerl.config.errors.fail import ConfigError

SAME = {"max_completion_tokens": "max_tokens"}
OF_THE_TEMPLATE = ("enable_thinking", "reasoning_effort")


def split_sampling(place: str, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`max_tokens` and `temperature`, and the chat template's variables.

    Raises:
        ConfigError: Another argument is given, which evaluations do not have; `place` is where.
    """
    sampling: dict[str, Any] = {}
    template: dict[str, Any] = {}
    for key, value in given.items():
        name = SAME.get(key, key)
        if name in ("max_tokens", "temperature"):
            sampling[name] = value
        elif name in OF_THE_TEMPLATE:
            template[name] = value
        elif name == "extra_body" and isinstance(value, dict) and not value.keys() - {"chat_template_kwargs"}:
            template |= value.get("chat_template_kwargs", {})
        elif name == "n" and value == 1:
            continue
        else:
            raise ConfigError(
                f"{place}: sampling argument {key!r} has no counterpart: evaluations have max_tokens, temperature and "
                "the chat template's variables; omit it"
            )
    return sampling, template
