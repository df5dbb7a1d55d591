"""Where mlx-lm's caches have their tokens, for whoever writes to the memory of their arrays."""

from typing import Any

from mlx_lm.models.cache import BatchKVCache, RotatingKVCache

from kvstow.attention.window import ALIGNED_TOKENS


def held(cache: Any) -> int:
    """Tokens and pads that the arrays hold, from the first one on."""
    capacity = int(cache.keys.shape[2])
    if isinstance(cache, BatchKVCache):
        return int(cache._idx)
    appended = cache.offset if isinstance(cache.offset, int) else cache._offset
    return min(int(appended), capacity)


def next_place(cache: Any, n_tokens: int) -> int | None:
    """Where so many tokens of the next append come to be; None where arrays are made anew."""
    capacity = int(cache.keys.shape[2])
    if isinstance(cache, BatchKVCache):
        return int(cache._idx) if cache._idx + n_tokens <= capacity else None
    if not isinstance(cache, RotatingKVCache) or n_tokens != 1 or capacity > cache.max_size:
        return None
    place = cache.keep if cache._idx == cache.max_size else cache._idx
    return int(place) if place < capacity else None


def overwrites(cache: Any) -> bool:
    """Whether tokens that were there take the place of others."""
    return isinstance(cache, RotatingKVCache)


def count(cache: Any, place: int, n_tokens: int) -> None:
    """Count tokens that were written to their `next_place`."""
    cache._idx = place + n_tokens
    if isinstance(cache, RotatingKVCache):
        cache.offset += n_tokens


def missing(cache: Any) -> int:
    """Tokens of capacity that kernels want more, or would copy arrays for.

    mlx-lm's caches grow by steps, but from whatever length the prompt had.
    """
    capacity = int(cache.keys.shape[2])
    more = -capacity % ALIGNED_TOKENS
    if isinstance(cache, RotatingKVCache):
        return more if capacity + more <= cache.max_size else 0
    return more if isinstance(cache, BatchKVCache) else 0
