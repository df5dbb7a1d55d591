"""The routes."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstow.serve import delivery, observe
from kvstow.serve.body import read_body, while_connected
from kvstow.serve.collect import read_stats
from kvstow.serve.options import Limits
from kvstow.serve.refusal import Refusal, TooSlow, Unexpected
from kvstow.serve.requests import ChatRequest, TextRequest, read_chat, read_text
from kvstow.serve.responses import ChatFormat, Format, TextFormat
from kvstow.serve.security import Guard
from kvstow.serve.service import Service
from kvstow.serve.tally import Visit

CLIENT_CLOSED = 499  # nobody sees it


def make_app(service: Service) -> Starlette:
    """The application over one model."""
    limits = service.limits

    async def chat(request: Request) -> Response:
        return await _complete(service, request, read_chat, ChatFormat)

    async def text(request: Request) -> Response:
        return await _complete(service, request, read_text, TextFormat)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(_model(service))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": service.state}, 200 if service.state == "ok" else 503)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", text, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        *observe.routes(lambda: read_stats(service)),
    ]
    return Starlette(
        routes=routes,
        middleware=[*_cors(limits), Middleware(Guard, limits=limits, refused=service.tally.refuse)],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _not_routed,
            ClientDisconnect: _gone,
            Exception: _refused,  # and Starlette raises it again, so that it is logged
        },
    )


async def _complete(
    service: Service,
    request: Request,
    read: Callable[[bytes], ChatRequest | TextRequest],
    form_of: Callable[[str], Format],
) -> Response:
    deadline = asyncio.get_running_loop().time() + service.limits.request_timeout_s
    with service.tally.arrive() as visit:
        body = await _body(service, request, deadline)
        asked = await asyncio.to_thread(read, body)  # megabytes of JSON take seconds
        form = form_of(service.model.served_name)
        answer = _answer(service, asked, form, deadline, visit)
        return await while_connected(request, answer)


async def _body(service: Service, request: Request, deadline: float) -> bytes:
    try:
        async with asyncio.timeout_at(deadline):
            return await read_body(request, service.limits.max_body_bytes)
    except TimeoutError as error:
        raise TooSlow from error


async def _answer(
    service: Service,
    asked: ChatRequest | TextRequest,
    form: Format,
    deadline: float,
    visit: Visit,
) -> Response:
    exchange = await service.open(asked, deadline, visit)
    if asked.stream:
        return delivery.EventStream(exchange, form, with_usage=asked.wants_usage)
    return await delivery.whole(exchange, form)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.served_name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvstow",
    }


def _cors(limits: Limits) -> list[Middleware]:
    """Only where web pages are let in at all."""
    if not limits.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(limits.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client in a page sends x-stainless-lang, and more
            expose_headers=["x-kvstow-lane", "retry-after"],
        )
    ]


async def _refused(_: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, Refusal) else Unexpected()
    return JSONResponse(refusal.as_dict(), refusal.status, refusal.headers)


async def _not_routed(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = f"there is no {request.method} {request.url.path}"
    return await _refused(request, Refusal(status, message, code="unknown_url"))


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
