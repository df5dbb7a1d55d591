"""Packed codes to table entries, two codes at a time, on MLX arrays.

Below 8 bits a table has an entry for every *pair* of codes, which holds both
elements as one wide integer: one gather serves two codes, and unpacking only has
to bring the bits of two neighbouring codes together.
"""

from functools import cache

import mlx.core as mx
import numpy as np
from jaxtyping import UInt8

from kvstow.codec import tables


def look_up(packed: UInt8[mx.array, "*b p"], table: mx.array, bits: int) -> mx.array:
    """`table` at every code; below 8 bits, its entries hold the elements of two codes.

    One 8-byte entry costs no more than a 4-byte one, and `take_along_axis` on flat
    arrays costs a tenth of `take` on the CPU.
    """
    indices = packed.reshape(-1) if bits in (4, 8) else _pairs(packed, bits)
    found = mx.take_along_axis(table, indices, axis=0)
    if bits < 8:
        found = found.view(mx.float32 if table.dtype == mx.uint64 else mx.uint8)
    return found.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _pairs(packed: UInt8[mx.array, "*b p"], bits: int) -> mx.array:
    """Each two neighbouring codes as one flat index of ``2 * bits`` bits."""
    if bits == 2:
        return _spread(packed.reshape(-1).astype(mx.uint16), 4, 8).view(mx.uint8)
    word, index, lane = (mx.uint32, mx.uint8, 8) if bits == 3 else (mx.uint64, mx.uint16, 16)
    octets = packed.reshape(packed.size // bits, bits)  # 8 codes
    top = mx.zeros((octets.shape[0], word.size - bits), mx.uint8)
    words = mx.concatenate([octets, top], axis=-1).view(word).reshape(-1)
    words = _spread(words, 4 * bits, 2 * lane)
    return _spread(words, 2 * bits, lane).view(index)


def _spread(words: mx.array, width: int, lane: int) -> mx.array:
    """Of two fields of `width` bits side by side, move the upper one to the next lane."""
    n_lanes = words.dtype.size * 8 // lane
    low = sum((1 << width) - 1 << lane * i for i in range(0, n_lanes, 2))
    return (words & low) | ((words << lane - width) & (low << lane))


@cache
def centroid_table(bits: int) -> mx.array:
    """Float32 centroids of value codes."""
    centroids = tables.CENTROIDS[bits]
    return mx.array(centroids if bits == 8 else _paired(centroids).view(np.uint64).reshape(-1))


@cache
def code_table(bits: int, dtype: mx.Dtype) -> mx.array:
    """The codes themselves, as uint8 or float32."""
    codes = np.arange(2**bits)
    if dtype == mx.uint8:
        return mx.array(_paired(codes.astype(np.uint8)).view(np.uint16).reshape(-1))
    return mx.array(_paired(codes.astype(np.float32)).view(np.uint64).reshape(-1))


def _paired(elements: np.ndarray) -> np.ndarray:
    first, second = np.tile(elements, elements.size), np.repeat(elements, elements.size)
    return np.stack([first, second], axis=-1)
