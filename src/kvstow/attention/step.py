"""What the layers of one step have in common: it is planned once, and called by each of them.

With a short context a token takes as long as the host needs for its layers, and finding out
anew in each of them that a kernel takes it, and how, is the larger part of that.
"""

import threading
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstow.attention.arrival import Arrival, Exact
from kvstow.attention.window import PackedWindow
from kvstow.kernels.calls import Planned
from kvstow.scheme import Turbo

# Of exact tokens on their way: shape, dtype, and where they come to be.
_Like = tuple[tuple[int, ...], mx.Dtype, int]


@dataclass(slots=True, eq=False)
class Step:
    """A call of the attention kernel, and what it was planned for.

    Attributes:
        call: Launches the kernel.
        stores: Whether it stores the last token of each row, which nobody has encoded yet.
    """

    call: Planned
    stores: bool
    _shape: tuple[int, ...]
    _dtype: mx.Dtype
    _scale: float
    _mask: Any
    _planes: tuple[int, ...]
    _n_tokens: int
    _scheme: Turbo
    _exact: _Like | None

    @classmethod
    def of(
        cls,
        call: Planned,
        stores: bool,
        queries: mx.array,
        window: PackedWindow,
        scale: float,
        mask: Any,
    ) -> "Step":
        """What was planned for these."""
        asked = queries.shape, queries.dtype, scale, mask
        held = window.keys.scales.shape, window.n_tokens, window.scheme, _like(window.arrival)
        return cls(call, stores, *asked, *held)

    def fits(self, queries: mx.array, window: PackedWindow, scale: float, mask: Any) -> bool:
        """Whether it is the call for these too."""
        return (
            window.n_tokens == self._n_tokens
            and window.scheme is self._scheme
            and mask is self._mask
            and scale == self._scale
            and queries.shape == self._shape
            and window.keys.scales.shape == self._planes
            and queries.dtype == self._dtype
            and _like(window.arrival) == self._exact
        )

    def run(self, queries: mx.array, window: PackedWindow) -> mx.array:
        """The output, once what is on its way is stored."""
        arrival, planes = window.arrival, (window.keys, window.values)
        if arrival is None:
            return self.call(queries, planes)
        exact: Exact | None = arrival.exact
        if exact is None or not self.stores:
            return self.call(queries, planes, after=arrival.there())
        output = self.call(queries, planes, exact, arrival.after)
        arrival.encoded(output)
        return output


class Last(threading.local):
    """What was done last in this thread; the next layer's is most often alike.

    Attributes:
        steps: The last two that were planned: layers may be of two kinds, and take turns.
        appended: What could be appended.
    """

    steps: tuple[Step, ...] = ()
    appended: tuple[Any, ...] | None = None

    def planned(
        self, queries: mx.array, window: PackedWindow, scale: float, mask: Any
    ) -> Step | None:
        """That for these, if there is one."""
        for step in self.steps:
            if step.fits(queries, window, scale, mask):
                return step
        return None

    def keep(self, step: Step) -> None:
        """Another one was planned."""
        self.steps = (step, *self.steps[:1])


def _like(arrival: Arrival | None) -> _Like | None:
    if arrival is None or (exact := arrival.exact) is None:
        return None
    keys = exact[0]
    return keys.shape, keys.dtype, arrival.position
