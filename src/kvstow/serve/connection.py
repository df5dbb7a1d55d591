"""A connection: uvicorn's, which does not wait for ever for the head of a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 30.0


class Connection(H11Protocol):
    """Closed where no request has begun `HEAD_TIMEOUT_S` after it was made, or the last answered.

    uvicorn only closes those that send nothing after an answer. Others would be held for ever,
    and there are not many of them.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._stop_waiting()

    def handle_events(self) -> None:
        """See `H11Protocol`: a request is one of them."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """See `H11Protocol`: the next request may have come already."""
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
