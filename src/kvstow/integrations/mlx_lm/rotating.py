"""`PackedRotatingKVCache`: one sliding-window layer of an mlx-lm prompt cache, packed.

It follows the rule of `PackedKVCache` and mlx-lm's `RotatingKVCache`: the first append
attends to exact tokens, later ones to what is stored, and tokens are where mlx-lm has
them, so its masks fit. Memory stops growing at the window, and one chunk of the prompt
while that is read, as without a scheme. Once the window is full nothing can be trimmed.

``+start<N>`` counts the tokens that were appended, be they forgotten meanwhile or not.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from kvstow.attention.mlx import decode_window
from kvstow.attention.window import PackedWindow
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.errors import SchemeError
from kvstow.integrations.mlx_lm import masks
from kvstow.integrations.mlx_lm.batch import (
    DeferredBatchKVCache,
    FusedBatchKVCache,
    PackedBatchKVCache,
)
from kvstow.integrations.mlx_lm.encode import append_in_place, check_widths, encode
from kvstow.integrations.mlx_lm.fetch import Deferred, Fetched, Fused
from kvstow.integrations.mlx_lm.pairs import Arrays, holding
from kvstow.integrations.mlx_lm.rows import PackedRows, PlainRows
from kvstow.integrations.mlx_lm.single import Single
from kvstow.scheme import Scheme, Turbo


class PackedBatchRotatingKVCache(PackedBatchKVCache):
    """Rows of several requests in one sliding-window layer, see `PackedBatchKVCache`."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Fetched, Fetched]:
        """See `PackedBatchKVCache.update_and_fetch`.

        Raises:
            RuntimeError: If an append of one token is a pad in some row: it would take the
                place of a token. mlx-lm never asks for that.
        """
        if keys.shape[2] == 1 and any(row.due == 0 for row in self._rows):
            raise RuntimeError("one token at a time cannot be padded in a sliding window")
        return super().update_and_fetch(keys, values)

    @property
    def offset(self) -> mx.array:
        """See `PackedBatchKVCache.offset`; mlx-lm's batch has it."""
        return self._stages.offset

    def _is_unpadded(self) -> bool:
        return False  # the mask of a window that is full is rolled, which mlx-lm's batch does


class DeferredBatchRotatingKVCache(DeferredBatchKVCache, PackedBatchRotatingKVCache):
    """A `PackedBatchRotatingKVCache` that hands out its packed window."""


class FusedBatchRotatingKVCache(FusedBatchKVCache, PackedBatchRotatingKVCache):
    """A `PackedBatchRotatingKVCache` whose packed window is for the kernels."""


class PackedRotatingKVCache(Single):
    """The last tokens of one layer under a turbo scheme, fetched eagerly.

    Args:
        scheme: What to store.
        max_size: Tokens that the layer can see.
        keep: Tokens at the beginning that are never forgotten.

    Attributes:
        scheme: The scheme.
        max_size: As given.
        keep: As given.
        dtype: Of the model's keys and values, and of decoded ones.
    """

    batch = PackedBatchRotatingKVCache

    def __init__(self, scheme: Turbo, max_size: int, keep: int = 0) -> None:
        self.scheme = scheme
        self.max_size = max_size
        self.keep = keep
        self.dtype = mx.float32
        self._rows: PlainRows | PackedRows = PlainRows(RotatingKVCache(max_size, keep))

    @classmethod
    def from_kv_cache(cls, cache: RotatingKVCache, scheme: Turbo) -> Self:
        """The tokens of a plain cache, packed as if they had just been appended."""
        packed = cls(scheme, cache.max_size, cache.keep)
        if cache.offset:
            packed._rows = PlainRows(holding(cache, cache.keys, cache.values))
            packed.dtype = cache.keys_and_values()[0].dtype
            packed._pack()
        return packed

    @property
    def offset(self) -> int:
        """Tokens appended, those included that were forgotten."""
        return self._rows.n_appended

    @property
    def is_packed(self) -> bool:
        """Whether the tokens are stored in the scheme's format yet."""
        return isinstance(self._rows, PackedRows)

    @property
    def configuration(self) -> str:
        """See `Single.configuration`."""
        return f"{self.scheme}, window {self.max_size}, keep {self.keep}"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Fetched, Fetched]:
        """Append ``(b, h, s, d)`` keys and values; returns what this append attends to.

        Raises:
            UnsupportedModel: If the head_dim cannot be stored.
        """
        check_widths(self.scheme, keys, values)
        self.dtype = keys.dtype
        if isinstance(self._rows, PackedRows):
            self._append(self._rows, keys, values)
            return self._hand_out()
        exact = self._rows.append(keys, values)
        self._pack()
        return self._hand_out() if self.is_packed and self.scheme.stored else exact

    def keys_and_values(self) -> Arrays:
        """The tokens held, decoded: ``(b, h, t, d)``, in mlx-lm's order."""
        if isinstance(self._rows, PlainRows):
            return self._rows.keys_and_values()
        return decode_window(self._rows.window(self.scheme).settled(), self.dtype, rotated=False)

    def window(self) -> PackedWindow | None:
        """The stored planes, not decoded; None where the tokens are plain."""
        if isinstance(self._rows, PlainRows):
            return None
        return self._rows.window(self.scheme, fused=self.fused)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask of an append of `N` tokens, in mlx-lm's own form."""
        mask = self._rows.make_mask(N, window_size=window_size, return_array=return_array)
        return masks.known(mask, self._rows.sight(N, window_size, self.offset))

    def is_trimmable(self) -> bool:
        """Whether no token was forgotten yet."""
        return self._rows.is_trimmable

    def trim(self, n: int) -> int:
        """Forget up to `n` tokens from the end; returns how many."""
        n = self._rows.trim(n)
        if self.empty():
            self._rows = self.fresh()._rows
        return n

    def size(self) -> int:
        """Tokens that the next append can see."""
        return min(self.offset, self.max_size)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused capacity included."""
        return self._rows.nbytes

    @property
    def capacity(self) -> int:
        """Tokens that fit before the planes grow, or forget."""
        return self._rows.capacity

    @property
    def n_elements(self) -> int:
        """Key and value elements that the allocated memory has room for."""
        return self._rows.n_elements

    def stored_rows(self) -> Iterator[tuple[PackedKeys, PackedValues]]:
        """See `Eager.stored_rows`."""
        if (window := self.window()) is not None:
            window = window.settled()
            keys, values, n = window.keys, window.values, window.n_tokens
            yield (
                PackedKeys(*(plane[:, :, :n] for plane in keys)),
                PackedValues(*(plane[:, :, :n] for plane in values)),
            )

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays first, then what `from_state` needs to read them."""
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return (self._rows.copy().state, self.is_packed, str(self.scheme), dtype)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        of_caches, is_packed, scheme, dtype = state
        parsed = Scheme.parse(scheme)
        if not isinstance(parsed, Turbo):
            raise SchemeError(f"a packed cache needs a turbo scheme, got {scheme}")
        caches = [RotatingKVCache.from_state(s) for s in of_caches]
        PackedRotatingKVCache.__init__(self, parsed, caches[0].max_size, caches[0].keep)
        self.dtype = getattr(mx, dtype)
        self._rows = (PackedRows if is_packed else PlainRows)(*caches).copy()

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> Self:
        """A cache with the `state` of another."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache of its own, without copying data until one of the two grows."""
        twin = copy.copy(self)
        twin._rows = self._rows.copy()
        return twin

    @classmethod
    def merge(cls, caches: Sequence[Single]) -> PackedBatchKVCache:
        """See `Single.merge`.

        Raises:
            ValueError: As there, and if some tokens are never to be forgotten.
        """
        if any(getattr(cache, "keep", 0) for cache in caches):
            raise ValueError(
                "mlx-lm's batch of sliding windows forgets first tokens: keep is not 0"
            )
        return super().merge(caches)

    def fresh(self) -> Self:
        """An empty cache of this kind."""
        return type(self)(self.scheme, self.max_size, self.keep)

    def rows(self) -> PlainRows | PackedRows:
        """See `Single.rows`."""
        return self._rows

    def refilled(self, rows: PlainRows | PackedRows, dtype: mx.Dtype) -> Self:
        """See `Single.refilled`."""
        cache = self.fresh()
        cache._rows, cache.dtype = rows, dtype
        return cache

    def _append(self, rows: PackedRows, keys: mx.array, values: mx.array) -> None:
        if self.fused and append_in_place(self.scheme, rows, keys, values):
            return
        rows.append(*encode(self.scheme, keys, values, fused=self.fused))
        if self.fused:
            rows.align()

    def _pack(self) -> None:
        if isinstance(self._rows, PlainRows) and self.offset >= (self.scheme.start_tokens or 1):
            self._rows = self._rows.pack(self.scheme, fused=self.fused)


class DeferredRotatingKVCache(Deferred, PackedRotatingKVCache):
    """A `PackedRotatingKVCache` that hands out its packed window."""

    batch = DeferredBatchRotatingKVCache


class FusedRotatingKVCache(Fused, PackedRotatingKVCache):
    """A `PackedRotatingKVCache` whose packed window is for the kernels."""

    batch = FusedBatchRotatingKVCache
