"""Rows of one layer, exact or packed, inside mlx-lm's own caches.

mlx-lm's caches know where tokens lie: how rows are padded and joined, when they are
rolled, what a window forgets. They move whole tokens and never look into one, so
they move packed tokens as well: `PackedRows` keeps its five planes in three of them,
which do everything alike, and `PlainRows` keeps exact keys and values in one. What a
token is stored as is decided here, and where it lies is decided there, so it is
where any other layer of the model has it.

Only a step may go past them: its tokens can be written to the memory of their arrays, which
then are nobody else's, see `PackedRows.writable`.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from kvstow.attention.arrival import Arrival
from kvstow.attention.masks import Sight
from kvstow.attention.window import PackedWindow
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.integrations.mlx_lm import masks, places
from kvstow.integrations.mlx_lm.encode import encode
from kvstow.integrations.mlx_lm.pairs import (
    Arrays,
    as_pairs,
    as_planes,
    holding,
    nothing_beside,
)
from kvstow.scheme import GROUP_SIZE, Turbo
from kvstow.store import OwnPlanes, Turns


class Rows:
    """Rows at one stage, in mlx-lm's caches: of one class, and alike but for what a token is."""

    def __init__(self, *caches: Any) -> None:
        self._caches = caches

    @property
    def caches(self) -> tuple[Any, ...]:
        """The caches, to do with as mlx-lm does."""
        return self._caches

    @property
    def offset(self) -> Any:
        """As the caches have it: a number, or one for each row."""
        return self._now().offset

    @property
    def n_appended(self) -> int:
        """Tokens of one request's row, those included that were forgotten; asked in each layer."""
        return int(self._caches[0].offset)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, pads and unused capacity included."""
        return sum(int(cache.nbytes) for cache in self._caches)

    @property
    def capacity(self) -> int:
        """Tokens that fit into each row before the arrays grow."""
        keys = self._caches[0].keys
        return 0 if keys is None else int(keys.shape[2])

    @property
    def size(self) -> int:
        """Tokens and pads of a row that the next append can see."""
        return int(self._caches[0].size())

    @property
    def is_trimmable(self) -> bool:
        """Whether mlx-lm's caches can forget the last tokens."""
        return all(cache.is_trimmable() for cache in self._caches)

    @property
    def n_elements(self) -> int:
        """Key and value elements that the allocated memory has room for."""
        raise NotImplementedError

    @property
    def state(self) -> tuple[Any, ...]:
        """The state of each cache."""
        return tuple(cache.state for cache in self.caches)

    @classmethod
    def merge(cls, rows: Sequence["Rows"]) -> Self:
        """One batch of rows, each in caches for one request."""
        together = zip(*(row.caches for row in rows), strict=True)
        return cls(*(caches[0].merge(list(caches)) for caches in together))

    def extract(self, i: int) -> Self:
        """The `i`-th row of a batch, in caches for one request."""
        return type(self)(*(cache.extract(i) for cache in self.caches))

    def make_mask(self, n_tokens: int, **options: Any) -> Any:
        """See mlx-lm."""
        return self._now().make_mask(n_tokens, **options)

    def sight(self, n_tokens: int, window_size: int | None, least: int) -> Sight | None:
        """See `masks.of_rows`."""
        return masks.of_rows(self._caches[0], n_tokens, window_size, least)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        for cache in self.caches:
            cache.filter(mx.array(list(rows)))

    def extend(self, other: Self) -> None:
        """Add the rows of `other` after these."""
        for cache, more in zip(self.caches, other.caches, strict=True):
            cache.extend(more)

    def trim(self, n_tokens: int) -> int:
        """Forget tokens from the end of every row; returns how many."""
        return min(int(cache.trim(n_tokens)) for cache in self.caches)

    def pad(self, right: Sequence[int]) -> None:
        """Say that each row's last ``right[i]`` tokens are pads, which move out of the way."""
        if max(right) == 0:
            return
        for cache in self.caches:
            # "so many tokens from here on, which is behind the last one by the pads"
            cache.prepare(lengths=[-n for n in right], right_padding=list(right))
            cache.finalize()

    def copy(self) -> Self:
        """The same rows, which change apart from these."""
        return type(self)(*(holding(c, c.keys, c.values) for c in self.caches))

    def _now(self) -> Any:
        """The first of the caches, or one like it, to be asked about this moment."""
        return self._caches[0]

    def _count_offsets(self) -> None:
        """Have offsets follow from where the rows end.

        A batch's are sums that nobody computes here, of one more term for each append.
        """
        for cache in self._caches:
            if isinstance(cache, BatchKVCache):
                cache.offset = cache._idx - cache.left_padding


class PlainRows(Rows):
    """Rows that are not packed yet."""

    def append(self, keys: mx.array, values: mx.array) -> Arrays:
        """Append; returns all that the rows hold, ``(b, h, t, d)``."""
        (cache,) = self.caches
        if cache.keys is None and isinstance(cache, BatchKVCache):
            # Most rows are packed at once: no capacity is allocated, and nothing copied.
            n = keys.shape[2]
            arrays = copy.copy(keys), copy.copy(values)
            cache.state = (*arrays, cache.offset + n, cache.left_padding, n)
            return keys, values
        exact: Arrays = cache.update_and_fetch(keys, values)
        self._count_offsets()
        return exact

    def keys_and_values(self) -> Arrays:
        """All that the rows hold, ``(b, h, t, d)``."""
        return self.caches[0].keys_and_values()  # type: ignore[no-any-return]

    @property
    def n_elements(self) -> int:
        """See `Rows.n_elements`."""
        (cache,) = self.caches
        return 0 if cache.keys is None else int(cache.keys.size + cache.values.size)

    def pack(self, scheme: Turbo, *, fused: bool = False) -> "PackedRows":
        """The same rows under a scheme. Nothing is moved: a token is encoded where it lies."""
        (cache,) = self.caches
        planes = as_pairs(*encode(scheme, cache.keys, cache.values, fused=fused))
        return PackedRows(*(holding(cache, *pair) for pair in planes))


class PackedRows(Rows):
    """Rows under a scheme, in three caches: see `as_pairs`."""

    def __init__(self, *caches: Any) -> None:
        super().__init__(*caches)
        self._own = OwnPlanes(mx)  # handles of what the caches hold, or none
        self._behind = places.Behind()

    @property
    def caches(self) -> tuple[Any, ...]:
        """See `Rows.caches`; until the next `append` no memory is written to past them."""
        self._let_go()
        self._count_offsets()
        return self._caches

    def append(self, keys: PackedKeys, values: PackedValues) -> None:
        """Append stored tokens, ``(b, h, t, *)``."""
        self._let_go()
        first, *_, last = self._caches
        for cache, pair in zip(self._caches, as_pairs(keys, values), strict=True):
            # Whoever has the arrays, which MLX updates in place, keeps what they were.
            cache.keys, cache.values = copy.copy(cache.keys), copy.copy(cache.values)
            cache.update_and_fetch(*pair)
        last.values = nothing_beside(last.keys)  # updates of it that nobody computes would grow
        self._count_offsets()
        self._own.is_shared = False  # MLX has written to memory that nobody else has, or to a copy
        if not isinstance(first, BatchKVCache):
            for cache in self._caches[1:]:
                cache.offset = copy.copy(first.offset)  # nobody computes theirs

    def writable(self, n_tokens: int) -> tuple[mx.array, ...]:
        """The planes, where `n_tokens` more may be written to their memory; else ``()``.

        As `PackedStore.writable`: only in a batch or a sliding window, once it was asked for a
        `window` after an `append`.
        """
        own, first = self._own, self._caches[0]
        if own.is_shared or not own.arrays:
            return ()
        if not places.has_room(first, n_tokens):
            return ()
        if places.slides(first) and not own.turns.may_overwrite:
            return ()
        if not own.is_contiguous:
            own.make_contiguous()
            # As they are: what is made of them now would be bound to this thread. See `_let_go`.
            codes, scales, zeros, value_codes, value_scales = map(copy.copy, own.arrays)
            _, second, last = self._caches
            first.keys, first.values = codes, value_codes
            second.keys, second.values, last.keys = scales, zeros, value_scales
        return own.arrays

    @property
    def end(self) -> int:
        """Where in the capacity tokens come to be that are `writable`."""
        return places.end(self._caches[0])

    @property
    def turns(self) -> Turns:
        """See `OwnPlanes.turns`."""
        return self._own.turns

    @property
    def arrival(self) -> Arrival | None:
        """See `OwnPlanes.arrival`."""
        arrival: Arrival | None = self._own.arrival
        return arrival

    def expect(self, n_tokens: int, arrival: Arrival) -> None:
        """See `PackedStore.expect`."""
        self._own.arrival = arrival
        for cache in self._caches:
            places.count(cache, arrival.position, n_tokens)
        self._behind.count(self._caches[0], n_tokens)

    def align(self) -> None:
        """Make room for a multiple of tokens, which kernels want and would copy planes for.

        Comes after an `append`, before anybody asks for a window.
        """
        if more := places.missing(self._caches[0]):
            pad = [(0, 0), (0, 0), (0, more), (0, 0)]
            for cache in self._caches:
                cache.keys, cache.values = mx.pad(cache.keys, pad), mx.pad(cache.values, pad)

    def planes(self, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
        """The whole planes, ``(b, h, capacity, *)``, into which nobody writes any more."""
        pairs = [tuple(map(copy.copy, (c.keys, c.values))) for c in self.caches]
        return as_planes(pairs, scheme)

    def window(self, scheme: Turbo, *, fused: bool = False) -> PackedWindow:
        """What the rows hold, not decoded; marked for kernels if `fused`."""
        own = self._own
        if not own.arrays:
            pairs = [tuple(map(copy.copy, (c.keys, c.values))) for c in self._caches]
            keys, values = as_planes(pairs, scheme)
            own.put((*keys, *values), shared=own.is_shared)
        n_tokens = places.held(self._caches[0])
        return PackedWindow(*own.pairs(), n_tokens, scheme, fused, own.arrival, own.turns)

    def _now(self) -> Any:
        self._count_offsets()
        return self._behind.made_up(self._caches[0])

    def _let_go(self) -> None:
        """Have the caches alone hold what is stored, all of it there, as mlx-lm would."""
        self._own.settle()
        self._own.put((), shared=True)
        self._behind.make_up(self._caches)
        first = self._caches[0]
        if first.keys is not None and first.keys.dtype == mx.int8:
            first.keys = first.keys.view(mx.uint8)

    @property
    def n_elements(self) -> int:
        """See `Rows.n_elements`."""
        _, of_keys, of_values = self._caches
        return int((of_keys.keys.size + of_values.keys.size) * GROUP_SIZE)
