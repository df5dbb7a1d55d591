"""Packed planes that grow along the token axis.

One `PackedStore` is one layer's keys and values in the layout of
`codec.layout`: five planes ``(b, h, capacity, *)``, of which the first
`offset` tokens are data and the rest is zeros or overwritten history. It moves
bytes and never decodes or encodes, so a slice, a trim or a growth is exact.

It works on numpy and MLX arrays alike: the caller hands in the array namespace,
and nothing here imports one.

Whoever can write to the memory of an array may append without making new ones, see
`writable`. That is for planes nobody else has a handle of: MLX keeps handles apart by
copying what is written to, and does not see such a write.
"""

import copy
from collections.abc import Iterable
from typing import Any

from kvstow.codec.layout import PackedKeys, PackedValues

STEP_TOKENS = 256  # capacity is a multiple of this, as in mlx-lm's own cache


class PackedStore:
    """One layer's packed keys and values.

    Args:
        xp: The array namespace of the planes (``numpy``, ``mlx.core``, ...), which
            has ``zeros`` and ``concatenate``.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        # Replaced, never changed: MLX updates an array object in place, and others have these.
        self._planes: tuple[Any, ...] = ()
        self._pairs: tuple[PackedKeys, PackedValues] | None = None  # of the planes
        self._is_shared = False  # whether others may have handles of the planes
        self._is_contiguous = False  # as far as known
        self._written: Any = None  # is there once tokens written to the planes are
        self.offset = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit before the planes grow."""
        return int(self._planes[0].shape[2]) if self._planes else 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused capacity included."""
        return sum(int(plane.nbytes) for plane in self._planes)

    @property
    def planes(self) -> tuple[Any, ...]:
        """Fresh handles of the five whole planes, or ``()`` before the first append."""
        self._settle()
        self._is_shared = True
        return tuple(map(copy.copy, self._planes))

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
        self._take(map(copy.copy, planes))
        self._is_shared, self._written = True, None
        self.offset = offset

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedStore":
        """A store of its own. MLX copies no data until one of the two is written to."""
        twin = PackedStore(self._xp)
        twin.restore(self.planes, self.offset)
        return twin

    def append(self, keys: PackedKeys, values: PackedValues) -> None:
        """Write tokens after the last one, growing the planes when they are full."""
        self._settle()
        new = (*keys, *values)
        start, end = self.offset, self.offset + int(new[0].shape[2])
        if end > self.capacity:
            self._grow(new, end)
        else:
            self._take(map(copy.copy, self._planes))
            for plane, rows in zip(self._planes, new, strict=True):
                plane[:, :, start:end] = rows
        # MLX has written to memory of which there was no other handle, or to a copy.
        self._is_shared = self._is_contiguous = False
        self.offset = end

    def writable(self, n_tokens: int) -> tuple[Any, ...]:
        """The planes, where `n_tokens` more may be written to their memory; else ``()``.

        They have room, are contiguous, and no one else has them. What is read from them
        meanwhile is what was stored before, which stays as it is.
        """
        if self._is_shared or not self.offset or self.offset + n_tokens > self.capacity:
            return ()
        if not self._is_contiguous:
            self._take(map(self._xp.contiguous, self._planes))
            self._is_contiguous = True
        return self._planes

    @property
    def written(self) -> Any:
        """An array that is there once all that was written to memory is; None: it is."""
        return self._written

    def wrote(self, n_tokens: int, written: Any) -> None:
        """So many tokens come to be in the memory of `writable`, as soon as `written` is there."""
        self._written = written
        self.offset += n_tokens

    def trim(self, n_tokens: int) -> int:
        """Forget up to `n_tokens` tokens from the end; returns how many."""
        n_tokens = max(0, min(self.offset, n_tokens))
        self.offset -= n_tokens
        # Who is still to read them must not find others in their place: the next append is by
        # the array library, which knows its readers.
        self._is_shared |= n_tokens > 0
        return n_tokens

    def window(self) -> tuple[PackedKeys, PackedValues]:
        """The stored tokens, ``(b, h, offset, *)``."""
        self._settle()
        return _pairs(plane[:, :, : self.offset] for plane in self._planes)

    def allocated(self) -> tuple[PackedKeys, PackedValues]:
        """The whole planes, ``(b, h, capacity, *)``, to read the tokens stored from.

        Not before `written` is there.
        """
        if self._pairs is None:
            self._pairs = _pairs(self._planes)
        return self._pairs

    def _take(self, planes: Iterable[Any]) -> None:
        self._planes, self._pairs = tuple(planes), None

    def _settle(self) -> None:
        """Wait for what was written to memory, of which an array library knows nothing."""
        if self._written is not None:
            self._xp.eval(self._written)
            self._written = None

    def _grow(self, new: tuple[Any, ...], end: int) -> None:
        pad = -end % STEP_TOKENS
        old = self._planes or (None,) * len(new)
        self._take(
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
