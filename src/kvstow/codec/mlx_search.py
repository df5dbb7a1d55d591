"""`search`, on MLX arrays: the best of five scales for a group of values.

The boundaries of all five multiples are one sorted list: where a unit lies in it says
its code under each, so a unit is placed once.
"""

from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float16, Float32, UInt8

from kvstow.codec.mlx_places import Edges, places_of
from kvstow.codec.search import MULTIPLES, PARITY, SEARCHED, boundaries
from kvstow.codec.tables import CENTROIDS
from kvstow.scheme import GROUP_SIZE

# Five multiples of that many elements are in memory at a time, and nearly in the L2 cache.
CHUNK_GROUPS = 4096


def searched(
    units: Float32[mx.array, "*b g 32"],
    divisors: Float32[mx.array, "*b g 1"],
    scales: Float16[mx.array, "*b g 1"],
    bits: int,
) -> tuple[UInt8[mx.array, "*b g 32"], Float16[mx.array, "*b g 1"]]:
    """See `search.searched`."""
    n_groups = units.size // GROUP_SIZE
    if n_groups <= CHUNK_GROUPS:
        return _searched(units, divisors, scales, bits)
    u, d, s = (x.reshape(n_groups, x.shape[-1]) for x in (units, divisors, scales))
    chunks = [slice(i, i + CHUNK_GROUPS) for i in range(0, n_groups, CHUNK_GROUPS)]
    found = [_searched(u[chunk], d[chunk], s[chunk], bits) for chunk in chunks]
    codes, fitted = (mx.concatenate(list(pieces)) for pieces in zip(*found, strict=True))
    return codes.reshape(units.shape), fitted.reshape(scales.shape)


def halving_sum(x: Float32[mx.array, "*b n"]) -> Float32[mx.array, "*b 1"]:
    """See `search.halving_sum`; the axis stays."""
    while x.shape[-1] > 1:
        low, high = x.split(2, axis=-1)
        x = low + high
    return x


def _searched(
    units: mx.array, divisors: mx.array, scales: mx.array, bits: int
) -> tuple[mx.array, mx.array]:
    tables = _tables(bits)
    places = places_of(units.reshape(-1), tables.boundaries)
    levels = mx.take_along_axis(tables.levels, places[None], axis=1)
    levels = levels.reshape(MULTIPLES.size, *units.shape)
    fit = halving_sum(units * levels)
    least_squares = fit / halving_sum(levels * levels)
    unbiased = halving_sum(units * units) / fit
    ratios = mx.minimum(unbiased, least_squares + least_squares)
    safe = (divisors >= SEARCHED[0]) & (divisors < SEARCHED[1])
    best = mx.where(safe, mx.argmax(fit * least_squares, axis=0), PARITY)
    fitted = mx.take_along_axis(ratios, best[None], axis=0)[0] * divisors
    at = places.reshape(units.shape) + best * tables.levels.shape[1]
    codes = mx.take_along_axis(tables.codes, at.reshape(-1), axis=0).reshape(units.shape)
    codes = codes * (units == units).view(mx.uint8)  # NaN: 0
    return codes, mx.where(safe, fitted.astype(mx.float16), scales)


class _Tables(NamedTuple):
    """What a place says under each multiple; ``p`` is one more than there are boundaries."""

    boundaries: Edges
    levels: Float32[mx.array, "5 p"]
    codes: UInt8[mx.array, " 5*p"]


@cache
def _tables(bits: int) -> _Tables:
    by_multiple = boundaries(bits)
    edges = np.unique(by_multiple)
    # The code at place p: the boundaries of its multiple among the p lowest of all.
    lowest = np.append(edges, np.float32(np.inf))
    codes = np.array([np.searchsorted(one, lowest, side="left") for one in by_multiple])
    return _Tables(
        boundaries=Edges.of(edges),
        levels=mx.array(CENTROIDS[bits][codes]),
        codes=mx.array(codes.astype(np.uint8).reshape(-1)),
    )
