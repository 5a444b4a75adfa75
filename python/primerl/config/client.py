"""Servers that answer and are no engines of the run."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from primerl.config.base import Seconds, Section

ClientType = Literal["renderer", "openai_chat_completions_token", "openai_chat_completions"]


class Client(Section):
    """A server that is asked over http or https."""

    base_url: str | list[str]
    """Its URL as OpenAI's SDK takes it, such as `http://127.0.0.1:8000/v1` or `https://api.example.com/v1`. Over https
    its certificate must be signed by an authority that this machine trusts, or by one in the file that SSL_CERT_FILE
    names. A teacher that scores (`training_mode = "opd"`) may be several servers of the same checkpoint, as a list:
    they share the requests, and those of one that fails go to the others."""
    model: str = Field(min_length=1)
    """The model's name at that server."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """Environment variable that holds the key, which is in no file and no log; no key is sent where it is left out."""
    client_type: ClientType | None = None
    """How it is asked. `openai_chat_completions`: messages in, text out, for evaluations and for the teacher of
    `training_mode = "sft"`. `renderer`: token ids in, their log-probabilities out, over vLLM's
    `/inference/v1/generate`, for the teacher of `training_mode = "opd"`. Follows from these where it is left out."""
    timeout_s: Seconds = 600.0
    """Longest time one answer may take."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        # Else each of the two types would say what is wrong.
        if not all(isinstance(url, str) for url in (value if isinstance(value, list) else [value])):
            raise ValueError("it must be a URL like http://host:port/v1, or a list of URLs")
        return value

    @model_validator(mode="after")
    def _over_http(self) -> Self:
        for url in self.base_urls:
            _check_url(url)
        if not self.base_urls:
            raise ValueError("base_url is an empty list; give a URL like http://host:port/v1")
        # Beside /v1 other routes are asked: with it or without it, it is the same server.
        roots = [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in self.base_urls]
        twice = next((url for url, root in zip(self.base_urls, roots, strict=True) if roots.count(root) > 1), None)
        if twice is not None:
            raise ValueError(f"base_url names {twice} twice; name each server once")
        return self

    @property
    def base_urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url

    def check_type(self, name: str, wanted: ClientType) -> None:
        """Raises ValueError: the server, which `name` names, is there for something else than its client_type."""
        if wanted != "renderer" and len(self.base_urls) > 1:
            raise ValueError(
                f"{name}.base_url names {len(self.base_urls)} servers, and only a teacher that scores (training_mode = "
                '"opd") may be several; give one URL (a proxy in front of several servers has one)'
            )
        if self.client_type in (None, wanted):
            return
        why = "which is for engines: messages go to this server, and text comes back"
        if wanted == "renderer":
            why = 'but the teacher of training_mode = "opd" is an engine that gives log-probabilities of token ids'
        raise ValueError(f"{name}.client_type ({self.client_type}), {why}; use {wanted}, or leave it out")


def _check_url(base_url: str) -> None:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("base_url is no URL like http://host:port/v1 or https://host/v1; give one")
    if url.username is not None or url.password is not None or url.query or url.fragment:
        raise ValueError(
            "base_url has a user, a query or a fragment; leave them out, and name the variable that holds the key "
            "in api_key_env"
        )


class Teacher(Section):
    """Whom the policy learns from, in the training modes that have one."""

    client: Client
