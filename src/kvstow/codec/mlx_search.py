"""`search`, on MLX arrays: the best of five scales for a group of values.

The boundaries of all five multiples are one sorted list: where a unit lies in it says
its code under each, so a unit is placed once.
"""

from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float16, Float32, UInt8

from kvstow.codec.search import MULTIPLES, PARITY, SEARCHED, boundaries
from kvstow.codec.tables import CENTROIDS
from kvstow.scheme import GROUP_SIZE

# Five multiples of that many elements are in memory at a time, and nearly in the L2 cache.
CHUNK_GROUPS = 4096
CELLS_PER_UNIT = 512  # a power of two: placing a unit in a cell rounds once


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
    places, tables = _places(units, bits), _tables(bits)
    levels = mx.take_along_axis(tables.levels, places[None], axis=1)
    levels = levels.reshape(MULTIPLES.size, *units.shape)
    fit = halving_sum(units * levels)
    ratios = fit / halving_sum(levels * levels)
    safe = (divisors >= SEARCHED[0]) & (divisors < SEARCHED[1])
    best = mx.where(safe, mx.argmax(fit * ratios, axis=0), PARITY)
    fitted = mx.take_along_axis(ratios, best[None], axis=0)[0] * divisors
    at = places.reshape(units.shape) + best * tables.levels.shape[1]
    codes = mx.take_along_axis(tables.codes, at.reshape(-1), axis=0).reshape(units.shape)
    codes = codes * (units == units).view(mx.uint8)  # NaN: 0
    return codes, mx.where(safe, fitted.astype(mx.float16), scales)


def _places(units: mx.array, bits: int) -> mx.array:
    """How many boundaries of any multiple lie below each unit, flat; NaN: any number of them."""
    tables, flat = _tables(bits), units.reshape(-1)
    if flat.size <= 4096:
        return mx.searchsorted(tables.edges, flat)
    # Searching mispredicts half its branches: many elements start where their cell does,
    # and take a step for each boundary that the fullest cell has.
    cells = mx.clip(flat * CELLS_PER_UNIT + tables.shift, 0, tables.starts.size - 1)
    # Of NaN the cast makes an arbitrary number, which must not be read at.
    cells = mx.minimum(cells.astype(mx.uint32), tables.starts.size - 1)
    places = mx.take_along_axis(tables.starts, cells, axis=0)
    for _ in range(tables.n_steps):
        beyond = flat > mx.take_along_axis(tables.edges_and_inf, places, axis=0)
        places = places + beyond.view(mx.uint8)
    return places


class _Tables(NamedTuple):
    """What places and multiples say; ``p`` is one more than there are boundaries.

    A cell is ``1 / CELLS_PER_UNIT`` wide and `shift` cells lie below 0. `starts` counts
    the boundaries in the cells below, so never too many, and at most `n_steps` too few.
    """

    edges: Float32[mx.array, " p-1"]
    edges_and_inf: Float32[mx.array, " p"]
    starts: mx.array
    shift: float
    n_steps: int
    levels: Float32[mx.array, "5 p"]
    codes: UInt8[mx.array, " 5*p"]


@cache
def _tables(bits: int) -> _Tables:
    by_multiple = boundaries(bits)
    edges = np.unique(by_multiple)
    shift = np.float32(np.ceil(-edges[0] * CELLS_PER_UNIT) + 1)
    cells = (edges * np.float32(CELLS_PER_UNIT) + shift).astype(np.uint32)
    n_cells = int(cells[-1]) + 2
    # The code at place p: the boundaries of its multiple among the p lowest of all.
    lowest = np.append(edges, np.float32(np.inf))
    codes = np.array([np.searchsorted(one, lowest, side="left") for one in by_multiple])
    return _Tables(
        edges=mx.array(edges),
        edges_and_inf=mx.array(lowest),
        starts=mx.array(np.searchsorted(cells, np.arange(n_cells), side="left").astype(np.uint16)),
        shift=float(shift),
        n_steps=int(np.bincount(cells).max()),
        levels=mx.array(CENTROIDS[bits][codes]),
        codes=mx.array(codes.astype(np.uint8).reshape(-1)),
    )
