"""`PackedKVCache`: one full-attention layer of an mlx-lm prompt cache, packed.

A row of the cache is *plain* or *packed*. An append to a plain row attends to
the exact keys and values; when it leaves the row with enough tokens, all of
them are encoded and the row is packed. From then on an append stores its
tokens first and attends to what is stored, its own tokens included. Trimming
never un-packs, except to nothing, which is a fresh row. With ``+stored`` even
the first append attends to what is stored. Appending in pieces stores the same
bytes as appending at once.

mlx-lm finds caches by duck typing, so what a class lacks matters too. There is
no ``to_quantized`` (``--kv-bits`` would convert it again); only those that hand out
windows have ``bits``. ``tests/contracts/test_mlx_lm.py`` holds mlx-lm to this.
"""

import copy
from collections.abc import Iterator
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from kvstow.attention.mlx import decode_window
from kvstow.attention.window import PackedWindow
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.errors import SchemeError
from kvstow.integrations.mlx_lm import masks
from kvstow.integrations.mlx_lm.batch import DeferredBatchKVCache, FusedBatchKVCache
from kvstow.integrations.mlx_lm.encode import append_in_place, check_widths, encode
from kvstow.integrations.mlx_lm.fetch import Deferred, Fetched, Fused
from kvstow.integrations.mlx_lm.pairs import as_pairs
from kvstow.integrations.mlx_lm.rows import PackedRows, PlainRows
from kvstow.integrations.mlx_lm.single import Single
from kvstow.scheme import GROUP_SIZE, Scheme, Turbo
from kvstow.store import PackedStore


class PackedKVCache(Single):
    """One layer's keys and values under a turbo scheme, fetched eagerly.

    Args:
        scheme: What to store.

    Attributes:
        scheme: The scheme.
        offset: Tokens held, plain or packed.
        dtype: Of the model's keys and values, and of decoded ones.
    """

    def __init__(self, scheme: Turbo) -> None:
        self.scheme = scheme
        self._plain = KVCache()
        self._store = PackedStore(mx)
        self.dtype = mx.float32

    @classmethod
    def from_kv_cache(cls, cache: KVCache, scheme: Turbo) -> Self:
        """The tokens of a plain cache, packed as if they had been appended at once."""
        packed = cls(scheme)
        if not cache.empty() and cache.offset:
            packed._take(*cache.keys_and_values())
        return packed

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._store.offset or int(self._plain.offset)

    @property
    def is_packed(self) -> bool:
        """Whether the tokens are stored in the scheme's format yet."""
        return self._store.offset > 0

    @property
    def capacity(self) -> int:
        """Tokens that fit before the planes grow."""
        plain = 0 if self._plain.keys is None else int(self._plain.keys.shape[2])
        return self._store.capacity + plain

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Fetched, Fetched]:
        """Append ``(b, h, s, d)`` keys and values; returns what this append attends to.

        Raises:
            UnsupportedModel: If the head_dim cannot be stored.
        """
        if self.is_packed:
            self._append(keys, values)
            return self._hand_out()
        exact = self._take(keys, values)
        return self._hand_out() if self.is_packed and self.scheme.stored else exact

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Every token held, decoded: ``(b, h, offset, d)``."""
        if not self.is_packed:
            return self._plain.keys_and_values()  # type: ignore[no-any-return]
        return decode_window(self.window().settled(), self.dtype, rotated=False)

    def window(self) -> PackedWindow:
        """The stored planes, not decoded."""
        store, scheme = self._store, self.scheme
        readers = store.arrival, store.turns
        return PackedWindow(*store.allocated(), store.offset, scheme, self.fused, *readers)

    @property
    def n_elements(self) -> int:
        """Key and value elements that the allocated memory has room for."""
        scales = [part.scales for part in self._store.allocated()] if self.is_packed else []
        groups = sum(plane.size for plane in scales)
        plain = sum(a.size for a in (self._plain.keys, self._plain.values) if a is not None)
        return int(groups * GROUP_SIZE + plain)

    def packed(self) -> tuple[PackedKeys, PackedValues]:
        """The planes of the tokens stored, ``(b, h, offset, *)``."""
        return self._store.window()

    def stored_rows(self) -> Iterator[tuple[PackedKeys, PackedValues]]:
        """See `Eager.stored_rows`."""
        if self.is_packed:
            yield self.packed()

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays first, then what `from_state` needs to read them."""
        plain = map(copy.copy, (self._plain.keys, self._plain.values))
        arrays = self._store.planes if self.is_packed else tuple(plain)
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return (arrays, self.is_packed, self.offset, str(self.scheme), dtype)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        arrays, is_packed, offset, scheme, dtype = state
        parsed = Scheme.parse(scheme)
        if not isinstance(parsed, Turbo):
            raise SchemeError(f"a packed cache needs a turbo scheme, got {scheme}")
        PackedKVCache.__init__(self, parsed)
        self.dtype = getattr(mx, dtype)
        if is_packed:
            self._store.restore(tuple(arrays), offset)
        elif arrays[0] is not None:
            self._plain.state = (*map(copy.copy, arrays), offset)

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> Self:
        """A cache with the `state` of another."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache of its own, without copying data until one of the two grows."""
        return type(self).from_state(self.state)

    def fresh(self) -> Self:
        """An empty cache of this kind."""
        return type(self)(self.scheme)

    def rows(self) -> PlainRows | PackedRows:
        """See `Single.rows`."""
        if not self.is_packed:
            return PlainRows(self._plain)
        pairs = as_pairs(*self.packed())
        return PackedRows(*(KVCache.from_state((*pair, self.offset)) for pair in pairs))

    def refilled(self, rows: PlainRows | PackedRows, dtype: mx.Dtype) -> Self:
        """See `Single.refilled`."""
        cache = self.fresh()
        cache.dtype = dtype
        if isinstance(rows, PlainRows):
            (cache._plain,) = rows.caches
        else:
            keys, values = rows.planes(self.scheme)
            cache._store.restore((*keys, *values), rows.offset)
        return cache

    def is_trimmable(self) -> bool:
        """Always: groups lie along head_dim, so any number of tokens can go."""
        return True

    def trim(self, n: int) -> int:
        """Forget up to `n` tokens from the end; returns how many."""
        if not self.is_packed:
            return int(self._plain.trim(n))
        trimmed = self._store.trim(n)
        if self._store.offset == 0:
            self._store = PackedStore(mx)  # a fresh row, plain again
        return trimmed

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the unused capacity included."""
        return self._store.nbytes + int(self._plain.nbytes)

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """The causal mask of an append of `N` tokens, in mlx-lm's own form."""
        mask = create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )
        return masks.known(mask, masks.of_offset(N, self.offset, window_size))

    def _take(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append to a plain row, and pack the row if it is long enough; returns it exact."""
        check_widths(self.scheme, keys, values)
        start = self.scheme.start_tokens or 1
        if self._plain.offset == 0 and keys.shape[2] >= start:
            exact = keys, values  # never stored plain: no copy, no bytes
        else:
            exact = self._plain.update_and_fetch(keys, values)
        if exact[0].shape[2] >= start:
            self._plain = KVCache()
            self._append(*exact)
        return exact

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self.dtype = keys.dtype
        if not (self.fused and append_in_place(self.scheme, self._store, keys, values)):
            self._store.append(*encode(self.scheme, keys, values, fused=self.fused))


class DeferredKVCache(Deferred, PackedKVCache):
    """A `PackedKVCache` that hands out its packed window."""

    batch = DeferredBatchKVCache


class FusedKVCache(Fused, PackedKVCache):
    """A `PackedKVCache` whose packed window is for the kernels."""

    batch = FusedBatchKVCache
