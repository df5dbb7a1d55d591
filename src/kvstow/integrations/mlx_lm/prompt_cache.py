"""`TieredPromptCache`: mlx-lm's prefix cache in memory, over one on disk that outlives the process.

A hit, on whatever tier, goes on as an uncached run that was cut into the same pieces.
"""

import copy
from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from kvstow.integrations.mlx_lm.disk_prefixes import ModelPrefixes
from kvstow.snapshot.prefixes import PrefixStats

ModelKey = Any


class TieredPromptCache(LRUPromptCache):
    """A `LRUPromptCache` that asks files for what it does not hold, and writes what it is given.

    The longest prefix is served: from memory, unless a file spares much more. What came out of a
    file is in memory from then on. At least one token of a prompt is left to read, since
    a model has to compute something.

    Args:
        max_size: Most sequences in memory.
        max_bytes: Most bytes in memory.
        on_disk: The prefixes on disk of a model, by the key that callers name it with; None
            where there are none, as for a model that has a draft model.
        stats: Where it counts, as those of `DiskPrefixes`.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        *,
        on_disk: Callable[[ModelKey], ModelPrefixes | None] = lambda _: None,
        stats: PrefixStats | None = None,
    ) -> None:
        super().__init__(max_size, max_bytes)
        self.stats = PrefixStats() if stats is None else stats
        self._on_disk = on_disk

    def fetch_nearest_cache(
        self, model: ModelKey, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """A copy of the cache of the longest prefix that is held, and the tokens behind it.

        Args:
            model: The caller's key of a model.
            tokens: The prompt.
        """
        cache, rest = self._fetch_from_memory(model, tokens)
        in_memory = len(tokens) - len(rest)
        disk = self._on_disk(model)
        held = None if disk is None else disk.nearest(tokens[:-1], in_memory)
        if held is not None:
            super().insert_cache(model, held.tokens, copy.deepcopy(held.cache))
            return held.trimmed(), tokens[held.n_tokens :]
        if in_memory:
            self.stats.memory_hits += 1
            self.stats.memory_tokens += in_memory
        elif disk is None:  # or it is counted there
            self.stats.misses += 1
        return cache, rest

    def insert_cache(
        self,
        model: ModelKey,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep a cache in memory, and have it written to a file soon.

        Args:
            model: The caller's key of a model.
            tokens: All that the cache holds.
            prompt_cache: The cache; it must not be changed any more.
            cache_type: mlx-lm's word for what the tokens end with.
        """
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        if (disk := self._on_disk(model)) is not None:
            disk.put(tokens, prompt_cache)

    def _fetch_from_memory(
        self, model: ModelKey, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is None or rest:
            return cache, rest
        if can_trim_prompt_cache(cache):  # of the whole prompt; mlx-lm would read nothing
            trim_prompt_cache(cache, 1)
            return cache, tokens[-1:]
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, [*rest, *tokens[-1:]]
