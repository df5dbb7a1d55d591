"""Attention over a packed window, on MLX arrays, with the un-rotation deferred.

Attention is linear in the values and the rotation is the same for every token,
so the values stay in the rotated domain and the *output* is un-rotated once per
query row: O(l * d log d) instead of O(t * d log d). Within 1e-5 of `reference`
in float32 (the order of the sums differs). In half precision the host's attention
gets a window that is rounded once; the products here stay in float32.
"""

from dataclasses import dataclass

import mlx.core as mx

from kvstow.codec import mlx as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import GROUP_SIZE, Turbo

# Up to this many query rows per KV head, two plain products are up to twice as fast
# as the host's attention on a CPU, which repeats the keys for every query head.
MAX_PRODUCT_ROWS = 32


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """Stored keys and values on their way from a cache to `attend`.

    `keys` and `values` are whole planes ``(b, h, capacity, *)``, contiguous; the
    first `n_tokens` tokens are the window. `fused` says that a kernel may attend to it,
    see `fused.attend`; here it changes nothing.
    """

    keys: PackedKeys
    values: PackedValues
    n_tokens: int
    scheme: Turbo
    fused: bool = False

    @property
    def head_dim(self) -> int:
        """Elements of one key and of one value."""
        return int(self.values.scales.shape[-1]) * GROUP_SIZE


def attend(
    queries: mx.array, window: PackedWindow, *, scale: float, mask: mx.array | str | None = None
) -> mx.array:
    """See `reference.attend`; `queries` is ``(b, hq, l, d)`` of any float dtype."""
    _, hq, n_queries, _ = queries.shape
    rows = hq // window.keys.scales.shape[1] * n_queries
    if rows <= MAX_PRODUCT_ROWS and not codec.on_gpu():
        keys, values = decode_window(window, mx.float32, rotated=True)
        output = _products(queries.astype(mx.float32), keys, values, scale, mask)
    else:
        keys, values = decode_window(window, queries.dtype, rotated=True)
        output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
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
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attention as two plain products, the query heads of a KV head as rows of one."""
    b, hq, n_queries, d = queries.shape
    h, n_stored = keys.shape[1], keys.shape[2]
    rows = (scale * queries).reshape(b, h, -1, d)  # (b, h, hq/h * l, d)
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
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(b, hq, n_queries, d)
