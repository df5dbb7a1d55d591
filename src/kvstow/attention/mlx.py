"""Attention over a packed window, on MLX arrays, with the un-rotation deferred.

Attention is linear in the values and the rotation is the same for every token,
so the values stay in the rotated domain and the *output* is un-rotated once per
query row: O(l * d log d) instead of O(t * d log d). Within 1e-5 of `reference`
in float32 (the order of the sums differs). In half precision the host's attention
gets a window that is rounded once; the products here stay in float32.
"""

import mlx.core as mx

from kvstow.attention import tiled
from kvstow.attention.window import PackedWindow
from kvstow.codec import mlx as codec


def attend(
    queries: mx.array,
    window: PackedWindow,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """See `reference.attend`; `queries` is ``(b, hq, l, d)`` of any float dtype."""
    if codec.on_gpu():
        keys, values = decode_window(window, queries.dtype, rotated=True)
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    elif tiled.n_tiles(queries, window) > 1:
        output = tiled.attend(queries, window, scale=scale, mask=mask, sinks=sinks)
    else:
        keys, values = decode_window(window, mx.float32, rotated=True)
        scaled = scale * queries.astype(mx.float32)
        output = _products(scaled, keys, values, mask, sinks)
    return codec.unrotate(output).astype(queries.dtype)


def decode_window(
    window: PackedWindow, dtype: mx.Dtype, *, rotated: bool
) -> tuple[mx.array, mx.array]:
    """Keys and values ``(b, h, n_tokens, d)`` in `dtype`.

    Args:
        window: What to decode.
        dtype: Of the result; float16 is clamped to its range.
        rotated: Whether the values are left in the rotated domain.
    """
    # The planes are decoded whole: a slice of the token axis is not contiguous, and
    # copying it costs more than decoding the at most 255 unused tokens.
    widths = window.scheme
    keys = codec.decode_keys(window.keys, bits=widths.key_bits, dtype=dtype)
    values = codec.dequantize_values(
        window.values, bits=widths.value_bits, head_dim=window.head_dim
    )
    values = codec.narrow(values if rotated else codec.unrotate(values), dtype)
    return keys[:, :, : window.n_tokens], values[:, :, : window.n_tokens]


def _products(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention as two plain products, the query heads of a KV head as rows of one."""
    b, hq, n_queries, d = queries.shape
    h, n_stored = keys.shape[1], keys.shape[2]
    rows = queries.reshape(b, h, -1, d)  # (b, h, hq/h * l, d)
    scores = rows @ keys.swapaxes(-1, -2)
    if isinstance(mask, str):
        at = mx.arange(n_stored - n_queries, n_stored)
        mask = None if n_queries == 1 else at[:, None] >= mx.arange(n_stored)
    if mask is not None:
        scores = scores.reshape(b, hq, n_queries, n_stored)
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        else:
            scores = scores + mask
        scores = scores.reshape(b, h, -1, n_stored)
    if sinks is not None:
        column = mx.broadcast_to(tiled.by_row(sinks, h, n_queries), (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :n_stored]
    return (weights @ values).reshape(b, hq, n_queries, d)
