"""Speculative decoding over two prompt caches, as mlx-lm's `speculative_generate_step` does it.

A small *draft* model proposes tokens, the model verifies them in one append and
keeps those it would have chosen itself; the rest is trimmed from both caches.
mlx-lm asks only once, and only the model's caches, whether they can be trimmed.
A sliding window cannot once it is full, and mlx-lm then leaves rejected tokens
where they are: `why_untrimmable` asks before anything is generated.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, make_prompt_cache

from kvstow.integrations.mlx_lm import probe


class CachePair(list[Any]):
    """The model's caches and then the draft model's: the ``prompt_cache`` of speculation.

    mlx-lm cuts such a list after as many caches as the model has layers. A model whose
    last layers borrow caches has fewer of them, so this list is cut where it was joined.
    """

    def __init__(self, model: Iterable[Any], draft: Iterable[Any]) -> None:
        self.model, self.draft = list(model), list(draft)
        super().__init__([*self.model, *self.draft])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and (at.start is None) != (at.stop is None):
            return self.model if at.start is None else self.draft
        return super().__getitem__(at)


def why_untrimmable(model: Any, n_tokens: int = 0) -> str:
    """Why rejected tokens cannot be taken back from a cache of `model`; empty if they can.

    Computes nothing.

    Args:
        model: An mlx-lm model or a skeleton; its caches are those of its attachment.
        n_tokens: How many tokens the cache will hold at most.

    Raises:
        UnsupportedModel: If the model does not run on its own caches.
    """
    fresh = make_prompt_cache(model)
    if names := _stuck(fresh):
        return f"its {names} cannot forget tokens"
    windows = [w for c in _flat(fresh) if (w := getattr(c, "max_size", None)) is not None]
    if n_tokens >= min(windows, default=n_tokens + 1):
        probe.fill(model, fresh, (n_tokens,))
        if names := _stuck(fresh):
            window = f"a sliding window of {min(windows)} tokens"
            return f"its {names} ({window}) cannot forget tokens once it holds {n_tokens}"
    return ""


def trimmable_tokens(*models: Any) -> int | None:
    """The most tokens that caches of all `models` hold and can still forget; None: any number."""
    caches = [c for model in models for c in _flat(make_prompt_cache(model))]
    windows = [w for c in caches if (w := getattr(c, "max_size", None)) is not None]
    return min(windows) - 1 if windows else None


def disagreement(model: Mapping[str, int], draft: Mapping[str, int]) -> str:
    """Where two vocabularies, token to id, differ; empty if no id means two tokens.

    One may have more tokens than the other: families of models are padded differently.

    >>> disagreement({"a": 0, "b": 1}, {"a": 0, "c": 1})
    "token 1 is 'b' in one and 'c' in the other"
    """
    texts = {index: text for text, index in model.items()}
    for text, index in draft.items():
        if texts.get(index, text) != text:
            return f"token {index} is {texts[index]!r} in one and {text!r} in the other"
    return ""


def proposed(from_draft: Sequence[bool], n_draft: int, max_tokens: int) -> int:
    """How many tokens the draft model proposed for a text.

    A step that the end of the text cut short counts the proposals that are in the text.

    Args:
        from_draft: Of every token, whether it was a proposal.
        n_draft: Proposals of a step.
        max_tokens: Most tokens of the text; mlx-lm proposes no more than are left.

    >>> proposed([True, False, False, True, True], n_draft=2, max_tokens=9)
    6
    """
    total = at = 0
    while at < len(from_draft):
        n = min(n_draft, max_tokens - at)
        taken = from_draft[at : at + n]
        accepted = taken.index(False) if False in taken else len(taken)
        at += accepted + 1
        total += n if at <= len(from_draft) else accepted
    return total


def _flat(caches: Iterable[Any]) -> Iterable[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _flat(cache.caches)
        else:
            yield cache


def _stuck(caches: Iterable[Any]) -> str:
    """Classes of those that cannot be trimmed now."""
    return ", ".join(sorted({type(c).__name__ for c in _flat(caches) if not c.is_trimmable()}))
