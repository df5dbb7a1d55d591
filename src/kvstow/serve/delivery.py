"""Answers on their way to the client, whole or as server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any

from mlx_lm.server import Response as Token
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstow.serve.answer import Part
from kvstow.serve.refusal import Refusal, Unexpected
from kvstow.serve.responses import Format
from kvstow.serve.service import Exchange

STILL_THERE_S = 10.0  # silence after which a comment keeps the connection open
DONE = "data: [DONE]\n\n"


async def whole(exchange: Exchange, form: Format) -> JSONResponse:
    """The answer at once.

    Raises:
        Refusal: If the engine fails, or it takes too long.
    """
    answer, parts = exchange.answer, Part()
    try:
        async for item in exchange.job.responses():
            if isinstance(item, Token):
                parts += exchange.feed(item)
            if answer.finish_reason is not None:
                break
    finally:
        exchange.job.give_up()
    exchange.visit.end("answered")
    body = form.whole(parts, answer.finish_reason or "stop", exchange.usage)
    return JSONResponse(body, headers=_headers(exchange))


class EventStream(StreamingResponse):
    """The answer as it comes; the engine stops when nobody reads it any more."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, form: Format, *, with_usage: bool) -> None:
        self._exchange = exchange
        headers = {"Cache-Control": "no-cache", **_headers(exchange)}
        super().__init__(_events(exchange, form, with_usage=with_usage), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.job.give_up()
            self._exchange.visit.end("disconnected")  # if it did not end before


async def _events(exchange: Exchange, form: Format, *, with_usage: bool) -> AsyncIterator[str]:
    try:
        async for event in _answer(exchange, form, with_usage=with_usage):
            yield event
    except Exception as error:  # too late for a status
        exchange.visit.end_by(error)
        yield _event((error if isinstance(error, Refusal) else Unexpected()).as_dict())
        if not isinstance(error, Refusal):
            raise  # so that it is logged


async def _answer(exchange: Exchange, form: Format, *, with_usage: bool) -> AsyncIterator[str]:
    no_usage = {"usage": None} if with_usage else {}
    answer = exchange.answer
    if (first := form.first()) is not None:
        yield _event(first | no_usage)
    async for item in exchange.job.responses(STILL_THERE_S):
        if not isinstance(item, Token):
            yield _comment(item)
            continue
        if part := exchange.feed(item):
            yield _event(form.chunk(part) | no_usage)
        if answer.finish_reason is not None:
            break
    exchange.visit.end("answered")
    yield _event(form.last(answer.finish_reason or "stop") | no_usage)
    if with_usage:
        yield _event(form.usage(exchange.usage))
    yield DONE


def _headers(exchange: Exchange) -> dict[str, str]:
    return {"x-kvstow-lane": exchange.job.lane}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _comment(progress: tuple[int, int] | None) -> str:
    return ": still there\n\n" if progress is None else f": prompt {progress[0]}/{progress[1]}\n\n"
