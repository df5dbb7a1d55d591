"""What a model does with its caches, found out by letting it build its graph.

MLX is lazy: calling a model on a few tokens builds the graph and computes
nothing, yet every shape is known and every operation on a wrong type raises.
So the questions "which shapes does each layer store?" and "does the model's
own code accept packed windows?" have exact answers before a token is
generated, for any architecture and without a list of names.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvstow.errors import UnsupportedModel
from kvstow.integrations.mlx_lm import deferred

# A first append, a decode step, and a step of several tokens with a causal mask.
_STEPS_TOKENS = (1, 1, 2)


def plain_shapes(model: Any, caches: list[Any]) -> dict[int, tuple[int, int]]:
    """Cache index to (key width, value width) of the plain caches that the model fills.

    Raises:
        UnsupportedModel: If the model does not run on its own caches.
    """
    try:
        _build(model, caches)
    except Exception as error:
        raise UnsupportedModel(
            f"the model does not run on its own caches: {_say(error)}"
        ) from error
    return {
        i: (int(c.keys.shape[-1]), int(c.values.shape[-1]))
        for i, c in enumerate(caches)
        if type(c) is KVCache and c.keys is not None and c.values is not None
    }


def refusal(model: Any, caches: list[Any]) -> str:
    """Why the model does not run on `caches`; empty if it does."""
    try:
        _build(model, caches)
    except Exception as error:
        return _say(error)
    return ""


def deferred_refusal(model: Any, caches: list[Any], n_packed: int) -> str:
    """Why the model cannot take packed windows from `caches`; empty if it can.

    Args:
        model: The model.
        caches: Fresh caches, `n_packed` of them deferred.
        n_packed: How many.
    """
    with deferred.installed() as calls:
        why = refusal(model, caches)
    if why:
        return why
    expected = n_packed * (len(_STEPS_TOKENS) - 1)  # the first append is exact
    if calls.n_packed != expected:
        return f"{calls.n_packed} of {expected} packed windows reached mlx-lm's own attention"
    return ""


def _build(model: Any, caches: list[Any]) -> None:
    for n_tokens in _STEPS_TOKENS:
        model(mx.zeros((1, n_tokens), mx.int32), cache=caches)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
