"""Attention over a packed window, in numpy: the definition.

Axes: ``b`` batch, ``hq`` query heads, ``h`` KV heads (``hq`` a multiple of
``h``), ``l`` query tokens, ``t`` stored tokens, ``d`` head_dim.
"""

import numpy as np
from jaxtyping import Float32, Shaped

from kvstow.codec import reference as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import Turbo

Mask = Shaped[np.ndarray, "..."] | str | None


def attend(  # noqa: PLR0913  what attention depends on
    queries: Float32[np.ndarray, "b hq l d"],
    keys: PackedKeys,
    values: PackedValues,
    *,
    scheme: Turbo,
    scale: float,
    mask: Mask = None,
    sinks: Float32[np.ndarray, " hq"] | None = None,
) -> Float32[np.ndarray, "b hq l d"]:
    """Softmax of the scaled scores over every stored token, times the values.

    Args:
        queries: One row per query head and token; the last query token is the last
            stored token.
        keys: Packed ``(b, h, t, *)``.
        values: Packed ``(b, h, t, *)``.
        scheme: Widths that the window was encoded with.
        scale: Factor of the scores, usually ``d ** -0.5``.
        mask: None; ``"causal"``; booleans, True where a query may look; or numbers
            added to the scores. Arrays broadcast to ``(b, hq, l, t)``.
        sinks: A score for each query head of one more token, whose value is zero.
    """
    _, hq, n_queries, d = queries.shape
    k = codec.decode_keys(keys, bits=scheme.key_bits)
    v = codec.decode_values(values, bits=scheme.value_bits, head_dim=d)
    k, v = (np.repeat(x, hq // x.shape[1], axis=1) for x in (k, v))  # (b, hq, t, d)
    scores = scale * (queries @ k.swapaxes(-1, -2))
    n_stored = k.shape[2]
    if isinstance(mask, str):
        mask = np.arange(n_stored - n_queries, n_stored)[:, None] >= np.arange(n_stored)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    weights = weights[..., :n_stored]
    return np.asarray(weights @ v, np.float32)
