"""The prompt caches that mlx-lm keeps for later prompts, within the budget of all caches."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache


class WithinBudget(LRUPromptCache):
    """A prompt cache that makes room for running requests.

    Everything happens in the thread that generates. A prefix is handed out before room is
    made, so that a request does not push out what it continues.

    Args:
        max_size: Most entries.
        room_bytes: How many bytes entries may take now.
    """

    def __init__(self, max_size: int, room_bytes: Callable[[], int]) -> None:
        super().__init__(max_size)
        self._room_bytes = room_bytes

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """See mlx-lm; at least one token is left to be read."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        if found is not None and not rest:
            if can_trim_prompt_cache(found):
                trim_prompt_cache(found, 1)
                rest = tokens[-1:]
            else:
                found, rest = None, tokens
        self.trim_to(n_bytes=self._room_bytes())
        return found, rest

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any
    ) -> None:
        """Keep a cache under the tokens that it really holds."""
        held = aligned(prompt_cache, len(tokens))
        if held:
            super().insert_cache(model, tokens[:held], prompt_cache, **options)
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
