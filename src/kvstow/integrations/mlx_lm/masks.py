"""Says of the masks that mlx-lm's caches make what they let queries see.

mlx-lm makes a mask once per step, from the first cache of a kind, and all layers of that kind
take the array. What it means follows from that cache's fields before the append: here they are
read as its ``make_mask`` reads them, and a test holds the two together.
"""

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from kvstow.attention.masks import Sight, remember


def known(mask: Any, sight: Sight | None) -> Any:
    """`mask`, remembered if it is an array and its meaning is known."""
    if isinstance(mask, mx.array) and sight:
        return remember(mask, sight)
    return mask


def of_offset(n_queries: int, offset: int, window_size: int | None) -> Sight:
    """Of `n_queries` behind `offset` tokens of unpadded rows."""
    return Sight(n_queries, offset + n_queries, window_size or 0)


def of_rows(cache: Any, n_queries: int, window_size: int | None, least: int) -> Sight | None:
    """Of an append to one of mlx-lm's caches; None where no range of tokens says it.

    Args:
        cache: Before the append.
        n_queries: Tokens of the append.
        window_size: As ``make_mask`` is given it.
        least: Tokens that every row has appended, this append not counted.
    """
    if isinstance(cache, RotatingKVCache):
        # One query gets a mask only where the window is smaller than the buffer: it is rolled.
        offset = min(cache.max_size - 1, cache.offset)
        return (
            of_offset(n_queries, offset, window_size or cache.max_size) if n_queries > 1 else None
        )
    if isinstance(cache, BatchRotatingKVCache):
        return _of_rotating(cache, n_queries, window_size or cache.max_size, least)
    if isinstance(cache, BatchKVCache):
        starts = copy.copy(cache.left_padding)  # mlx updates an array object in place
        return Sight(n_queries, cache._idx + n_queries, window_size or 0, starts)
    return None


def _of_rotating(
    cache: BatchRotatingKVCache, n_queries: int, window_size: int, least: int
) -> Sight | None:
    n_tokens = min(cache.max_size - 1, cache._offset) + n_queries
    if n_queries == 1 and (cache.rotated or cache._idx >= cache.max_size):
        # The buffer begins anywhere. One query sees all of it once every row has filled it.
        full = least + 1 >= cache.max_size and window_size >= cache.max_size
        return Sight(1, n_tokens) if full else None
    trimmed = max(cache._idx - cache.max_size + int(n_queries > 1), 0)
    return Sight(n_queries, n_tokens, window_size, cache.left_padding - trimmed)
