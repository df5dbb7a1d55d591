"""Where mlx-lm's caches have their tokens, for whoever writes to the memory of their arrays."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from kvstow.attention.window import ALIGNED_TOKENS

Rotating = RotatingKVCache | BatchRotatingKVCache


def held(cache: Any) -> int:
    """Tokens and pads that the arrays hold, from the first one on."""
    if isinstance(cache, BatchKVCache):
        return int(cache._idx)
    return min(_appended(cache), int(cache.keys.shape[2]))


def next_place(cache: Any, n_tokens: int) -> int | None:
    """Where so many tokens of the next append come to be; None where arrays are made anew."""
    capacity = int(cache.keys.shape[2])
    if isinstance(cache, BatchKVCache):
        return int(cache._idx) if cache._idx + n_tokens <= capacity else None
    if not isinstance(cache, Rotating) or n_tokens != 1:
        return None
    if capacity > cache.max_size or _appended(cache) >= capacity < cache.max_size:
        return None  # it shrinks, or grows
    place = getattr(cache, "keep", 0) if cache._idx == cache.max_size else cache._idx
    return int(place) if place < capacity else None


def overwrites(cache: Any) -> bool:
    """Whether new tokens take the place of others."""
    return isinstance(cache, Rotating)


def count(caches: Sequence[Any], place: int, n_tokens: int) -> None:
    """Count tokens that were written to the `next_place` of caches that are alike."""
    first = caches[0]
    if isinstance(first, BatchRotatingKVCache):
        rotated = first.rotated or first._idx == first.max_size
        left = first.left_padding - n_tokens if rotated else first.left_padding
        # A model computes offsets in every step, and whatever they depend on.
        offset = mx.depends(first.offset + n_tokens, left)
        for cache in caches:
            cache.left_padding, cache.offset = copy.copy(left), copy.copy(offset)
            cache._offset += n_tokens
            cache.rotated = rotated
    for cache in caches:
        cache._idx = place + n_tokens
        if isinstance(cache, RotatingKVCache):
            cache.offset += n_tokens


def missing(cache: Any) -> int:
    """Tokens of capacity that kernels want more, or would copy arrays for.

    mlx-lm's caches grow by steps, but from whatever length the prompt had.
    """
    capacity = int(cache.keys.shape[2])
    more = -capacity % ALIGNED_TOKENS
    if isinstance(cache, Rotating):
        return more if capacity + more <= cache.max_size else 0
    return more if isinstance(cache, BatchKVCache) else 0


def _appended(cache: Any) -> int:
    """Tokens and pads, those included that a window has forgotten."""
    return int(cache._offset if isinstance(cache, BatchRotatingKVCache) else cache.offset)
