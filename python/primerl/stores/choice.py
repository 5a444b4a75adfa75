"""Which store a URL names: one of another package, else whatever fsspec knows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from primerl.process import plugins
from primerl.runs.state import state_folder
from primerl.stores.entries import StoreError
from primerl.stores.fsspec_store import FsspecStore
from primerl.stores.store import Store

GROUP = "primerl.stores"
SCHEME = re.compile(r"(?P<name>[\w.-]+(?::[A-Za-z_]\w*)?)://")


def open_store(url: str | None = None) -> Store:
    """The store at a URL: of another package by what is before `://`, the name of an entry point in `primerl.stores`
    or an import path; of any other scheme, or a folder, by fsspec. Raises StoreError."""
    url = url or default_url()
    scheme = SCHEME.match(url)
    if scheme is not None:
        name = scheme["name"]
        if plugins.IMPORT_PATH.fullmatch(name) or name in plugins.names(GROUP, {}):
            try:
                store: Store = plugins.make(name, plugins.find(GROUP, name, {}), url, keep=(StoreError,))
            except plugins.PluginError as error:
                raise StoreError.at("store.url", f"{url}: {error}") from error
            return store
    return FsspecStore(url)


def default_url() -> str:
    return str(state_folder() / "store")


def store_of_run(config: Path) -> Store | None:
    """The store in the stored copy of a run's config; None where it has none."""
    try:
        section = tomllib.loads(config.read_text(encoding="utf-8")).get("store")
    except (OSError, ValueError):
        return None
    return open_store(section.get("url")) if isinstance(section, dict) else None
