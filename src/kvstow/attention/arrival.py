"""Tokens that a cache has taken and whose bytes are on their way into its planes.

They are written to memory that MLX does not see being written, so whoever reads them has to wait.
A decoded token is encoded by the attention kernel that reads it next, in the same launch;
whoever comes before, or instead, has it encoded by a launch of its own.
"""

from typing import Any

import mlx.core as mx

from kvstow.kernels import backend as kernels
from kvstow.scheme import Turbo

Exact = tuple[mx.array, mx.array]


class Arrival:
    """Tokens that come to be in planes nobody else has.

    Args:
        scheme: What is stored.
        planes: The five of them ``(b, h, capacity, *)``, contiguous.
        position: Where in the capacity the first token comes to be.
        exact: Keys and values ``(b, h, t, d)``.
        before: Tokens that are on their way into the same planes; None: there are none.

    Attributes:
        position: As given.
        after: What tells that those before are there, until these are encoded.
    """

    __slots__ = ("_exact", "_planes", "_scheme", "_there", "after", "position")

    def __init__(
        self,
        scheme: Turbo,
        planes: tuple[mx.array, ...],
        position: int,
        exact: Exact,
        before: "Arrival | None" = None,
    ) -> None:
        self._scheme, self.position = scheme, position
        self.after = None if before is None else before.there()
        self._exact: Exact | None = exact
        self._planes = planes
        self._there: Any = None

    @property
    def exact(self) -> Exact | None:
        """Keys and values, as long as nobody has encoded them."""
        return self._exact

    def there(self) -> mx.array:
        """An array that is there once the tokens are; encodes them unless that was done."""
        if self._exact is not None:
            to = self._planes, self.position
            self.encoded(kernels.append(*to, self._exact, self._scheme, after=self.after))
        there: mx.array = self._there
        return there

    def encoded(self, there: mx.array) -> None:
        """Somebody encodes the tokens: they are there once `there` is."""
        self._there = there
        self._exact = self.after = None
        self._planes = ()

    def wait(self) -> None:
        """Return once the tokens are there."""
        mx.eval(self.there())
