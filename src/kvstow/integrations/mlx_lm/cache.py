"""`PackedKVCache`: one full-attention layer of an mlx-lm prompt cache, packed.

A row of the cache is *plain* or *packed*. An append to a plain row attends to
the exact keys and values; when it leaves the row with enough tokens, all of
them are encoded and the row is packed. From then on an append stores its
tokens first and attends to what is stored, its own tokens included. Trimming
never un-packs, except to nothing, which is a fresh row. With ``+stored`` even
the first append attends to what is stored. Appending in pieces stores the same
bytes as appending at once.

mlx-lm finds caches by duck typing, so what a class lacks matters too. There is
no ``to_quantized`` (``--kv-bits`` would convert it again) and no ``merge`` (the
server would batch it); only `DeferredKVCache` has ``bits``.
``tests/contracts/test_mlx_lm.py`` holds mlx-lm to this.
"""

import copy
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from kvstow.attention.mlx import PackedWindow, decode_window
from kvstow.codec import mlx as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.errors import SchemeError, UnsupportedModel
from kvstow.integrations.mlx_lm import deferred
from kvstow.scheme import GROUP_SIZE, Scheme, Turbo
from kvstow.store import PackedStore

Fetched = mx.array | PackedWindow


class PackedKVCache:
    """One layer's keys and values under a turbo scheme, fetched eagerly.

    Args:
        scheme: What to store.

    Attributes:
        scheme: The scheme.
        offset: Tokens held, plain or packed.
    """

    def __init__(self, scheme: Turbo) -> None:
        self.scheme = scheme
        self._plain = KVCache()
        self._store = PackedStore(mx)
        self._dtype = mx.float32

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
            return self._fetch()
        exact = self._take(keys, values)
        return self._fetch() if self.is_packed and self.scheme.stored else exact

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Every token held, decoded: ``(b, h, offset, d)``."""
        if not self.is_packed:
            return self._plain.keys_and_values()  # type: ignore[no-any-return]
        return decode_window(self.window(), self._dtype, rotated=False)

    def window(self) -> PackedWindow:
        """The stored planes, not decoded."""
        return PackedWindow(*self._store.allocated(), self._store.offset, self.scheme)

    @property
    def n_elements(self) -> int:
        """Key and value elements that the allocated memory has room for."""
        groups = sum(plane.size for plane in self._store.planes[1::3])  # scales of keys, values
        plain = sum(a.size for a in (self._plain.keys, self._plain.values) if a is not None)
        return int(groups * GROUP_SIZE + plain)

    def packed(self) -> tuple[PackedKeys, PackedValues]:
        """The planes of the tokens stored, ``(b, h, offset, *)``."""
        return self._store.window()

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays first, then what `from_state` needs to read them."""
        plain = map(copy.copy, (self._plain.keys, self._plain.values))
        arrays = self._store.planes if self.is_packed else tuple(plain)
        dtype = str(self._dtype).removeprefix("mlx.core.")
        return (arrays, self.is_packed, self.offset, str(self.scheme), dtype)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        arrays, is_packed, offset, scheme, dtype = state
        parsed = Scheme.parse(scheme)
        if not isinstance(parsed, Turbo):
            raise SchemeError(f"a packed cache needs a turbo scheme, got {scheme}")
        PackedKVCache.__init__(self, parsed)
        self._dtype = getattr(mx, dtype)
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

    def empty(self) -> bool:
        """Whether no token is held."""
        return self.offset == 0

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
        return create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )

    def _take(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append to a plain row, and pack the row if it is long enough; returns it exact."""
        self._check_shapes(keys, values)
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
        self._dtype = keys.dtype
        s = self.scheme
        self._store.append(
            codec.encode_keys(keys, bits=s.key_bits, guard=True, search=s.search),
            codec.encode_values(values, bits=s.value_bits, guard=True, search=s.search),
        )

    def _fetch(self) -> tuple[Fetched, Fetched]:
        return self.keys_and_values()

    def _check_shapes(self, keys: mx.array, values: mx.array) -> None:
        """The backstop of three: the program and `attach` have refused this before.

        Raises:
            UnsupportedModel: If the head_dim cannot be stored.
        """
        if keys.shape[-1] != values.shape[-1]:
            raise UnsupportedModel(
                f"{self.scheme} needs keys and values of one head_dim, "
                f"got {keys.shape[-1]} and {values.shape[-1]}"
            )
        self.scheme.check_head_dim(keys.shape[-1])


class DeferredKVCache(PackedKVCache):
    """A `PackedKVCache` that hands its packed window to `deferred.attention`.

    ``bits`` is what makes mlx-lm's attention call the function that `deferred`
    replaces; the window is decoded there, and its values stay rotated. A cache that
    outlives the attachment has no ``bits`` and fetches eagerly.
    """

    group_size = GROUP_SIZE

    @property
    def bits(self) -> int:
        """Read by mlx-lm, and not used by `deferred.attention`.

        Raises:
            AttributeError: If nothing is attached, as on a cache without ``bits``.
        """
        if not deferred.is_installed():
            raise AttributeError("bits")
        return self.scheme.key_bits

    def _fetch(self) -> tuple[Fetched, Fetched]:
        if not deferred.is_installed():
            return self.keys_and_values()
        window = self.window()
        return window, window
