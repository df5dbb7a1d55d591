"""Counts of requests and tokens, kept while they happen; any thread may count and read.

Rates are of a sliding window over a clock that never jumps. A step of the model counts evenly
over the time that it took, so a prompt that was read in one long step is no burst.
"""

import threading
import time
from asyncio import CancelledError
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from starlette.requests import ClientDisconnect

from kvstow.serve.refusal import GenerationFailed, Refusal, TooSlow
from kvstow.serve.stats import OUTCOMES, Latency, Outcome, Requests, Throughput

WINDOW_S = 5.0
BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
MOST_REASONS = 64  # reasons are words of the program; more of them would be a mistake
Clock = Callable[[], float]


@dataclass
class _Rate:
    """Tokens of steps, each from when to when."""

    tokens: int = 0
    busy_s: float = 0.0
    _steps: deque[tuple[float, float, int]] = field(default_factory=deque)

    def add(self, start: float, end: float, n_tokens: int) -> None:
        self.tokens += n_tokens
        self.busy_s += end - start
        self._steps.append((start, end, n_tokens))
        self._forget(end - WINDOW_S)

    def read(self, now: float, window_s: float) -> Throughput:
        since = now - window_s
        self._forget(since)
        recent = 0.0
        for start, end, n_tokens in self._steps:
            share = (end - max(start, since)) / (end - start) if start < since else 1.0
            recent += n_tokens * share
        per_s = recent / window_s if window_s > 0 else 0.0
        return Throughput(self.tokens, self.busy_s, per_s, window_s)

    def _forget(self, since: float) -> None:
        while self._steps and self._steps[0][1] <= since:
            self._steps.popleft()


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def read(self) -> Latency:
        return Latency(BOUNDS_S, tuple(accumulate(self.counts)), self.sum_s)


class Tally:
    """What happened since the server started.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._outcomes = Counter[str](dict.fromkeys(OUTCOMES, 0))
        self._refused = Counter[str]()
        self._prompt, self._decode = _Rate(), _Rate()
        self._first_token, self._duration = _Histogram(), _Histogram()

    @property
    def uptime_s(self) -> float:
        """Since this was made."""
        return self.clock() - self._started

    def arrive(self) -> "Visit":
        """A request has come."""
        return Visit(self)

    def refuse(self, reason: str) -> None:
        """A request was not let in, for a reason of the program's own words."""
        with self._lock:
            if reason not in self._refused and len(self._refused) >= MOST_REASONS:
                reason = "other"
            self._refused[reason] += 1

    def step(self, kind: Literal["prompt", "decode"], took_s: float, n_tokens: int) -> None:
        """The model has just read or generated tokens, all requests of a batch together."""
        end = self.clock()
        rate = self._prompt if kind == "prompt" else self._decode
        with self._lock:
            rate.add(end - took_s, end, n_tokens)

    def read(self) -> tuple[Throughput, Throughput, Requests]:
        """Prompt, decode and requests, at one moment."""
        with self._lock:
            now = self.clock()
            window_s = min(WINDOW_S, now - self._started)
            return (
                self._prompt.read(now, window_s),
                self._decode.read(now, window_s),
                Requests(
                    dict(self._outcomes),
                    dict(sorted(self._refused.items())),
                    self._first_token.read(),
                    self._duration.read(),
                ),
            )

    def _first(self, seconds: float) -> None:
        with self._lock:
            self._first_token.add(seconds)

    def _end(self, outcome: Outcome, seconds: float) -> None:
        with self._lock:
            self._outcomes[outcome] += 1
            self._duration.add(seconds)


class Visit:
    """One request from its arrival to its end, of which there is one."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._arrived = tally.clock()
        self._has_token = self._has_ended = False

    def token(self) -> None:
        """It has a token; only the first says something."""
        if not self._has_token:
            self._has_token = True
            self._tally._first(self._tally.clock() - self._arrived)

    def refuse(self, reason: str) -> None:
        """It is not let in."""
        if not self._has_ended:
            self._has_ended = True
            self._tally.refuse(reason)

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None:
            self.end_by(error)

    def end_by(self, error: BaseException) -> None:
        """It is over by an error: whose fault it was decides."""
        if isinstance(error, TooSlow):
            self.end("timed_out")
        elif isinstance(error, Refusal) and not isinstance(error, GenerationFailed):
            self.refuse(error.code)
        elif isinstance(error, ClientDisconnect | CancelledError):
            self.end("disconnected")
        else:
            self.end("failed")

    def end(self, outcome: Outcome) -> None:
        """It is over; how it first ended is how it ended."""
        if not self._has_ended:
            self._has_ended = True
            self._tally._end(outcome, self._tally.clock() - self._arrived)
