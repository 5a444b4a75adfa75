"""Servers that answer and are no engines of the run."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from primerl.config.base import Seconds, Section

ClientType = Literal["renderer", "openai_chat_completions_token", "openai_chat_completions"]


class Client(Section):
    """A server of OpenAI's chat completions: messages in, text out."""

    base_url: str
    """Its URL as OpenAI's SDK takes it, such as `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """The model's name at that server."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """Environment variable that holds the key, which is in no file and no log; no key is sent where it is left out."""
    client_type: ClientType = "openai_chat_completions"
    """How it is asked; the other types are for the run's own engines, which prove the weights they serve."""
    timeout_s: Seconds = 600.0
    """Longest time one answer may take."""

    @model_validator(mode="after")
    def _text_over_http(self) -> Self:
        if self.client_type != "openai_chat_completions":
            raise ValueError(
                f"client_type ({self.client_type}) is for the run's own engines: only they prove which weights they "
                "serve; use openai_chat_completions, or leave it out"
            )
        url = urlsplit(self.base_url)
        if url.scheme == "https":
            raise ValueError(
                f"base_url ({self.base_url}) is https, and the orchestrator speaks no TLS; reach that server through a "
                "proxy on this machine that does"
            )
        if url.scheme != "http" or not url.hostname:
            raise ValueError("base_url is no URL like http://host:port/v1; give one")
        if url.username is not None or url.password is not None or url.query or url.fragment:
            raise ValueError(
                "base_url has a user, a query or a fragment; leave them out, and name the variable that holds the key "
                "in api_key_env"
            )
        return self
