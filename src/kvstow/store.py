"""Packed planes that grow along the token axis.

One `PackedStore` is one layer's keys and values in the layout of
`codec.layout`: five planes ``(b, h, capacity, *)``, of which the first
`offset` tokens are data and the rest is zeros or overwritten history. It moves
bytes and never decodes or encodes, so a slice, a trim or a growth is exact.

It works on numpy and MLX arrays alike: the caller hands in the array namespace,
and nothing here imports one.

Whoever can write to the memory of an array may append without making new ones, see
`OwnPlanes`. That is for planes nobody else has a handle of: MLX keeps handles apart by
copying what is written to, and does not see such a write. And tokens that somebody may
have read are overwritten only where it is known when that has been done, see `Turns`.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ReferenceType, ref

from kvstow.codec.layout import PackedKeys, PackedValues

STEP_TOKENS = 256  # capacity is a multiple of this, as in mlx-lm's own cache


class Turns:
    """Who reads memory that is written to past the array library.

    Kernels take turns: each waits for the one before. Others read when the array library has
    them do it, which may be later: what they read must stay as it is.

    Attributes:
        last: An array that is there once the kernels so far are done; None: there were none.
        has_strangers: Whether others read too.
    """

    __slots__ = ("_lent", "has_strangers", "last")

    def __init__(self) -> None:
        self.last: Any = None
        self.has_strangers = False
        self._lent: list[ReferenceType[Any]] = []

    def lend(self, window: Any) -> None:
        """Somebody has this, and may read what it shows as long as it lives."""
        self._lent = [lent for lent in self._lent if lent() is not None]
        self._lent.append(ref(window))

    @property
    def may_overwrite(self) -> bool:
        """Whether a kernel that waits for `last` may write to what was read."""
        return not self.has_strangers and all(lent() is None for lent in self._lent)


class OwnPlanes:
    """Handles of five planes, and whether their memory may be written to.

    Args:
        xp: The array namespace of the planes.

    Attributes:
        arrays: The planes, or ``()``. They are replaced and never changed: MLX updates an array
            object in place, and others have these.
        is_shared: Whether others may have handles of the memory.
        is_contiguous: Whether the planes are, as far as known.
        turns: Of those who read it.
        arrival: Tokens that are on their way into the memory, of which the array library knows
            nothing; it has `wait`. None: there are none.
    """

    __slots__ = (
        "_pairs",
        "_xp",
        "arrays",
        "arrival",
        "is_contiguous",
        "is_shared",
        "turns",
    )

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self.arrays: tuple[Any, ...] = ()
        self.is_shared = True
        self.is_contiguous = False  # as far as known
        self.arrival: Any = None
        self.turns = Turns()
        self._pairs: tuple[PackedKeys, PackedValues] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that the planes have room for."""
        return int(self.arrays[0].shape[2]) if self.arrays else 0

    def put(self, arrays: Iterable[Any], *, shared: bool) -> None:
        """Take other planes, which nobody has read; into the old ones nothing may be on its way."""
        self.arrays, self._pairs = tuple(arrays), None
        self.is_shared, self.is_contiguous = shared, False
        self.turns = Turns()

    def settle(self) -> None:
        """Wait for what is on its way."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None

    def make_contiguous(self) -> None:
        """Have the planes as kernels write to them, in the same memory if it is so already."""
        self.arrays, self._pairs = tuple(map(self._xp.contiguous, self.arrays)), None
        self.is_contiguous = True

    def pairs(self) -> tuple[PackedKeys, PackedValues]:
        """The planes, to read from once the `arrival` is there."""
        if self._pairs is None:
            self._pairs = _pairs(self.arrays)
        return self._pairs


class PackedStore:
    """One layer's packed keys and values.

    Args:
        xp: The array namespace of the planes (``numpy``, ``mlx.core``, ...), which
            has ``zeros`` and ``concatenate``, and ``contiguous`` where planes are asked to be
            `writable`.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._own = OwnPlanes(xp)
        self._longest = 0  # that these planes have held: nobody has read what lies behind
        self.offset = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit before the planes grow."""
        return self._own.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused capacity included."""
        return sum(int(plane.nbytes) for plane in self._own.arrays)

    @property
    def planes(self) -> tuple[Any, ...]:
        """Fresh handles of the five whole planes, or ``()`` before the first append."""
        self._own.settle()
        self._own.is_shared = True
        return tuple(map(copy.copy, self._own.arrays))

    def restore(self, planes: tuple[Any, ...], offset: int) -> None:
        """Take the planes and offset of another store.

        Handles are copied, not data: MLX updates an array object in place, and a
        shared object would change under its other owner.

        Raises:
            ValueError: If `offset` tokens do not fit in `planes`.
        """
        capacity = int(planes[0].shape[2]) if planes else 0
        if not 0 <= offset <= capacity:
            raise ValueError(f"offset must be in 0..{capacity} (the capacity), got {offset}")
        self._own.arrival = None
        self._own.put(map(copy.copy, planes), shared=True)
        self.offset = self._longest = offset

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedStore":
        """A store of its own. MLX copies no data until one of the two is written to."""
        twin = PackedStore(self._xp)
        twin.restore(self.planes, self.offset)
        return twin

    def append(self, keys: PackedKeys, values: PackedValues) -> None:
        """Write tokens after the last one, growing the planes when they are full."""
        self._own.settle()
        new = (*keys, *values)
        start, end = self.offset, self.offset + int(new[0].shape[2])
        # Not shared: the array library writes to memory that nobody else has, or to a copy.
        if end > self.capacity:
            self._own.put(self._grown(new, end), shared=False)
        else:
            self._own.put(map(copy.copy, self._own.arrays), shared=False)
            for plane, rows in zip(self._own.arrays, new, strict=True):
                plane[:, :, start:end] = rows
        self.offset = self._longest = end

    def writable(self, n_tokens: int) -> tuple[Any, ...]:
        """The planes, where `n_tokens` more may be written to their memory; else ``()``.

        They have room, are contiguous, and no one else has them. What is read from them
        meanwhile is what was stored before, which stays as it is; unless it was trimmed, and
        then its readers are known.
        """
        own = self._own
        if own.is_shared or not self.offset or self.offset + n_tokens > own.capacity:
            return ()
        if self.offset < self._longest and not own.turns.may_overwrite:
            return ()
        if not own.is_contiguous:
            own.make_contiguous()
        return own.arrays

    @property
    def end(self) -> int:
        """Where in the capacity the next token comes to be."""
        return self.offset

    @property
    def arrival(self) -> Any:
        """See `OwnPlanes.arrival`."""
        return self._own.arrival

    @property
    def turns(self) -> Turns:
        """See `OwnPlanes.turns`."""
        return self._own.turns

    def expect(self, n_tokens: int, arrival: Any) -> None:
        """So many tokens are on their way into the memory of `writable`."""
        self._own.arrival = arrival
        self.offset += n_tokens
        self._longest = max(self._longest, self.offset)

    def trim(self, n_tokens: int) -> int:
        """Forget up to `n_tokens` tokens from the end; returns how many."""
        n_tokens = max(0, min(self.offset, n_tokens))
        self.offset -= n_tokens
        return n_tokens

    def window(self) -> tuple[PackedKeys, PackedValues]:
        """The stored tokens, ``(b, h, offset, *)``; who reads them is a stranger, see `Turns`."""
        self._own.settle()
        self._own.turns.has_strangers = True
        return _pairs(plane[:, :, : self.offset] for plane in self._own.arrays)

    def allocated(self) -> tuple[PackedKeys, PackedValues]:
        """The whole planes, ``(b, h, capacity, *)``, to read the tokens stored from.

        Not before the `arrival` is there; and who is no kernel has to say so in `turns`.
        """
        return self._own.pairs()

    def _grown(self, new: tuple[Any, ...], end: int) -> Iterator[Any]:
        pad = -end % STEP_TOKENS
        old = self._own.arrays or (None,) * len(new)
        return (
            self._xp.concatenate(
                [
                    part
                    for part in (self._kept(plane), rows, self._zeros(rows, pad))
                    if part is not None
                ],
                axis=2,
            )
            for plane, rows in zip(old, new, strict=True)
        )

    def _kept(self, plane: Any) -> Any:
        return plane[:, :, : self.offset] if plane is not None and self.offset else None

    def _zeros(self, like: Any, n_tokens: int) -> Any:
        b, h, _, width = like.shape
        return self._xp.zeros((b, h, n_tokens, width), dtype=like.dtype) if n_tokens else None


def _pairs(planes: Iterable[Any]) -> tuple[PackedKeys, PackedValues]:
    five = tuple(planes)
    if not five:
        raise ValueError("the store is empty: nothing was appended yet")
    return PackedKeys(*five[:3]), PackedValues(*five[3:])
