"""Rows of one layer, exact or packed, inside mlx-lm's own caches.

mlx-lm's caches know where tokens lie: how rows are padded and joined, when they are
rolled, what a window forgets. They move whole tokens and never look into one, so
they move packed tokens as well: `PackedRows` keeps its five planes in three of them,
which do everything alike, and `PlainRows` keeps exact keys and values in one. What a
token is stored as is decided here, and where it lies is decided there, so it is
where any other layer of the model has it.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from kvstow.attention.fused import ALIGNED_TOKENS
from kvstow.attention.window import PackedWindow
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.integrations.mlx_lm.encode import encode
from kvstow.scheme import GROUP_SIZE, Turbo

Arrays = tuple[mx.array, mx.array]


class Rows:
    """Rows at one stage.

    Args:
        caches: mlx-lm's caches, all of one class and alike but for what a token is.
    """

    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    @property
    def offset(self) -> Any:
        """As the caches have it: a number, or one for each row."""
        return self.caches[0].offset

    @property
    def nbytes(self) -> int:
        """Bytes allocated, pads and unused capacity included."""
        return sum(int(cache.nbytes) for cache in self.caches)

    @property
    def capacity(self) -> int:
        """Tokens that fit into each row before the arrays grow."""
        keys = self.caches[0].keys
        return 0 if keys is None else int(keys.shape[2])

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
        return self.caches[0].make_mask(n_tokens, **options)

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
        return cache.update_and_fetch(keys, values)  # type: ignore[no-any-return]

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

    def append(self, keys: PackedKeys, values: PackedValues) -> None:
        """Append stored tokens, ``(b, h, t, *)``."""
        for cache, pair in zip(self.caches, as_pairs(keys, values), strict=True):
            cache.update_and_fetch(*pair)
        for cache in self.caches[1:]:
            # Nobody else reads theirs, and a sum that is never computed would grow.
            cache.offset = copy.copy(self.offset)

    def align(self) -> None:
        """Make room for a multiple of tokens, which kernels want and would copy planes for.

        mlx-lm's batch grows by steps, but from whatever length the prompt had.
        """
        more = -self.capacity % ALIGNED_TOKENS
        if more and isinstance(self.caches[0], BatchKVCache):
            pad = [(0, 0), (0, 0), (0, more), (0, 0)]
            for cache in self.caches:
                cache.keys, cache.values = mx.pad(cache.keys, pad), mx.pad(cache.values, pad)

    def planes(self, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
        """The whole planes, ``(b, h, capacity, *)``."""
        return as_planes([tuple(map(copy.copy, (c.keys, c.values))) for c in self.caches], scheme)

    def window(self, scheme: Turbo) -> PackedWindow:
        """What the rows hold, not decoded."""
        n_tokens = int(self.caches[0].keys_and_values()[0].shape[2])
        return PackedWindow(*self.planes(scheme), n_tokens, scheme)

    @property
    def n_elements(self) -> int:
        """See `Rows.n_elements`."""
        _, of_keys, of_values = self.caches
        return int((of_keys.keys.size + of_values.keys.size) * GROUP_SIZE)


def as_pairs(keys: PackedKeys, values: PackedValues) -> list[Arrays]:
    """Five planes as the keys and values of three caches.

    mlx-lm makes zeros in the dtype of the keys for both, so a pair has one dtype. The
    last pair is the odd plane and nothing, ``(b, h, t, 0)``.
    """
    return [
        (keys.codes.view(mx.uint8), values.codes),
        (keys.scales, keys.zeros),
        (values.scales, values.scales[..., :0]),
    ]


def as_planes(pairs: Sequence[Any], scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """What `as_pairs` was made of."""
    (key_codes, value_codes), (scales, zeros), (value_scales, _) = pairs
    codes = key_codes.view(mx.int8) if scheme.key_bits == 8 else key_codes
    return PackedKeys(codes, scales, zeros), PackedValues(value_codes, value_scales)


def holding(cache: Any, keys: Any, values: Any) -> Any:
    """A cache of mlx-lm's in the state of `cache`, with other things in the same places."""
    twin = copy.copy(cache)
    for name, x in vars(cache).items():
        if isinstance(x, mx.array):
            setattr(twin, name, copy.copy(x))  # mlx updates an array object in place
    twin.keys, twin.values = copy.copy(keys), copy.copy(values)
    return twin
