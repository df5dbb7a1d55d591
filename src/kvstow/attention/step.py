"""What the layers of one step have in common: it is planned once, and called by each of them.

With a short context a token takes as long as the host needs for its layers, and finding out
anew in each of them that a kernel takes it, and how, is the larger part of that.
"""

import threading
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstow.attention.arrival import Arrival
from kvstow.attention.masks import Sight
from kvstow.attention.window import ALIGNED_TOKENS, PackedWindow
from kvstow.kernels.calls import Planned


@dataclass(slots=True, eq=False)
class Step:
    """A call of the attention kernel, and what it was planned for.

    Attributes:
        call: Launches the kernel.
        stores: Whether it stores the token of each row that nobody has encoded yet.
        follows: Whether the next kernel waits for it; a prompt's output is too large to be kept
            until then, so it reads as a stranger, see `Turns`.
        like: The `likeness` of the layer.
        scale: Of the scores.
        mask: The mask itself.
        sinks: The shape of the sinks.
    """

    call: Planned
    stores: bool
    follows: bool
    like: tuple[Any, ...]
    scale: float
    mask: Any
    sinks: tuple[int, ...] | None

    def run(self, queries: mx.array, window: PackedWindow, sinks: mx.array | None) -> mx.array:
        """The output, once what is on its way is stored."""
        arrival, turns, planes = window.arrival, window.turns, (window.keys, window.values)
        if turns is None:
            return self.call(queries, planes, sinks=sinks)
        if arrival is None or arrival.exact is None:
            output = self.call(queries, planes, after=turns.last, sinks=sinks)
        elif self.stores:
            output = self.call(queries, planes, arrival.exact, turns.last, sinks)
            arrival.encoded(output)
        else:
            output = self.call(queries, planes, after=arrival.there(), sinks=sinks)
        if self.follows:
            turns.last = output
        else:
            turns.has_strangers = True
        return output


class Last(threading.local):
    """What was done last in this thread; the next layer's is most often alike.

    Attributes:
        steps: The last two that were planned: layers may be of two kinds, and take turns.
        encoded: The last two kinds of keys and values that kernels were found to encode.
    """

    steps: tuple[Step, ...] = ()
    encoded: tuple[tuple[Any, ...], ...] = ()

    def planned(
        self,
        queries: mx.array,
        window: PackedWindow,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> Step | None:
        """That for these, if there is one."""
        like, kind = likeness(queries, window), (scale, shape(sinks))
        for step in self.steps:
            if step.like == like and step.mask is mask and (step.scale, step.sinks) == kind:
                return step
        return None

    def keep(self, step: Step) -> None:
        """Another one was planned."""
        self.steps = (step, *self.steps[:1])


def likeness(queries: mx.array, window: PackedWindow) -> tuple[Any, ...]:
    """What is equal for layers that one call serves, mask, scale and sinks aside."""
    return (
        window.n_tokens,
        window.scheme,
        window.keys.scales.shape,
        queries.shape,
        queries.dtype,
        _of_arrival(window.arrival),
    )


def stored_at(queries: mx.array, window: PackedWindow, sight: Sight) -> int | None:
    """Where the one token of each row is to come, if a kernel can store it in this step."""
    arrival = window.arrival
    if arrival is None or (exact := arrival.exact) is None or window.scheme.search:
        return None
    (keys, _), at, capacity = exact, arrival.position, window.keys.scales.shape[2]
    is_last = at == sight.n_tokens - 1
    is_step = queries.shape[2] == keys.shape[2] == 1
    sees_it = is_last or (at < sight.n_tokens and not sight.window and sight.starts is None)
    can = is_step and sees_it and keys.dtype == queries.dtype and capacity % ALIGNED_TOKENS == 0
    return at if can else None


def shape(sinks: mx.array | None) -> tuple[int, ...] | None:
    """Of sinks, where there are some."""
    return None if sinks is None else sinks.shape


def _of_arrival(arrival: Arrival | None) -> tuple[Any, ...] | None:
    """Where exact tokens come to be that nobody has encoded yet, and what they are."""
    if arrival is None or (exact := arrival.exact) is None:
        return None
    keys = exact[0]
    return arrival.position, keys.shape, keys.dtype
