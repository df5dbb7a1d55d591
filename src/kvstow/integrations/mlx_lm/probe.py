"""What a model does with its caches, found out by letting it build its graph.

MLX is lazy: calling a model on a few tokens builds the graph and computes
nothing, yet every shape is known and every operation on a wrong type raises.
So the questions "which shapes does each layer store?" and "does the model's
own code accept packed windows?" have exact answers before a token is
generated, for any architecture and without a list of names.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from kvstow.capacity import LayerShape
from kvstow.errors import UnsupportedModel
from kvstow.integrations.mlx_lm import deferred, members

# A first append, a decode step, and a step of several tokens with a causal mask.
_STEPS_TOKENS = (1, 1, 2)


def attention_layers(model: Any, caches: list[Any]) -> dict[int, LayerShape]:
    """Index to shape of the plain caches that the model fills, sliding windows included.

    Raises:
        UnsupportedModel: If the model does not run on its own caches.
    """
    fill(model, caches)
    held = {i: members.plain(c) for i, c in enumerate(caches)}
    return {i: shape_of(c) for i, c in held.items() if c is not None and not c.empty()}


def shape_of(cache: Any) -> LayerShape:
    """What a filled plain cache holds."""
    if isinstance(cache, RotatingKVCache):
        return LayerShape("sliding", *widths(cache), window=int(cache.max_size))
    return LayerShape("full", *widths(cache))


def fill(model: Any, caches: list[Any], n_tokens: tuple[int, ...] = _STEPS_TOKENS) -> Any:
    """Append some tokens to the model's own caches, step by step; returns the last logits.

    Raises:
        UnsupportedModel: If the model does not run on its own caches.
    """
    try:
        return _build(model, caches, n_tokens)
    except Exception as error:
        raise UnsupportedModel(f"the model does not run on its own caches: {say(error)}") from error


def widths(cache: Any) -> tuple[int, int, int]:
    """KV heads, elements of a key and elements of a value in a filled cache."""
    return int(cache.keys.shape[1]), int(cache.keys.shape[-1]), int(cache.values.shape[-1])


def refusal(model: Any, caches: list[Any]) -> str:
    """Why the model does not run on `caches`; empty if it does."""
    try:
        _build(model, caches)
    except Exception as error:
        return say(error)
    return ""


def deferred_refusal(
    model: Any, caches: list[Any], n_packed: int
) -> tuple[str, set[deferred.Heads]]:
    """Why the model cannot take packed windows from `caches`, empty if it can; and its heads.

    Args:
        model: The model.
        caches: Fresh caches, `n_packed` of them deferred.
        n_packed: How many.
    """
    with deferred.installed(), deferred.windows_seen() as seen:
        why = refusal(model, caches)
    arrived = len({id(window) for window, _ in seen})  # some layers attend to others' windows
    expected = n_packed * (len(_STEPS_TOKENS) - 1)  # the first append is exact
    if not why and arrived != expected:
        why = f"{arrived} of {expected} packed windows reached mlx-lm's own attention"
    return why, {heads for _, heads in seen}


def refuse_stage(model: Any) -> None:
    """Refuse one stage of a pipeline: mlx-lm ties its messages to arrays of the caches.

    Raises:
        UnsupportedModel: If the layers of `model` are split over processes.
    """
    for owner in (model, getattr(model, "language_model", None)):
        size = getattr(getattr(owner, "model", None), "pipeline_size", 1)
        if size > 1:
            raise UnsupportedModel(
                f"this model is one of {size} stages of a pipeline, whose code writes to the "
                "caches' own arrays; model.shard splits heads in the place of layers"
            )


def text_args(model: Any) -> Any:
    """The args of the language model, be it inside another; None if it has none."""
    for owner in (getattr(model, "language_model", None), model):
        for name in ("args", "config"):
            if (args := getattr(owner, name, None)) is not None:
                return args
    return None


def _build(model: Any, caches: list[Any], n_tokens: tuple[int, ...] = _STEPS_TOKENS) -> Any:
    logits = None
    for n in n_tokens:
        logits = model(mx.zeros((1, n), mx.int32), cache=caches)
    return logits


def say(error: Exception) -> str:
    """The error's first sentence: mlx lists every overload after it."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].partition('. ')[0]}"
