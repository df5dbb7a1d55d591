"""A connection: uvicorn's, which does not wait for ever for what its client does not do."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstow.serve.refusal import Refusal

HEAD_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 512  # half of the files that a process may usually have open


class Connection(H11Protocol):
    """Closed where its client is too slow, or there are `MAX_CONNECTIONS` already.

    `HEAD_TIMEOUT_S` after it was made, or the last request answered, one has to have begun:
    uvicorn itself only minds clients that send nothing after an answer. And for no longer than
    `READ_TIMEOUT_S` more may wait to be read than fits between server and client.
    """

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.write(_too_many())
            transport.close()
            return
        self._head = self._after(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler, self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        _cancel(self._head)
        _cancel(self._unread)

    def handle_events(self) -> None:
        """See `H11Protocol`: a request is one of them."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            _cancel(self._head)

    def on_response_complete(self) -> None:
        """See `H11Protocol`: the next request may have come already."""
        self._head = self._after(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler, self._head)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: much waits to be read."""
        super().pause_writing()
        self._unread = self._after(READ_TIMEOUT_S, self.transport.abort, self._unread)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        _cancel(self._unread)

    def _after(
        self, seconds: float, function: Callable[[], None], before: asyncio.TimerHandle | None
    ) -> asyncio.TimerHandle:
        _cancel(before)
        return self.loop.call_later(seconds, function)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _too_many() -> bytes:
    message = f"{MAX_CONNECTIONS} connections are open, which is all that may be"
    refusal = Refusal(503, message, code="too_many_connections", retry_after_s=1)
    body = json.dumps(refusal.as_dict()).encode()
    head = {
        "Content-Type": "application/json",
        "Content-Length": len(body),
        "Connection": "close",
        **refusal.headers,
    }
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{k}: {v}" for k, v in head.items()), "", ""]
    return "\r\n".join(lines).encode() + body
