"""What the prompts that are kept in memory take, added up as they come and go."""

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import PromptTrie

from kvstow.integrations.mlx_lm.usage import allocated, nonfinite_groups
from kvstow.serve.stats import Held


@dataclass(slots=True)
class Ledger:
    """What the entries of a prompt cache take. It holds no array: those end with the engine.

    Attributes:
        held: By all entries.
        nonfinite_groups: In them.
        evictions: Entries that left for want of room; not those that a longer one replaced.
    """

    held: Held = field(default_factory=Held)
    nonfinite_groups: int = 0
    evictions: int = 0
    _takes: dict[int, tuple[Held, int]] = field(default_factory=dict)  # by the id of an entry

    def add(self, entry: Any, n_tokens: int) -> None:
        """An entry has come, which stays as it is until it leaves."""
        cache = entry.prompt_cache
        held, nonfinite = self._takes[id(entry)] = held_by(cache, n_tokens), nonfinite_groups(cache)
        self.held += held
        self.nonfinite_groups += nonfinite

    def remove(self, entry: Any) -> None:
        """An entry has left."""
        held, nonfinite = self._takes.pop(id(entry))
        self.held -= held
        self.nonfinite_groups -= nonfinite


class WatchedPrompts(PromptTrie):
    """mlx-lm's tree of prompts, with a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def add(self, model: Any, tokens: list[int], value: Any) -> Any:
        """See mlx-lm."""
        before = super().add(model, tokens, value)
        if before is not None:
            self._ledger.remove(before)
        self._ledger.add(value, len(tokens))
        return before

    def pop(self, model: Any, tokens: list[int]) -> Any:
        """mlx-lm takes away in this way what has to leave."""
        value = super().pop(model, tokens)
        self._ledger.remove(value)
        self._ledger.evictions += 1
        return value

    def pop_prefixes(self, model: Any, tokens: list[int]) -> Any:
        """mlx-lm takes away in this way what a longer entry replaces."""
        found = super().pop_prefixes(model, tokens)
        for _, value in found:
            self._ledger.remove(value)
        return found


def held_by(prompt_cache: list[Any], n_tokens: int) -> Held:
    """By the caches of one text of so many tokens."""
    return Held(1, n_tokens, *allocated(prompt_cache))
