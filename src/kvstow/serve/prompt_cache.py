"""The prompt caches that are kept for later prompts: in memory within the budget, and in files."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache

from kvstow.integrations.mlx_lm.disk_prefixes import ModelPrefixes
from kvstow.integrations.mlx_lm.prompt_cache import TieredPromptCache
from kvstow.snapshot.prefixes import PrefixStats


class WithinBudget(TieredPromptCache):
    """A `TieredPromptCache` that makes room for running requests.

    Everything happens in the thread that generates. A prefix is handed out before room is
    made, so that a request does not push out what it continues.

    Args:
        max_size: Most entries in memory.
        room_bytes: How many bytes these may take now.
        fresh: Makes what a prompt begins with that continues nothing; None: mlx-lm does.
        on_disk: See `TieredPromptCache`.
        stats: See there.
    """

    def __init__(
        self,
        max_size: int,
        room_bytes: Callable[[], int],
        *,
        fresh: Callable[[], list[Any] | None] = lambda: None,
        on_disk: Callable[[Any], ModelPrefixes | None] = lambda _: None,
        stats: PrefixStats | None = None,
    ) -> None:
        super().__init__(max_size, on_disk=on_disk, stats=stats)
        self._room_bytes = room_bytes
        self._fresh = fresh

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """See `TieredPromptCache`."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        self.trim_to(n_bytes=self._room_bytes())
        return self._fresh() if found is None else found, rest

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep a cache under the tokens that it really holds."""
        if held := aligned(prompt_cache, len(tokens)):
            super().insert_cache(model, tokens[:held], prompt_cache, cache_type=cache_type)
        self.trim_to(n_bytes=self._room_bytes())


def aligned(prompt_cache: list[Any], n_tokens: int) -> int:
    """How many of `n_tokens` every cache holds; those that hold more forget the rest.

    Speculation leaves a model and its draft model at different tokens, and its last token in
    neither. Returns 0 if one cannot forget.
    """
    members = [m for c in prompt_cache for m in getattr(c, "caches", (c,))]
    counted = [m for m in members if isinstance(getattr(m, "offset", None), int)]
    held: int = min([n_tokens, *(m.offset for m in counted)])
    if all(m.offset == held for m in counted):
        return held
    if not can_trim_prompt_cache(prompt_cache):
        return 0
    for member in counted:
        member.trim(member.offset - held)
    return held
