"""One request in the engine, seen from the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from mlx_lm.server import GenerationArguments, GenerationContext, Response

from kvstow.serve.engine import Engine, EngineDead, Lane, Outbox, Tokenised
from kvstow.serve.gateway import Ticket
from kvstow.serve.refusal import GenerationFailed, Refusal, TooSlow


class Job:
    """A request that has been let in.

    Args:
        engine: Where it runs.
        request: Tokenised.
        args: How to generate.
        deadline: When it has to be done, in the event loop's time.
        ticket: Its room, which is done with the request.
        release: Called in the event loop with the ticket, once it is done.

    Attributes:
        lane: Where it runs.
    """

    def __init__(
        self,
        engine: Engine,
        request: Tokenised,
        args: GenerationArguments,
        *,
        deadline: float,
        ticket: Ticket,
        release: Callable[[Ticket], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._deadline = deadline
        self._ticket, self._release = ticket, release
        self._outbox = Outbox(self._deliver, self._closed)
        self.lane: Lane = engine.lane_of(args)
        try:
            engine.submit(request, args, self._outbox)
        except EngineDead as error:
            release(ticket)
            raise GenerationFailed(error) from error

    @property
    def is_done(self) -> bool:
        """Whether nothing is computed for it any more."""
        return self._ticket.is_done

    def _deliver(self, item: Any) -> None:
        self._call(self._items.put_nowait, item)

    def _closed(self) -> None:
        self._ticket.is_done = True
        self._call(self._release, self._ticket)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Call in the event loop, from the thread that generates."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(function, *args)

    def end(self, refusal: Refusal) -> None:
        """Stop it, and say why to who reads it. In the event loop."""
        self.give_up()
        self._items.put_nowait(refusal)

    def give_up(self) -> None:
        """Stop it, if it still runs."""
        self._outbox.give_up()

    async def context(self) -> GenerationContext:
        """What the engine says when the request's turn has come.

        Raises:
            GenerationFailed: If it does not come.
            TooSlow: If it comes too late.
        """
        async for item in self._arriving():
            if isinstance(item, GenerationContext):
                return item
        raise GenerationFailed("the engine answered nothing")

    async def responses(
        self, still_there_s: float | None = None
    ) -> AsyncIterator[Response | tuple[int, int] | None]:
        """Tokens, and progress with the prompt.

        Args:
            still_there_s: After so many seconds without either, None comes.

        Raises:
            GenerationFailed: If it ends by an error.
            Refusal: If it is ended, see `end`.
            TooSlow: If it takes too long.
        """
        async for item in self._arriving(still_there_s):
            yield item

    async def _arriving(self, still_there_s: float | None = None) -> AsyncIterator[Any]:
        while True:
            left_s = self._deadline - self._loop.time()
            wait_s = left_s if still_there_s is None else min(left_s, still_there_s)
            try:
                async with asyncio.timeout(max(wait_s, 0)):
                    item = await self._items.get()
            except TimeoutError as error:
                if self._loop.time() < self._deadline:
                    yield None
                    continue
                raise TooSlow from error
            if item is None:
                return
            if isinstance(item, Refusal):
                raise item
            if isinstance(item, Exception):
                raise GenerationFailed(item)
            yield item
