"""A packed window on its way from a cache to attention."""

from dataclasses import dataclass, replace

import mlx.core as mx

from kvstow.attention.arrival import Arrival
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import GROUP_SIZE, Turbo
from kvstow.store import Turns

ALIGNED_TOKENS = 8  # kernels' copies want planes of a multiple of this


# Not frozen: one is made for each layer and step, which would take longer.
@dataclass(slots=True, eq=False, weakref_slot=True)
class PackedWindow:
    """Stored keys and values on their way from a cache to `attend`.

    `keys` and `values` are whole planes ``(b, h, capacity, *)``, contiguous; the
    first `n_tokens` tokens are the window. `fused` says that a kernel may attend to it,
    see `fused.attend`; `mlx.attend` does not read it. The newest tokens may still be on their
    way, as `arrival`, and memory may be written to again once kernels have had their `turns`:
    they see to it by themselves, others call `settled`.
    """

    keys: PackedKeys
    values: PackedValues
    n_tokens: int
    scheme: Turbo
    fused: bool = False
    arrival: Arrival | None = None
    turns: Turns | None = None

    def __post_init__(self) -> None:
        if self.turns is not None:
            self.turns.lend(self)

    def __copy__(self) -> "PackedWindow":
        """Another one, which is lent like this one."""
        return replace(self)

    def settled(self) -> "PackedWindow":
        """The window once it may be read by anyone; waits for that."""
        if self.turns is None:
            return self
        if self.arrival is not None:
            self.arrival.wait()
        self.turns.has_strangers = True
        return replace(self, arrival=None, turns=None)

    def aligned(self, multiple: int) -> "PackedWindow":
        """With room for a multiple of tokens in its planes: itself, or a copy, once it may be read.

        Nobody reads what is added.
        """
        if not (more := -int(self.keys.scales.shape[2]) % multiple):
            return self
        pad, there = [(0, 0), (0, 0), (0, more), (0, 0)], self.settled()
        keys = PackedKeys(*(mx.pad(plane, pad) for plane in there.keys))
        values = PackedValues(*(mx.pad(plane, pad) for plane in there.values))
        return replace(there, keys=keys, values=values)

    @property
    def head_dim(self) -> int:
        """Elements of one key and of one value."""
        return int(self.values.scales.shape[-1]) * GROUP_SIZE
