"""Where a layer's keys and values are: in its cache, or in one member of its `CacheList`.

Layers with attention and a recurrent part (falcon_h1, baichuan_m1) have a `CacheList` of
both. With two plain members (minimax_m3's indexer) nothing says which of them attention
reads, so such a layer stays as it is.
"""

from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from kvstow.integrations.mlx_lm.cache import PackedKVCache
from kvstow.integrations.mlx_lm.rotating import PackedRotatingKVCache

PLAIN = (KVCache, RotatingKVCache)  # of all tokens, and of a sliding window


def plain(cache: Any) -> Any:
    """The one plain cache, of `PLAIN`, that `cache` is or has; None if there are more, or none."""
    members = cache.caches if isinstance(cache, CacheList) else (cache,)
    found = [member for member in members if type(member) in PLAIN]
    return found[0] if len(found) == 1 else None


def with_plain(cache: Any, new: Any) -> Any:
    """`cache` with `new` in the place of its one plain cache."""
    old = plain(cache)
    if old is cache:
        return new
    return CacheList(*(new if member is old else member for member in cache.caches))


def converted(cache: Any, fresh: Any) -> Any:
    """The tokens of `cache`, in a cache like `fresh`."""
    if isinstance(fresh, CacheList):
        return CacheList(*map(converted, cache.caches, fresh.caches))
    if isinstance(fresh, PackedKVCache | PackedRotatingKVCache):
        return type(fresh).from_kv_cache(cache, fresh.scheme)
    if isinstance(fresh, QuantizedKVCache):
        return cache.to_quantized(fresh.group_size, fresh.bits)
    return cache
