"""Saved states by HTTP: listed, with an expiry, exported, deleted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from primerl.tinker.calls import NOT_HERE, Body, Call, RefusedError
from primerl.tinker.losses import LossInputError
from primerl.tinker.records import Model
from primerl.tinker.service import Service
from primerl.tinker.store import EXTERNAL, SCHEME, Facts

KNOWS_EXPORTS = (0, 30)
"""Version of the SDK that lists exported adapters; 0.25 does not know them."""


class StateRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def weights_info(self, call: Call) -> Any:
        try:
            facts = await self._service.facts(str(call.body.get("tinker_path")))
        except LossInputError as error:
            raise RefusedError(404, str(error)) from None
        return {
            "base_model": facts.base_model,
            "is_lora": True,
            "lora_rank": facts.options.rank,
            "train_mlp": facts.options.train_mlp,
            "train_attn": facts.options.train_attn,
            "train_unembed": facts.options.train_unembed,
        }

    async def training_runs(self, call: Call) -> Any:
        parts = call.parts[1:]
        if call.method == "DELETE" and len(parts) == 4 and parts[1] == "checkpoints":
            try:
                await self._service.delete(f"tinker://{parts[0]}/{parts[2]}/{parts[3]}")
            except LossInputError as error:
                raise RefusedError(404, str(error)) from None
            return Response(status_code=204)
        if len(parts) == 5 and parts[1] == "checkpoints" and parts[4] in ("ttl", "external_weights_urls"):
            return await self._of_state(call, *parts)
        if len(parts) >= 2 and parts[1] == "checkpoints":
            return _listed(await self._service.states(parts[0]), call)
        runs = _runs(self._service.models, await self._service.states())
        if not parts:
            page, cursor = _page(list(runs.values()), call)
            return {"training_runs": page, "cursor": cursor}
        if parts[0] not in runs:
            raise RefusedError(404, f"training run {parts[0]!r} is not known")
        return runs[parts[0]]

    async def _of_state(self, call: Call, model_id: str, _: str, kind: str, name: str, what: str) -> Any:
        try:
            if what == "ttl" and call.method == "PUT":
                ttl = call.body.get("ttl_seconds")
                await self._service.expire(f"{SCHEME}{model_id}/{kind}/{name}", None if ttl is None else float(ttl))
                return Response(status_code=204)
            if what == "external_weights_urls" and kind == EXTERNAL:
                return self._service.export.urls(model_id, name, f"http://{call.headers.get('host', '')}")
        except LossInputError as error:
            raise RefusedError(404, str(error)) from None
        raise RefusedError(404, NOT_HERE.format(method=call.method, path="/".join(call.parts)))

    async def checkpoints(self, call: Call) -> Any:
        return _listed(await self._service.states(), call)


def _version(call: Call) -> tuple[int, ...]:
    """Version of the SDK that asks; the newest where it does not say."""
    said = call.headers.get("x-sdk-version") or call.headers.get("x-stainless-package-version", "")
    parts = said.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else (sys.maxsize,)


def _page(found: list[Any], call: Call) -> tuple[list[Any], Body]:
    offset, limit = int(call.query.get("offset", 0)), int(call.query.get("limit", 100))
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor


def _listed(states: list[Facts], call: Call) -> Body:
    if _version(call) < KNOWS_EXPORTS:
        # It refuses the whole list for a kind that it does not know.
        states = [one for one in states if one.kind != EXTERNAL]
    page, cursor = _page([one.as_json() for one in states], call)
    return {"checkpoints": page, "cursor": cursor}


def _runs(models: Mapping[str, Model], states: list[Facts]) -> dict[str, Body]:
    """Those that train, and those that have saved something, the last first."""
    found: dict[str, tuple[float, Body]] = {}

    def add(name: str, at: float, base_model: str, rank: int, metadata: Any) -> None:
        last = max(at, found[name][0]) if name in found else at
        run = {
            "training_run_id": name,
            "base_model": base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": rank,
            "last_request_time": datetime.fromtimestamp(last, UTC).isoformat(),
            "user_metadata": metadata,
        }
        found[name] = (last, run)

    for state in states:
        add(state.model_id, state.saved, state.base_model, state.options.rank, state.user_metadata)
    for model in models.values():
        add(model.id, model.last_call, model.base_model, model.options.rank, model.user_metadata)
    return {name: run for name, (_, run) in sorted(found.items(), key=lambda entry: -entry[1][0])}
