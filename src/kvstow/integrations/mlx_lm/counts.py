"""What a batch counts of its rows, which mlx-lm's caches do not know: tokens, without pads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import mlx.core as mx
import numpy as np


@dataclass(slots=True)
class Row:
    """What is counted of a row.

    Attributes:
        n_tokens: Tokens held, without pads.
        left: Pads to come before the row's first token.
        due: Tokens to come before the row's pads on the right; None: no such pads.
    """

    n_tokens: int = 0
    left: int = 0
    due: int | None = None

    def append(self, n: int) -> int:
        """Count the row's tokens among `n`; returns how many of the last are pads."""
        left = min(self.left, n)
        tokens = n - left
        if self.due is not None:
            tokens = min(tokens, self.due)
            self.due -= tokens
        self.left -= left
        self.n_tokens += tokens
        return n - left - tokens


class Counts:
    """The rows of a batch. A step is one token for each of them, and counted once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self._n_more = 0  # tokens that each row has beyond what it says
        self._next: tuple[int, ...] | None = None  # positions, but for those
        self._is_even: bool | None = None  # whether no row has pads to come; None: unknown

    @property
    def rows(self) -> list[Row]:
        """The rows, which may be changed."""
        self._count()
        self._next = self._is_even = None
        return self._rows

    @property
    def positions(self) -> mx.array:
        """The position of each row's next token, ``(b,)``."""
        if self._next is None:
            self._count()
            self._next = tuple(row.n_tokens - row.left for row in self._rows)
        return _positions(self._next, self._n_more)

    def append(self, n: int) -> list[int]:
        """Count an append of `n`; returns how many of the last are pads, or nothing if none is.

        Raises:
            RuntimeError: If there are only pads to come.
        """
        if self._is_even is None:
            if all(row.due == 0 for row in self._rows):
                raise RuntimeError("a padded prompt was read to its end: finalize() comes next")
            self._is_even = not any(row.left or row.due is not None for row in self._rows)
        if self._is_even:
            self._n_more += n
            return []
        return [row.append(n) for row in self.rows]

    def copy(self) -> Self:
        """The same counts, which change apart from these."""
        self._count()
        return type(self)(list(map(replace, self._rows)))

    def _count(self) -> None:
        """Have rows say all that they have."""
        if self._n_more:
            for row in self._rows:
                row.n_tokens += self._n_more
            self._n_more, self._next = 0, None


@lru_cache(maxsize=64)
def _positions(first: tuple[int, ...], n_more: int) -> mx.array:
    # All layers of a step have them. Data, not a graph bound to one thread.
    return mx.array(np.array(first, np.int32) + np.int32(n_more))
