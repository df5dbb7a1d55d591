"""Whether there is memory for a request: now, later or never. Before anything is computed.

Every request takes the bytes of its caches at its longest, prompt and answer. Rows of a batch
are as wide as the widest, so a batch is counted that way. What is left of the budget is for
prompts that are kept (see `kvstow.serve.prompt_cache`).

Who waits is served in the order of coming: a short request does not overtake a long one, which
might else wait forever.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstow.serve.engine import Lane
from kvstow.serve.refusal import Refusal

FIRST_GUESS_S = 5.0  # how long a request takes, before one has ended
WEIGHT_OF_LAST = 0.3


@dataclass(eq=False, slots=True)
class Ticket:
    """Room for one request, until it is given back.

    Attributes:
        n_tokens: Of prompt and answer at most.
        lane: Where it runs.
        since: When it was let in.
        is_done: Whether nothing is computed for it any more. Set in the thread that generates,
            and meant for it: the event loop releases the ticket a moment later.
    """

    n_tokens: int
    lane: Lane
    since: float = field(default_factory=time.monotonic)
    is_done: bool = False


class Gateway:
    """The requests that are let in, and those that wait. Used in the thread of the event loop.

    Args:
        bytes_of: Bytes of the caches of one request of so many tokens.
        budget_bytes: For all caches.
        slots: Most requests at once.
        max_queue: Most that wait.
        queue_timeout_s: How long one waits.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], int],
        budget_bytes: int,
        *,
        slots: int,
        max_queue: int,
        queue_timeout_s: float,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._bytes_of = bytes_of
        self._slots = slots
        self._max_queue = max_queue
        self._queue_timeout_s = queue_timeout_s
        self._running: frozenset[Ticket] = frozenset()  # replaced, since two threads look
        self._waiting: deque[tuple[Ticket, asyncio.Future[None]]] = deque()
        self._takes_s = FIRST_GUESS_S

    @property
    def reserved_bytes(self) -> int:
        """What running requests take at most."""
        return self._bytes_for(self._running)

    @property
    def n_running(self) -> int:
        """Requests that have room."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for it."""
        return len(self._waiting)

    @property
    def room_bytes(self) -> int:
        """What running requests leave of the budget for caches that are kept. From any thread."""
        running = frozenset(ticket for ticket in self._running if not ticket.is_done)
        return max(0, self.budget_bytes - self._bytes_for(running))

    def one_at_a_time(self) -> None:
        """Let in no request beside another: nothing can be batched."""
        self._slots = 1

    def check(self, n_prompt: int, n_new: int, param: str) -> None:
        """Refuse what will never fit.

        Raises:
            Refusal: If the caches of this request alone take more than the budget.
        """
        if (needed := self._bytes_of(n_prompt + n_new)) > self.budget_bytes:
            raise Refusal(
                400,
                f"{n_prompt} tokens of prompt and {n_new} of answer take {needed:,} bytes of KV "
                f"cache, and --kv-budget allows {self.budget_bytes:,}",
                code="kv_budget_exceeded",
                param=param,
            )

    async def admit(self, n_tokens: int, lane: Lane) -> Ticket:
        """Wait for room.

        Raises:
            Refusal: If too many wait, or this one did for too long.
            CancelledError: If it is not needed any more.
        """
        ticket = Ticket(n_tokens, lane)
        if not self._waiting and self._fits(ticket):
            self._let_in(ticket)
            return ticket
        if len(self._waiting) >= self._max_queue:
            raise Refusal(
                429,
                f"the queue is full: {len(self._waiting)} requests wait for memory or their turn",
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ticket, turn))
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await turn
        except asyncio.CancelledError:
            self._leave(ticket)
            raise
        except TimeoutError as error:
            self._leave(ticket)
            raise Refusal(
                503,
                f"no room within {self._queue_timeout_s:g} seconds (--queue-timeout)",
                code="queue_timeout",
                retry_after_s=self._retry_after_s(),
            ) from error
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Give back the room of a request, and let in who waits for it. Twice does no harm."""
        if ticket not in self._running:
            return
        self._running -= {ticket}
        took = time.monotonic() - ticket.since
        self._takes_s += WEIGHT_OF_LAST * (took - self._takes_s)
        self._call_next()

    def refuse_all(self, refusal: Refusal) -> None:
        """Refuse those who wait."""
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(refusal)
        self._waiting.clear()

    def _leave(self, ticket: Ticket) -> None:
        """Out of the queue, or out of the room that was given at the very same moment."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] is not ticket)
        self._running -= {ticket}
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            ticket, turn = self._waiting.popleft()
            if not turn.done():
                self._let_in(ticket)
                turn.set_result(None)

    def _fits(self, ticket: Ticket) -> bool:
        together = self._running | {ticket}
        return len(together) <= self._slots and self._bytes_for(together) <= self.budget_bytes

    def _let_in(self, ticket: Ticket) -> None:
        ticket.since = time.monotonic()
        self._running |= {ticket}

    def _bytes_for(self, tickets: frozenset[Ticket]) -> int:
        """Bytes at most: the engine runs a batch, or one request outside it, never both."""
        batch = [t.n_tokens for t in tickets if t.lane == "batch"]
        single = [t.n_tokens for t in tickets if t.lane == "single"]
        return max(
            len(batch) * self._bytes_of(max(batch, default=0)),
            self._bytes_of(max(single, default=0)),
        )

    def _retry_after_s(self) -> int:
        rounds = (len(self._waiting) + 1) / self._slots
        return max(1, min(math.ceil(rounds * self._takes_s), 600))
