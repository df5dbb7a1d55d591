"""Tokens that a cache has taken and whose bytes are on their way into its planes.

They are written to memory that MLX does not see being written, so whoever reads them has to wait.
A decoded token is encoded by the attention kernel that reads it next, in the same launch;
whoever comes before, or instead, has it encoded by a launch of its own.
"""

import mlx.core as mx

from kvstow.kernels import backend as kernels
from kvstow.scheme import Turbo
from kvstow.store import Turns

Exact = tuple[mx.array, mx.array]


class Arrival:
    """Tokens that come to be in planes nobody else has.

    Args:
        scheme: What is stored.
        planes: The five of them ``(b, h, capacity, *)``, contiguous.
        position: Where in the capacity the first token comes to be.
        exact: Keys and values ``(b, h, t, d)``.
        turns: Of the kernels that write to these planes and read them.

    Attributes:
        position: As given.
        exact: Keys and values; None: somebody has encoded them.
    """

    __slots__ = ("_planes", "_scheme", "_turns", "exact", "position")

    def __init__(
        self,
        scheme: Turbo,
        planes: tuple[mx.array, ...],
        position: int,
        exact: Exact,
        turns: Turns,
    ) -> None:
        self._scheme, self.position = scheme, position
        self.exact: Exact | None = exact
        self._planes, self._turns = planes, turns

    def there(self) -> mx.array:
        """An array that is there once the tokens are; encodes them unless that was done."""
        if self.exact is not None:
            to, after = (self._planes, self.position), self._turns.last
            self.encoded(kernels.append(*to, self.exact, self._scheme, after=after))
        there: mx.array = self._turns.last
        return there

    def encoded(self, done: mx.array) -> None:
        """Somebody encodes the tokens: they are there once `done` is."""
        self._turns.last = done
        self.exact = None
        self._planes = ()

    def wait(self) -> None:
        """Return once the tokens are there."""
        mx.eval(self.there())
