"""Servers by name: `configs/endpoints.toml` of a workspace, and well-known providers.

The file has `[[endpoint]]` tables, as `primerl lab setup` writes them: `endpoint_id`, the name; `model`, `url`, `key`:
what the server calls the model, where it is, and the NAME of the variable that holds its key. `api_base_url`
and `api_key_var` are other names of the last two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.config.command_line.sources import read as read_file
from primerl.config.errors.fail import ConfigError

DEFAULT = Path("configs/endpoints.toml")
CHAT = "openai_chat_completions"
OTHER_TYPES = (
    *("openai_completions", "openai_chat_completions_token", "openai_responses", "renderer"),
    *("anthropic_messages", "nemorl_chat_completions"),
)
SAME = {"api_base_url": "url", "api_key_var": "key", "api_client_type": "type", "extra_headers": "headers"}
KEYS = ("endpoint_id", "model", "url", "key", "type", "headers")
REQUIRED = ("endpoint_id", "model", "url", "key")

PROVIDERS: dict[str, tuple[str, str]] = {
    "prime": ("https://api.pinference.ai/api/v1", "PRIME_API_KEY"),
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "anthropic": ("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "deepseek": ("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "minimax": ("https://api.minimax.io/v1", "MINIMAX_API_KEY"),
    "glm": ("https://api.z.ai/api/paas/v4", "GLM_API_KEY"),
    "local": ("http://localhost:8000/v1", "VLLM_API_KEY"),
    "vllm": ("http://localhost:8000/v1", "VLLM_API_KEY"),
}
"""URL and variable of the key, by the name that `--provider` takes; each has OpenAI's chat completions."""
KEYLESS = ("local", "vllm")
"""Providers that are asked without a key where its variable is not set."""


@dataclass(frozen=True)
class Target:
    """What is asked: a model of a server, or a checkpoint that is served here."""

    model: str
    """The model's name at the server; of a checkpoint its folder, or its name on the hub."""
    base_url: str | None = None
    """The server's; None: a checkpoint."""
    api_key_env: str | None = None
    """Variable that holds the key; None: no key is sent."""


def target(
    model: str,
    *,
    provider: str | None = None,
    endpoints: Path | None = None,
    base_url: str | None = None,
    api_key_env: str | None = None,
) -> Target:
    """The server that a model's name stands for.

    Args:
        model: An `endpoint_id` of the file, else a name that goes to the server as it is.
        provider: One of `PROVIDERS`, for a name that the file does not have.
        endpoints: The file; by default `configs/endpoints.toml`, which need not be there.
        base_url: In place of the URL that was found.
        api_key_env: In place of the variable that was found.

    Raises:
        ConfigError: The file, the endpoint or the provider cannot be used.
    """
    if provider is not None and provider not in PROVIDERS:
        raise ConfigError(f"provider: there is no {provider!r}; there are {', '.join(PROVIDERS)}, or give --base-url")
    entry = read(endpoints, model).get(model)
    if entry is not None:
        return Target(entry.model, base_url or entry.base_url, api_key_env or entry.api_key_env)
    if provider is None:
        return Target(model, base_url, api_key_env)
    url, key = PROVIDERS[provider]
    is_needed = provider not in KEYLESS or key in os.environ
    return Target(model, base_url or url, api_key_env or (key if is_needed else None))


def read(file: Path | None = None, *names: str) -> dict[str, Target]:
    """The endpoints of a file, by their names; none if no file was given and the usual one is not there.

    Args:
        names: Those alone, if any; an entry that is not asked for may be of a kind that cannot be used here.

    Raises:
        ConfigError: The file cannot be read, or an entry cannot be used.
    """
    path = DEFAULT if file is None else file
    if path.is_dir():
        path = path / DEFAULT.name
    if file is None and not path.is_file():
        return {}
    tree = read_file(os.fspath(path))
    entries = tree.get("endpoint", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: `endpoint` is a list of tables; write [[endpoint]]")
    found: dict[str, Target] = {}
    for number, entry in enumerate(entries):
        if names and isinstance(entry.get("endpoint_id"), str) and entry["endpoint_id"] not in names:
            continue
        name, one = _entry(f"{path}, endpoint {number + 1}", entry)
        if found.get(name, one) != one:
            raise ConfigError(f"{path}: two endpoints are called {name!r}, and differ; give one of them another name")
        found[name] = one
    return found


def _entry(place: str, given: dict[str, Any]) -> tuple[str, Target]:
    entry: dict[str, Any] = {}
    for key, value in given.items():
        name = SAME.get(key, key)
        if name not in KEYS:
            raise ConfigError(f"{place}: unknown key {key!r}; there are {', '.join(KEYS)}")
        if entry.get(name, value) != value:
            raise ConfigError(f"{place}: {key} and its other name differ; omit one of them")
        entry[name] = value
    for name in REQUIRED:
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise ConfigError(f"{place}: `{name}` is missing, or is no text; {_wanted(name)}")
    kind = entry.get("type", CHAT)
    if kind != CHAT:
        known = f"primerl asks servers by {CHAT} only" if kind in OTHER_TYPES else f"expected {CHAT}"
        raise ConfigError(f"{place}: type {kind!r}: {known}; omit the key")
    if entry.get("headers"):
        raise ConfigError(f"{place}: headers: primerl sends a key and no headers of your own; omit them")
    return entry["endpoint_id"], Target(entry["model"], entry["url"], entry["key"])


def _wanted(name: str) -> str:
    return {
        "endpoint_id": "give the name by which it is used",
        "model": "give the model's name at the server",
        "url": "give the server's address, such as http://127.0.0.1:8000/v1",
        "key": "give the NAME of the environment variable that holds the key",
    }[name]
