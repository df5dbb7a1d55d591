"""The body of a request, up to a limit, and whether the client is still there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from kvstow.serve.refusal import Refusal

T = TypeVar("T")


class TooLarge(Refusal):
    """A body beyond the limit."""

    def __init__(self, max_bytes: int) -> None:
        message = f"the body is larger than the {max_bytes:,} bytes of --max-body-bytes"
        super().__init__(413, message, code="body_too_large")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        TooLarge: If it is.
        Refusal: If it is not declared as JSON. Web pages may send other kinds without asking,
            so those are not read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type must be application/json, got {kind or 'none'}"
        raise Refusal(415, message, code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise TooLarge(max_bytes)
    parts, n_bytes = [], 0
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes > max_bytes:
            raise TooLarge(max_bytes)
        parts.append(part)
    return b"".join(parts)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Its body has been read.

    Raises:
        ClientDisconnect: If it went.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
