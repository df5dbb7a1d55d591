"""Where mlx-lm's caches have their tokens, for whoever writes to the memory of their arrays."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from kvstow.attention.window import ALIGNED_TOKENS


def held(cache: Any) -> int:
    """Tokens and pads that the arrays hold, from the first one on."""
    if isinstance(cache, BatchKVCache):
        return int(cache._idx)
    return min(_appended(cache), int(cache.keys.shape[2]))


def end(cache: Any) -> int:
    """Where the next token comes to be, if there `has_room`."""
    if slides(cache) and cache._idx == cache.max_size:
        return int(getattr(cache, "keep", 0))
    return int(cache._idx)


def has_room(cache: Any, n_tokens: int) -> bool:
    """Whether so many tokens come to be in the arrays as they are, behind each other."""
    capacity = int(cache.keys.shape[2])
    if isinstance(cache, BatchKVCache):
        return bool(cache._idx + n_tokens <= capacity)
    if not slides(cache) or n_tokens != 1:
        return False
    shrinks, grows = capacity > cache.max_size, _appended(cache) >= capacity < cache.max_size
    return not shrinks and not grows


def slides(cache: Any) -> bool:
    """Whether tokens take the place of others, once its window is full."""
    return isinstance(cache, RotatingKVCache | BatchRotatingKVCache)


def count(cache: Any, place: int, n_tokens: int) -> None:
    """Count tokens that were written from `place` on, in numbers.

    Arrays of sliding batches are `Behind`; those of other batches follow from the numbers.
    """
    if isinstance(cache, BatchRotatingKVCache):
        cache.rotated |= cache._idx == cache.max_size
        cache._offset += n_tokens
    elif isinstance(cache, RotatingKVCache):
        cache.offset += n_tokens
    cache._idx = place + n_tokens


def missing(cache: Any) -> int:
    """Tokens of capacity that kernels want more, or would copy arrays for.

    mlx-lm's caches grow by steps, but from whatever length the prompt had.
    """
    capacity = int(cache.keys.shape[2])
    more = -capacity % ALIGNED_TOKENS
    return 0 if slides(cache) and capacity + more > cache.max_size else more


@dataclass(slots=True)
class Behind:
    """What arrays of a batch of sliding windows have not been counted yet.

    A count that nobody computes is a graph that grows by every step, and one that is not
    computed at once is bound to the thread that made it: arrays are made where they are asked for.

    Attributes:
        offset: To be added to offsets.
        left: To be taken from left padding.
    """

    offset: int = 0
    left: int = 0

    def count(self, cache: Any, n_tokens: int) -> None:
        """So many tokens were counted in a cache's numbers, and not in its arrays."""
        if isinstance(cache, BatchRotatingKVCache):
            self.offset += n_tokens
            self.left += n_tokens if cache.rotated else 0

    def made_up(self, cache: Any) -> Any:
        """The cache, or one like it that is not behind, to be asked and not changed."""
        if not self.offset:
            return cache
        twin = copy.copy(cache)
        twin.offset, twin.left_padding = cache.offset + self.offset, cache.left_padding - self.left
        return twin

    def make_up(self, caches: Sequence[Any]) -> None:
        """Bring the arrays of all caches, which are alike, up to date."""
        if not self.offset:
            return
        now = self.made_up(caches[0])
        for cache in caches:
            cache.offset, cache.left_padding = copy.copy(now.offset), copy.copy(now.left_padding)
        self.offset = self.left = 0


def _appended(cache: Any) -> int:
    """Tokens and pads, those included that a window has forgotten."""
    return int(cache._offset if isinstance(cache, BatchRotatingKVCache) else cache.offset)
