"""Attention over a packed window, a block of tokens at a time, on MLX arrays.

Softmax can be taken in parts: sums of weights and of weighted values, relative to the greatest
score so far, are brought to a greater one by a factor (Milakov and Gimelshein 2018, Rabe and
Staats 2021). So a block of keys and values is decoded, attended to and forgotten before the
next one, and memory does not grow with the window. Of many queries, a tile at a time meets a block,
so that scores stay few.

MLX computes in the order it likes, and would decode all blocks first: each one is made to
depend on what came before it.

Blocks begin at multiples of `block_tokens` in the planes, and neither blocks nor tiles depend on
the size of the batch: what is equal without blocks is equal with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from kvstow.attention.window import PackedWindow
from kvstow.codec import mlx as codec
from kvstow.codec.layout import PackedKeys, PackedValues

# Of one sequence, so that they fit in the caches of a CPU: elements of a block's keys, and scores.
BLOCK_ELEMENTS = 1 << 20
TILE_SCORES = 1 << 20
LEAST_BLOCK, MOST_BLOCK = 256, 4096  # tokens; products of less are slow, more gain nothing

LEAST = float(mx.finfo(mx.float32).min)  # of a query that has seen nothing; infinity has no ratio


def attend(
    queries: mx.array,
    window: PackedWindow,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """See `reference.attend`; `queries` is ``(b, hq, l, d)`` of any float dtype.

    Returns:
        float32 ``(b, hq, l, d)``, still rotated.
    """
    b, hq, n_queries, d = queries.shape
    h, first = window.keys.scales.shape[1], window.n_tokens - n_queries
    tiles = [
        _Tile(
            (scale * queries[:, :, at : at + n].astype(mx.float32)).reshape(b, h, -1, d),
            range(at, at + n),
            hq,
            None if sinks is None else by_row(sinks, h, n),
        )
        for at, n in _parts(n_queries, tile_queries(hq, h, d))
    ]
    after: list[mx.array] = []
    for at, n in _parts(window.n_tokens, block_tokens(h, d)):
        block = _Block.decoded(window, range(at, at + n), after)
        for tile in tiles:
            if isinstance(mask, str) and first + tile.queries[-1] < at:
                continue  # all of it is to come
            after = tile.take(block, _part_of(mask, tile.queries, block.tokens, first), after)
    parts = [tile.output().reshape(b, hq, -1, d) for tile in tiles]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def by_row(sinks: mx.array, n_kv_heads: int, n_queries: int) -> mx.array:
    """Sinks of query heads ``(hq,)`` as scores of the rows of KV heads, ``(h, hq/h * l, 1)``."""
    by_head = sinks.astype(mx.float32).reshape(n_kv_heads, -1, 1)
    return mx.repeat(by_head, n_queries, axis=1)


def block_tokens(n_kv_heads: int, head_dim: int) -> int:
    """Tokens of a block, a power of two."""
    most = BLOCK_ELEMENTS // (n_kv_heads * head_dim)
    return min(max(1 << most.bit_length() - 1 if most else 0, LEAST_BLOCK), MOST_BLOCK)


def tile_queries(n_heads: int, n_kv_heads: int, head_dim: int) -> int:
    """Query tokens of a tile."""
    return max(1, TILE_SCORES // (n_heads * block_tokens(n_kv_heads, head_dim)))


def n_tiles(queries: mx.array, window: PackedWindow) -> int:
    """How many pairs of a tile of queries and a block of tokens there are, masks aside."""
    _, hq, n_queries, d = queries.shape
    h = window.keys.scales.shape[1]
    n_blocks: int = -(-window.n_tokens // block_tokens(h, d))
    return n_blocks * -(-n_queries // tile_queries(hq, h, d))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens of a window, decoded.

    Attributes:
        tokens: Which.
        keys: float32 ``(b, h, d, t)``.
        values: float32 ``(b, h, t, d)``, rotated.
    """

    tokens: range
    keys: mx.array
    values: mx.array

    @classmethod
    def decoded(cls, window: PackedWindow, tokens: range, after: list[mx.array]) -> "_Block":
        """`tokens` of `window`, once `after` is computed."""
        at = slice(tokens.start, tokens.stop)
        planes = [plane[:, :, at] for plane in (*window.keys, *window.values)]
        planes = mx.depends(planes, after) if after else planes
        scheme, d = window.scheme, window.head_dim
        keys = codec.decode_keys(PackedKeys(*planes[:3]), bits=scheme.key_bits)
        values = PackedValues(*planes[3:])
        rotated = codec.dequantize_values(values, bits=scheme.value_bits, head_dim=d)
        return cls(tokens, keys.swapaxes(-1, -2), rotated)


class _Tile:
    """Some query tokens, and what they have seen so far.

    Args:
        rows: Scaled, float32 ``(b, h, hq/h * l, d)``.
        queries: Which.
        n_heads: Query heads.
        sink: A score of each row that no value belongs to; None for none.
    """

    def __init__(self, rows: mx.array, queries: range, n_heads: int, sink: mx.array | None) -> None:
        self.rows, self.queries, self.n_heads = rows, queries, n_heads
        self.greatest = sink  # score, (b, h, rows, 1)
        self.weights = mx.array(0.0 if sink is None else 1.0)  # of them all, and times the values
        self.sums = mx.array(0.0)

    def take(self, block: _Block, mask: mx.array | None, after: list[mx.array]) -> list[mx.array]:
        """See a block, once `after` is computed; returns what the next must wait for."""
        rows = mx.depends([self.rows], after)[0] if after else self.rows
        scores = rows @ block.keys
        if mask is not None:
            scores = self._masked(scores, mask)
        greatest = mx.max(scores, axis=-1, keepdims=True)
        greatest = mx.maximum(greatest, LEAST if self.greatest is None else self.greatest)
        weights = mx.exp(scores - greatest)
        total, sums = weights.sum(axis=-1, keepdims=True), weights @ block.values
        if self.greatest is None:
            self.weights, self.sums = total, sums
        else:
            factor = mx.exp(self.greatest - greatest)
            self.weights, self.sums = self.weights * factor + total, self.sums * factor + sums
        self.greatest = greatest
        return [self.weights, self.sums]

    def output(self) -> mx.array:
        """What they attend to, ``(b, h, rows, d)``."""
        return self.sums / self.weights

    def _masked(self, scores: mx.array, mask: mx.array) -> mx.array:
        b, n_tokens = scores.shape[0], scores.shape[-1]
        by_head = scores.reshape(b, self.n_heads, len(self.queries), n_tokens)
        masked = mx.where(mask, by_head, LEAST) if mask.dtype == mx.bool_ else by_head + mask
        return masked.reshape(scores.shape)


def _parts(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Beginning and length of each part of `n`."""
    return ((at, min(size, n - at)) for at in range(0, n, size))


def _part_of(
    mask: mx.array | str | None, queries: range, tokens: range, first: int
) -> mx.array | None:
    """What `mask` says of some queries, the first one of all being token `first`, and tokens."""
    if isinstance(mask, str):
        if tokens[-1] <= first + queries[0]:
            return None
        own = mx.arange(first + queries.start, first + queries.stop)
        return own[:, None] >= mx.arange(tokens.start, tokens.stop)
    if mask is None:
        return None
    mask = mask[..., tokens.start : tokens.stop] if mask.shape[-1] > 1 else mask
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., queries.start : queries.stop, :]
    return mask
