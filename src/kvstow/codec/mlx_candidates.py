"""`candidates`, on MLX arrays: which of several ways to code a group errs least."""

from typing import NamedTuple

import mlx.core as mx
from jaxtyping import Float32, UInt32, UInt64

from kvstow.codec import candidates


class Candidates(NamedTuple):
    """See `candidates.Candidates`; one array per word."""

    words: tuple[UInt64[mx.array, " p"], ...]
    resolution: float
    shift: float

    @classmethod
    def of(cls, table: candidates.Candidates) -> "Candidates":
        """The same table, on the device."""
        return cls(tuple(map(mx.array, table.words)), float(table.resolution), float(table.shift))


def least_of(
    places: Float32[mx.array, "*b g 32"], words: tuple[UInt64[mx.array, " p"], ...]
) -> UInt32[mx.array, "*b g 1"]:
    """See `candidates.least_of`; the axis stays."""
    # Of NaN the cast makes an arbitrary number, which must not be read at.
    at = mx.minimum(places.astype(mx.uint16), words[0].size - 1)
    flat = at.reshape(-1)
    sums = [
        mx.take_along_axis(word, flat, axis=0).reshape(at.shape).sum(axis=-1, keepdims=True)
        for word in words
    ]
    errors = mx.concatenate(sums, axis=-1).view(mx.uint16).astype(mx.uint32)
    n = errors.shape[-1]
    ranked = errors * n + mx.arange(n, dtype=mx.uint32)
    least: mx.array = ranked.min(axis=-1, keepdims=True) % n
    return least
