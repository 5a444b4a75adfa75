"""Whether an endpoint answers and takes the key, before anything is started."""

from __future__ import annotations

import json
import os

from primerl._core import ask_models
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.services import Client
from primerl.process.redaction import note, redact

ANSWER_S = 15.0
SHOWN = 300
LISTED = 8


def check(client: Client) -> str | None:
    """Asks `GET <base_url>/models`, which costs nothing. Returns a warning, if any; not every server has that route.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError]: the key is not set or refused, or there is no
    answer.
    """
    key = key_of(client)
    (url,) = client.base_urls
    status, body = _ask(client, url)
    said = " ".join(redact(body).split())[:SHOWN]
    if status in (401, 403):
        if key is None:
            raise ConfigError.at(
                "api_key_env", f"{url} wants a key (status {status}: {said}); name the variable that has it"
            )
        raise ConfigError.at(
            "api_key_env",
            f"{url} refuses the key of {client.api_key_env} (status {status}: {said}); set the variable "
            "to a key of that server",
        )
    if status >= 500 and status != 501:
        raise ConfigError.at("base_url", f"{url}/models answers with status {status}: {said}; is the server well?")
    if 300 <= status < 400:
        raise ConfigError.at("base_url", f"{url} redirects to another address (status {status}); give that address")
    return _unlisted(client.model, body) if status == 200 else None


def key_of(client: Client) -> str | None:
    """The key, which from here on is redacted wherever primerl prints or writes it."""
    if client.api_key_env is None:
        return None
    key = os.environ.get(client.api_key_env)
    if not key:
        raise ConfigError.at("api_key_env", f"{client.api_key_env} is not set; set it to the endpoint's key")
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError.at(
            "api_key_env",
            f"{client.api_key_env} holds something else than visible ASCII characters; set it to the key alone",
        )
    note([key])
    return key


def _ask(client: Client, url: str) -> tuple[int, str]:
    """As the orchestrator will: what it trusts over https, and what it refuses, is the same."""
    try:
        status, body = ask_models(url, api_key_env=client.api_key_env, within_s=ANSWER_S)
    except TimeoutError:
        raise ConfigError.at(
            "base_url", f"{url} has not answered for {ANSWER_S:.0f} s; give the address of a server that runs"
        ) from None
    except ConnectionError as error:
        raise ConfigError.at("base_url", f"no answer from {url}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error), error.key) from None  # type: ignore[attr-defined]
    return status, body.decode(errors="replace")


def _unlisted(model: str, body: str) -> str | None:
    try:
        names = [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        return None
    if not names or model in names:
        return None
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"the endpoint does not list a model {model!r}; it lists {listed}"
