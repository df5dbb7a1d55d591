"""Bytes and tokens of a prompt cache, counted where they are allocated."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache

from kvstow.codec import mlx as codec
from kvstow.integrations.mlx_lm.fetch import Eager
from kvstow.integrations.report import KVUsage


def usage(cache: list[Any]) -> KVUsage:
    """See `kvstow.usage`."""
    kv_bytes, kv_bytes_bf16 = allocated(cache)
    members = _members(cache)
    return KVUsage(
        kv_bytes=kv_bytes,
        kv_bytes_bf16=kv_bytes_bf16,
        tokens=tokens_held(cache),
        capacity_tokens=max(map(_capacity, members), default=0),
        nonfinite_groups=nonfinite_groups(cache),
    )


def allocated(cache: list[Any]) -> tuple[int, int]:
    """``kv_bytes`` and ``kv_bytes_bf16`` of `usage`, without a look at any number."""
    members = _members(cache)
    # mlx-lm's quantised cache cannot count itself before its first append.
    kv_bytes = sum(0 if getattr(c, "keys", c) is None else int(c.nbytes) for c in members)
    return kv_bytes, sum(map(_bytes_bf16, members))


def tokens_held(cache: list[Any]) -> int:
    """``tokens`` of `usage`."""
    return max(map(_tokens, _members(cache)), default=0)


def nonfinite_groups(cache: list[Any]) -> int:
    """As in `usage`; reads the scales of all tokens, and waits for them once."""
    rows = (row for c in _members(cache) if isinstance(c, Eager) for row in c.stored_rows())
    return int(sum((codec.count_nonfinite(part) for row in rows for part in row), mx.array(0)))


def _members(cache: list[Any]) -> list[Any]:
    return [member for c in cache for member in getattr(c, "caches", (c,))]  # of a CacheList


def _arrays(cache: Any) -> list[mx.array]:
    """Arrays of numbers; a batch also keeps integers about its rows."""
    leaves: Any = tree_flatten(cache.state)
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    return [a for a in arrays if mx.issubdtype(a.dtype, mx.inexact)]


def _tokens(cache: Any) -> int:
    """Tokens held; of a batch, by its longest row."""
    if isinstance(cache, Eager):
        return cache.n_tokens
    return int(mx.max(mx.array(getattr(cache, "offset", 0))))


def _capacity(cache: Any) -> int:
    if isinstance(cache, Eager):
        return cache.capacity
    keys = getattr(cache, "keys", None)
    if keys is None:
        return 0
    return int((keys[0] if isinstance(keys, tuple | list) else keys).shape[-2])


def _bytes_bf16(cache: Any) -> int:
    """The same elements in two bytes each, whatever they are stored as."""
    elements: int
    if isinstance(cache, Eager):
        elements = cache.n_elements
    elif cache.empty():
        elements = 0
    elif isinstance(cache, QuantizedKVCache) and cache.keys and cache.values:
        elements = (cache.keys[1].size + cache.values[1].size) * cache.group_size
    else:
        elements = sum(int(a.size) for a in _arrays(cache))
    return 2 * elements
