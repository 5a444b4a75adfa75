"""The server's page: clients, queue, losses over steps, samples, engines. `GET /status` is the part of it for programs.

```text
/                      the page; /page/assets/... its files (no data: no key is needed)
/page/now              all that it shows, as JSON
/status                clients, queue, samplers, engines, as JSON
```
Style, charts and elements are those of a run's page.
"""

from __future__ import annotations

import time
from collections import Counter
from importlib.resources import files
from typing import Any

from starlette.responses import JSONResponse, Response

from primerl._core import page_files
from primerl.tinker.service import Service

INDEX, SCRIPT = "index.html", "tinker.js"


class Page:
    def __init__(self, service: Service, about: dict[str, Any]) -> None:
        """`about`: what the page says of the server itself: `folder`, `output_dir`, `model`."""
        self._service, self._about = service, about
        self._started = time.time()
        self._assets, self._policy = page_files()
        web = files("primerl.tinker") / "web"
        self._index = (web / INDEX).read_text(encoding="utf-8")
        self._assets[SCRIPT] = ("text/javascript; charset=utf-8", (web / SCRIPT).read_text(encoding="utf-8"))

    def asset(self, path: str) -> Response | None:
        """One of the page's own files, which hold no data."""
        name = path.removeprefix("/page/assets/")
        if path == "/":
            kind, text = "text/html; charset=utf-8", self._index
        elif name != path and name in self._assets:
            kind, text = self._assets[name]
        else:
            return None
        headers = {"Content-Security-Policy": self._policy, "X-Content-Type-Options": "nosniff"}
        return Response(text, media_type=kind, headers={**headers, "Cache-Control": "no-cache"})

    def data(self, path: str) -> Response | None:
        if path == "/status":
            return JSONResponse(status(self._service))
        if path == "/page/now":
            return JSONResponse(self._now())
        return None

    def _now(self) -> dict[str, Any]:
        service = self._service
        return {
            **self._about,
            "elapsed_s": time.time() - self._started,
            "status": status(service),
            "losses": {one.id: {"x": one.losses.x, "y": one.losses.y} for one in service.models.values()},
            "samples": service.samples.described(service.tokenizer),
        }


def status(service: Service) -> dict[str, Any]:
    now = time.monotonic()
    waiting = Counter(future.kind for future in service.futures.waiting())
    return {
        "models": [
            {
                "model_id": one.id,
                "base_model": one.base_model,
                "rank": one.options.rank,
                "steps": one.client.steps,
                "calls": one.calls,
                "queued": one.queue.length,
                "running": one.queue.running,
                "loss_sum": one.loss,
                "last_call": one.last_call,
                "heard_s": now - service.sessions[one.session].heard if one.session in service.sessions else None,
            }
            for one in list(service.models.values())
        ],
        "sessions": len(service.sessions),
        "samplers": len(service.samplers),
        "waiting": sum(waiting.values()),
        "queue": dict(waiting),
        "engines": [
            {
                "name": one.name,
                "url": one.url,
                "sampler": one.holds,
                "digest": one.digest,
                "requests": one.busy,
                "loads": one.loads,
            }
            for one in service.pool.engines.values()
        ],
    }
