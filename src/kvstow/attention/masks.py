"""What a mask lets queries see, remembered beside the array that says it.

Kernels take no array of booleans: they take where rows begin, and a window. Whoever makes a
mask of that form says so here, and whoever gets the very same object can look it up. Only the
object counts, so a mask that somebody has changed or combined is simply not known.
"""

import threading
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from weakref import ReferenceType, ref

import mlx.core as mx

# Masks of one step of a model and its draft: of all tokens and of sliding windows, some spare.
N_REMEMBERED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Query token j of row i sees the stored tokens from `starts[i]` to its own.

    Attributes:
        n_queries: Query tokens, the last ones stored.
        n_tokens: Stored tokens.
        window: Tokens that a query sees at most, itself included; 0: all.
        starts: int32 ``(b,)``, numbers below 0 are 0; None: all rows begin at 0.
    """

    n_queries: int
    n_tokens: int
    window: int = 0
    starts: mx.array | None = None


class _Remembered(threading.local):
    def __init__(self) -> None:
        self.pairs: deque[tuple[ReferenceType[mx.array], Sight]] = deque(maxlen=N_REMEMBERED)


_remembered = _Remembered()


def remember(mask: mx.array, sight: Sight) -> mx.array:
    """`mask`, of which `sight_of` knows from now on that it means `sight`."""
    _remembered.pairs.appendleft((ref(mask), sight))
    return mask


@lru_cache(maxsize=64)
def _causal(n_queries: int, n_tokens: int) -> Sight:
    return Sight(n_queries, n_tokens)


def sight_of(mask: mx.array | str | None, n_queries: int, n_tokens: int) -> Sight | None:
    """What a step of `n_queries` over `n_tokens` stored tokens sees; None if nobody knows."""
    if mask is None:
        # Every query sees every token, which is causal for one query alone.
        return _causal(1, n_tokens) if n_queries == 1 else None
    if isinstance(mask, str):
        return _causal(n_queries, n_tokens) if mask == "causal" else None
    for known, sight in _remembered.pairs:
        if known() is mask:
            fits = (sight.n_queries, sight.n_tokens) == (n_queries, n_tokens)
            return sight if fits else None
    return None
