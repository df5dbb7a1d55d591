"""`search`, on MLX arrays: the best of several grids for a group."""

from functools import cache

import mlx.core as mx
from jaxtyping import Float16, Float32, UInt8

from kvstow.codec import search
from kvstow.codec.mlx_affine import Affine
from kvstow.codec.mlx_candidates import Candidates, least_of
from kvstow.codec.mlx_places import Edges, codes_of
from kvstow.codec.search import LARGEST_ZERO, PARITY, SEARCHED_KEYS, SEARCHED_VALUES, STEPS
from kvstow.codec.tables import CENTROIDS


def searched_keys(
    parity: Affine,
    groups: Float32[mx.array, "*b g 32"],
    low: Float32[mx.array, "*b g 1"],
    high: Float32[mx.array, "*b g 1"],
) -> Affine:
    """See `search.searched_keys`."""
    table = _key_candidates()
    scales = ((high - low) / STEPS).astype(mx.float16).astype(mx.float32)
    whole = mx.round((high + low) / (scales + scales))
    places = groups * (table.resolution / scales) + (table.shift - whole * table.resolution)
    phases = mx.take(_phases(), least_of(places, table.words))
    zeros = (whole + phases).astype(mx.float16).astype(mx.float32)

    least, most = SEARCHED_KEYS
    safe = (parity.divisors >= least) & (parity.divisors < most)
    safe = safe & (mx.abs(parity.offsets) < LARGEST_ZERO)
    return Affine(
        mx.where(safe, scales, parity.scales),
        mx.where(safe, scales, parity.divisors),
        mx.where(safe, zeros, parity.offsets),
    )


def searched_values(
    units: Float32[mx.array, "*b g 32"],
    divisors: Float32[mx.array, "*b g 1"],
    scales: Float16[mx.array, "*b g 1"],
    edges: Edges,
    bits: int,
) -> tuple[UInt8[mx.array, "*b g 32"], Float16[mx.array, "*b g 1"]]:
    """See `search.searched_values`; `edges` are the boundaries of `bits`."""
    table = _value_candidates(bits)
    least, most = SEARCHED_VALUES
    safe = (divisors >= least) & (divisors < most)
    best = least_of(units * table.resolution + table.shift, table.words)
    multiples = mx.take(_multiples(), mx.where(safe, best, PARITY))
    units = units / multiples
    codes = codes_of(units, edges)
    levels = mx.take_along_axis(_centroids(bits), codes.reshape(-1), axis=0).reshape(units.shape)
    fit = halving_sum(units * levels)
    least_squares = fit / halving_sum(levels * levels)
    unbiased = halving_sum(units * units) / fit
    ratios = mx.minimum(unbiased, least_squares + least_squares)
    fitted = (divisors * multiples * ratios).astype(mx.float16)
    return codes, mx.where(safe, fitted, scales)


def halving_sum(x: Float32[mx.array, "*b n"]) -> Float32[mx.array, "*b 1"]:
    """See `search.halving_sum`; the axis stays."""
    while x.shape[-1] > 1:
        low, high = x.split(2, axis=-1)
        x = low + high
    return x


@cache
def _key_candidates() -> Candidates:
    return Candidates.of(search.key_candidates())


@cache
def _value_candidates(bits: int) -> Candidates:
    return Candidates.of(search.value_candidates(bits))


@cache
def _phases() -> Float32[mx.array, " 4"]:
    return mx.array(search.PHASES)


@cache
def _multiples() -> Float32[mx.array, " 8"]:
    return mx.array(search.MULTIPLES)


@cache
def _centroids(bits: int) -> Float32[mx.array, " c"]:
    return mx.array(CENTROIDS[bits])
