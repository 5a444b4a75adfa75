"""What a run uses that is not its own: machines, the store, a tailnet, model servers that are not its engines."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from primerl.config.schema.base import BadKeysError, Bound, LargeCountOrZero, Seconds, SecondsOrZero, Section, Wait
from primerl.process.setting_checks import MOST_COUNT

KEY_PREFIX = "tskey-auth-"
PREFIX_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,29}")
LONGEST_NAME = 63
"""Characters of a label of DNS, which a node's name is."""
LONGEST_RUN = 16


class Tailscale(Section):
    """A tailnet that environments reach private services over: each env worker of this machine is a node of it."""

    enabled: bool = False
    """Start `tailscaled` with each env worker that the run starts, without root; both programs have to be installed
    (docs/hosted.md)."""
    # Never dumped: the run's config is written down, and shown by services.
    auth_key: SecretStr | None = Field(default=None, exclude=True)
    """Key that begins with `tskey-auth-`, reusable where there are several workers. Better in the environment, as
    TAILSCALE_AUTH_KEY, or in a file of variables or a secret of that name, than in the config."""
    hostname_prefix: Annotated[str, Bound("1 to 30 of a-z, 0-9 and -, the first a letter")] = "primerl"
    """Begin of the nodes' names, `<prefix>-env-<worker>-<run>`."""
    login_s: Seconds = 30.0
    """How long a worker's node has to join the tailnet, in seconds, before the run fails."""

    # Here, of the whole section, since a message about a field shows its value.
    @model_validator(mode="after")
    def _as_told(self) -> Self:
        if self.auth_key is not None and not self.auth_key.get_secret_value().startswith(KEY_PREFIX):
            raise BadKeysError(
                f"auth_key does not begin with {KEY_PREFIX!r}; give an auth key of Tailscale, no API key", "auth_key"
            )
        if not PREFIX_PATTERN.fullmatch(self.hostname_prefix):
            raise BadKeysError(
                f"hostname_prefix ({self.hostname_prefix!r}) must be 1 to 30 of a-z, 0-9 and -, and begin with a "
                "letter",
                "hostname_prefix",
            )
        return self


class TailnetNode(Section):
    """What an env worker is in a tailnet; the key is in no file."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    """Name of the node."""
    log: str = Field(min_length=1)
    """File that the log of its `tailscaled` is appended to."""
    login_s: Seconds = 30.0
    """How long it has to join, in seconds."""


def node_name(prefix: str, index: int, run: str) -> str:
    """Name of an env worker in the tailnet: `{prefix}-env-{index}-{run}`.

    Args:
        run: The run's id; of a run that has none, the name of its folder, made a part of a name.
    """
    return f"{prefix}-env-{index}-{re.sub('[^a-z0-9]+', '-', run.lower())[:LONGEST_RUN].strip('-') or 'run'}"


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
    """Environment variable that holds the key, which is in no file and no log; no key is sent if unset."""
    client_type: ClientType | None = None
    """How it is asked. `openai_chat_completions`: messages in, text out, for evaluations and for the teacher of
    `training_mode = "sft"`. `renderer`: token ids in, their log-probabilities out, over vLLM's
    `/inference/v1/generate`, for the teacher of `training_mode = "opd"`. Follows from these if unset."""
    timeout_s: Wait = 600.0
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
            raise BadKeysError("base_url is an empty list; give a URL like http://host:port/v1", "base_url")
        # Beside /v1 other routes are asked: with it or without it, it is the same server.
        roots = [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in self.base_urls]
        twice = next((url for url, root in zip(self.base_urls, roots, strict=True) if roots.count(root) > 1), None)
        if twice is not None:
            raise BadKeysError(f"base_url names {twice} twice; name each server once", "base_url")
        return self

    @property
    def base_urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url

    def check_type(self, name: str, wanted: ClientType) -> None:
        """Raises ValueError: the server, which `name` names, is there for something else than its client_type."""
        if wanted != "renderer" and len(self.base_urls) > 1:
            raise BadKeysError(
                f"{name}.base_url names {len(self.base_urls)} servers, and only a teacher that scores (training_mode = "
                '"opd") may be several; give one URL (a proxy in front of several servers has one)',
                f"{name}.base_url",
            )
        if self.client_type in (None, wanted):
            return
        why = "which is for engines: messages go to this server, and text comes back"
        if wanted == "renderer":
            why = 'but the teacher of training_mode = "opd" is an engine that gives log-probabilities of token ids'
        raise BadKeysError(
            f"{name}.client_type ({self.client_type}), {why}; use {wanted}, or omit it", f"{name}.client_type"
        )


def _check_url(base_url: str) -> None:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise BadKeysError("base_url is no URL like http://host:port/v1 or https://host/v1; give one", "base_url")
    if url.username is not None or url.password is not None or url.query or url.fragment:
        raise BadKeysError(
            "base_url has a user, a query or a fragment; remove them, and name the variable that holds the key "
            "in api_key_env",
            "base_url",
        )


class Teacher(Section):
    """Whom the policy learns from, in the training modes that have one."""

    client: Client


def _all_or_some(value: int) -> int:
    if value == 0:
        raise ValueError("0 would keep none; leave the store out, or give -1 for all")
    return value


Kept = Annotated[int, Field(ge=-1, le=MOST_COUNT), Bound("-1 or at least 1"), AfterValidator(_all_or_some)]


class StoredAdapters(Section):
    """Adapters in the store."""

    interval: LargeCountOrZero = 0
    """Steps between adapters that are stored; 0: only the last one."""
    keep: Kept = 3
    """Newest adapters of a run that are kept; -1: all. Deployed ones always are."""


class Store(Section):
    """Copies of a run's checkpoints and weights, made during the run (docs/runs.md)."""

    url: str | None = Field(default=None, min_length=1)
    """Folder, or a URL that fsspec knows (`s3://`, `gs://`); default: a folder in the state folder."""
    keep: Kept = 5
    """Newest checkpoints, and newest model folders, of a run that are kept; -1: all."""
    adapters: StoredAdapters = StoredAdapters()


class StoreWorkerConfig(Section):
    """The process that uploads (`primerl store-worker @ file`)."""

    run: str
    """Id of the run."""
    output_dir: str
    """Its folder."""
    model: str
    """Model folder that it began with."""
    url: str | None = None
    """URL of the store."""
    keep: Kept = 5
    """Newest checkpoints and model folders that are kept."""
    adapters_interval: LargeCountOrZero = 0
    """Steps between adapters."""
    adapters_keep: Kept = 3
    """Newest adapters that are kept."""
    give_up_s: SecondsOrZero = 600.0
    """How long one upload is tried again, before it is the next one's turn; seconds."""
