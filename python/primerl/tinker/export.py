"""Exported adapters, file by file: addresses that need no key, since the SDK fetches them with none, and are signed."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.responses import FileResponse, Response

from primerl.tinker.losses import LossInputError
from primerl.tinker.store import EXTERNAL, PEFT_FILES, SCHEME, Store

SIGNED_S = 3600.0
FILES = "/files/"


class Export:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = secrets.token_bytes(32)

    def urls(self, model_id: str, name: str, address: str) -> dict[str, Any]:
        """`address`: of this server, as the client knows it. Raises LossInputError."""
        self._store.exported(f"{SCHEME}{model_id}/{EXTERNAL}/{name}")
        expires = int(time.time() + SIGNED_S)
        urls = {}
        for file in PEFT_FILES:
            path = f"{FILES}{quote(model_id)}/{quote(name)}/{file}"
            query = urlencode({"expires": expires, "signature": self._signature(path, str(expires))})
            urls[file] = f"{address}{path}?{query}"
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    def answer(self, raw_path: str, path: str, query: Mapping[str, str]) -> Response | None:
        """A file, for an address that this server has signed; None for any other path. `raw_path`: as it was sent."""
        if not path.startswith(FILES):
            return None
        expires, signature = query.get("expires", ""), query.get("signature", "")
        if not hmac.compare_digest(signature.encode(), self._signature(raw_path, expires).encode()):
            return Response("the address is not one that this server has signed", 403)
        if float(expires) < time.time():
            return Response("the address has expired; ask for another one", 403)
        model_id, name, file = path.removeprefix(FILES).split("/")
        try:
            folder: Path = self._store.exported(f"{SCHEME}{model_id}/{EXTERNAL}/{name}")
        except LossInputError as error:
            return Response(str(error), 404)
        return FileResponse(folder / file, media_type="application/octet-stream", filename=file)

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path}?{expires}".encode(), hashlib.sha256).hexdigest()
