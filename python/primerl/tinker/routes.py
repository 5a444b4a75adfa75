"""HTTP of the Tinker API, under `/api/v1`: paths, key and answers. What a call means is in `service`.

Answers that decide what the SDK does: 408 has it poll again, 404 and 410 end a call, 5xx would be repeated without end,
so a failed call is a result with `error` instead.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from primerl.net.addresses import is_own_name
from primerl.process.printing import printable
from primerl.tinker.calls import NOT_HERE, Body, Call, RefusedError
from primerl.tinker.export import FILES
from primerl.tinker.futures import MOST_PRINTED, Future
from primerl.tinker.losses import LossInputError, NotFoundError
from primerl.tinker.page import Page
from primerl.tinker.records import UnknownError
from primerl.tinker.sampling import MOST_SAMPLES
from primerl.tinker.service import Service
from primerl.tinker.state_routes import StateRoutes
from primerl.tinker.store import EXTERNAL, SAMPLER, WEIGHTS
from primerl.tinker.wire import request_of

log = logging.getLogger("primerl.tinker")

PREFIX = "/api/v1/"
HOLD_S = 20.0
"""The length of a long poll; the SDK gives up after 45 s."""
MOST_BODY = 1 << 30
OLD_SDK = (
    "forward_backward is read as application/x-protobuf only, which the Tinker SDK sends from version 0.25 on; this "
    "one is older: pip install -U tinker"
)


def application(
    service: Service, key: str | None, engines_key: str, max_context: int, page: Page | None = None
) -> Starlette:
    """`key`: what clients send as `X-API-Key`, or pages as a bearer token; None: any. `engines_key`: what this server's
    own engines send. `page`: None for a server without one."""
    routes = Routes(service, max_context)

    async def answer(request: Request) -> Response:
        def _refused(status: int, detail: str) -> JSONResponse:
            return refused(request, status, detail)

        # Not `request.url`, which has the client's own Host header in it.
        path = request.scope["path"]
        if path == "/engines/join":
            try:
                return await _joined(service, request, engines_key)
            except (RefusedError, ValueError, KeyError, TypeError) as error:
                return _refused(422, f"{path}: {error}")
        if key is None and (said := _foreign(request)) is not None:
            return _refused(403, said)
        if page is not None and request.method == "GET" and (asset := page.asset(path)) is not None:
            return asset
        if request.method == "GET" and path.startswith(FILES):
            raw = request.scope["raw_path"].decode()
            return service.export.answer(raw.partition("?")[0], path, request.query_params) or _refused(404, path)
        if key is not None and not hmac.compare_digest(_key_of(request).encode(), key.encode()):
            return _refused(
                401, "the key is not this server's: set TINKER_API_KEY to the value that it was started with"
            )
        if page is not None and (data := page.data(path)) is not None:
            return data
        try:
            raw = await _read(request)
            is_json = raw and "json" in request.headers.get("content-type", "json")
            body = json.loads(raw) if is_json else {}
            if not isinstance(body, dict):
                raise RefusedError(422, "the body has to be a JSON object")
            parts = path.removeprefix(PREFIX).strip("/").split("/")
            call = Call(request.method, parts, body, raw, request.headers, request.query_params)
            if not path.startswith(PREFIX):
                raise RefusedError(404, NOT_HERE.format(method=request.method, path=path))
            found = await routes.answer(call)
        except RefusedError as error:
            return _refused(error.status, str(error))
        except UnknownError as error:
            return _refused(404, str(error))
        except (LossInputError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            return _refused(422, f"{path}: {error}")
        except asyncio.CancelledError:
            return _refused(503, "the server is stopping")
        except Exception as error:
            # No 500, which the SDK would repeat without end.
            log.exception("%s failed", path)
            return _refused(422, f"{path}: {type(error).__name__}: {error}")
        return found if isinstance(found, Response) else JSONResponse(found)

    methods = ["GET", "POST", "PUT", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", answer, methods=methods)])


def _key_of(request: Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


def _foreign(request: Request) -> str | None:
    """Why a request to a server without a key is not answered: a page of a browser may have sent it."""
    host = request.headers.get("host", "")
    if not is_own_name(host):
        return f"this server is for this machine alone; ask for it as 127.0.0.1, not as {host}"
    if "origin" in request.headers:
        return "pages of a browser get no answer from a server without a key (TINKER_API_KEY)"
    return None


def refused(request: Request, status: int, detail: str) -> JSONResponse:
    client = "a client" if request.client is None else f"{request.client.host}:{request.client.port}"
    what = f"{request.method} {request.scope['path']} of {client}"
    log.info("%s is refused with %d: %s", printable(what, MOST_PRINTED), status, printable(detail, MOST_PRINTED))
    # `error` is what pages of primerl show.
    return JSONResponse({"detail": detail, "error": {"message": detail}}, status)


async def _read(request: Request) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MOST_BODY:
                raise RefusedError(413, f"the body is larger than {MOST_BODY} bytes; send fewer datums in a call")
            parts.append(part)
    except ClientDisconnect:
        raise RefusedError(400, "the client has gone") from None
    return b"".join(parts)


async def _joined(service: Service, request: Request, engines_key: str) -> Response:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {engines_key}".encode()):
        return refused(request, 401, "only this server's own engines join it")
    body = json.loads(await _read(request))
    await service.pool.joined(str(body["name"]), str(body["url"]))
    return JSONResponse({"engine": body["name"]})


class Routes:
    def __init__(self, service: Service, max_context: int) -> None:
        self._service = service
        self._max_context = max_context
        states = StateRoutes(service)
        simple: dict[str, Callable[[Call], Awaitable[Any]]] = {
            "client": self._client,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions": self._sessions,
            "healthz": self._healthz,
            "telemetry": self._telemetry,
            "cancel_future": self._cancel,
            "get_server_capabilities": self._capabilities,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "load_weights": self._load_weights,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._export,
            "create_sampling_session": self._create_sampler,
            "samplers": self._samplers,
            "asample": self._asample,
            "retrieve_future": self._retrieve,
            "weights_info": states.weights_info,
            "training_runs": states.training_runs,
            "checkpoints": states.checkpoints,
        }
        self._by_name = simple

    async def answer(self, call: Call) -> Any:
        found = self._by_name.get(call.parts[0])
        if found is None:
            raise RefusedError(404, NOT_HERE.format(method=call.method, path="/".join(call.parts)))
        return await found(call)

    # Connection

    async def _client(self, call: Call) -> Any:
        if call.parts[1:] == ["config"]:
            # One batch in one request, so that it is packed as a whole.
            return {"fwdbwd_max_chunk_len": 1 << 20, "fwdbwd_max_chunk_bytes_count": MOST_BODY // 2}
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    async def _create_session(self, call: Call) -> Any:
        return {"session_id": self._service.begin().id}

    async def _heartbeat(self, call: Call) -> Any:
        call.need("session_id")
        try:
            self._service.heartbeat(str(call.body["session_id"]))
        except UnknownError as error:
            raise RefusedError(410, str(error)) from None
        return {}

    async def _sessions(self, call: Call) -> Any:
        if call.parts[2:] != ["finish"]:
            raise RefusedError(404, NOT_HERE.format(method=call.method, path="/".join(call.parts)))
        await self._service.finish(call.parts[1])
        return {}

    async def _healthz(self, call: Call) -> Any:
        return {"status": "ok"}

    async def _telemetry(self, call: Call) -> Any:
        return {"status": "accepted"}

    async def _cancel(self, call: Call) -> Any:
        self._service.cancel(str(call.body.get("request_id")))
        return {}

    async def _capabilities(self, call: Call) -> Any:
        how = {"max_context_length": self._max_context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **how} for name in self._service.limits.names]}

    # Training

    async def _create_model(self, call: Call) -> Any:
        call.need("session_id", "base_model")
        return _promise(self._service.create_model(call.body))

    async def _get_info(self, call: Call) -> Any:
        model = self._service.model(call.body.get("model_id"))
        data = {"arch": self._service.architecture, "model_name": model.base_model}
        return {
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.options.rank,
            "model_name": model.base_model,
            "model_data": data | {"tokenizer_id": self._service.tokenizer_folder},
        }

    async def _forward_backward(self, call: Call) -> Any:
        if "protobuf" not in call.headers.get("content-type", ""):
            raise RefusedError(415, OLD_SDK)
        raw = call.raw
        if call.headers.get("content-encoding") == "zstd":
            import zstandard

            raw = zstandard.ZstdDecompressor().decompress(raw, max_output_size=MOST_BODY)
        return _promise(self._service.forward_backward(request_of(raw)))

    async def _optim_step(self, call: Call) -> Any:
        return _promise(self._service.optim_step(call.body))

    async def _load_weights(self, call: Call) -> Any:
        call.need("path")
        if call.body.get("session_id"):
            return _promise(self._service.load_model({"optimizer": False, **call.body}))
        return _promise(self._service.load_into(call.body))

    async def _save_weights(self, call: Call) -> Any:
        call.need("path")
        return _promise(self._service.save(call.body, WEIGHTS))

    async def _save_for_sampler(self, call: Call) -> Any:
        return _promise(self._service.save(call.body, SAMPLER))

    async def _export(self, call: Call) -> Any:
        call.need("path")
        if call.body.get("age_encryption_recipients"):
            raise RefusedError(422, "age_encryption_recipients: this server does not encrypt what it exports; omit it")
        return _promise(self._service.save(call.body, EXTERNAL))

    # Sampling

    async def _create_sampler(self, call: Call) -> Any:
        call.need("session_id")
        try:
            sampler = await self._service.create_sampler(call.body)
        except NotFoundError as error:
            raise RefusedError(404, str(error)) from None
        return {"sampling_session_id": sampler.id}

    async def _samplers(self, call: Call) -> Any:
        sampler = self._service.sampler("/".join(call.parts[1:]))
        return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.path}

    async def _asample(self, call: Call) -> Any:
        future = self._service.sample(call.body)
        count = min(max(1, int(call.body.get("num_samples") or 1)), MOST_SAMPLES)
        return _promise(future) | {"sample_sequence_ids": [f"{future.id}:{index}" for index in range(count)]}

    async def _retrieve(self, call: Call) -> Any:
        future = self._service.futures.get(str(call.body.get("request_id")))
        if future is None:
            raise RefusedError(410, "this promise is not known: it is too old, or the server was started again")
        try:
            await asyncio.wait_for(future.done.wait(), HOLD_S)
        except TimeoutError:
            return JSONResponse({"type": "try_again", "request_id": future.id, "queue_state": "active"}, 408)
        return Response(future.body, media_type=future.media_type)


def _promise(future: Future) -> Body:
    return {"request_id": future.id, "model_id": future.model_id}
