"""The best of several grids for a group, in numpy: part of the definition.

Without a search a group has one grid: the ends of a key group are the ends of its codes,
and the scale of a value group is its root mean square. Both are right for infinitely many
elements. A group has 32, and another grid fits them better; which one, `candidates` says.
Nothing that a reader knows changes: layout, decoder and bytes are the same.

**Keys** of 8 bits have four candidates, a quarter of a step apart, of a scale that leaves
room for it. Narrower keys are not searched: their squared error falls too, but not the KL.
**Values** have eight, multiples of the root mean square. Then the scale of a value group
makes what is read back as long as the group *along the group*: a least-squares scale is
shorter, every token's value by about the same part, and attention adds up what all tokens
have in common while the rest averages out.

Exact like the rest: float32 in the order written here, no fused multiply-add. Axes as in
`reference`; callers silence numpy's warnings.
"""

from functools import cache

import numpy as np
from jaxtyping import Float16, Float32, UInt8

from kvstow.codec.affine import Affine, code_range
from kvstow.codec.candidates import Candidates, in_words, least_of, middles
from kvstow.codec.tables import BOUNDARIES, CENTROIDS

SEARCHED_KEY_BITS = 8
# Of a searched group's range, one less than the codes span: half a step is left at both ends.
STEPS = 253
PHASES = np.array([-0.5, -0.25, 0.0, 0.25], np.float32)  # of a step, added to the zero
# Key groups whose scale lies between are searched: the guard would keep it. So are only those
# of a zero within LARGEST_ZERO, where float16 holds the quarters of a step.
SEARCHED_KEYS = (2.0**-15, 2.0**15)
LARGEST_ZERO = 256

MULTIPLES = np.array([0.7, 0.8, 0.87, 0.94, 1.0, 1.07, 1.15, 1.25], np.float32)
PARITY = 4  # the multiple 1, whose codes are those without a search
# Scales between keep all 11 bits of float16: a fitted scale lies within a factor of 2 below
# and of 4 above the root mean square. Others keep the bytes they have without a search.
SEARCHED_VALUES = (2.0**-13, 2.0**14)
LARGEST_UNIT = 6  # a group of 32 has no element beyond sqrt(32) times its root mean square


def searched_keys(
    parity: Affine,
    groups: Float32[np.ndarray, "*b g 32"],
    low: Float32[np.ndarray, "*b g"],
    high: Float32[np.ndarray, "*b g"],
) -> Affine:
    """`parity` of 8 bits, but where a search is safe: the candidate of least squared error.

    Args:
        parity: Scale and zero without a search.
        groups: The keys.
        low: The least of each group.
        high: The greatest.
    """
    table = key_candidates()
    scales = ((high - low) / np.float32(STEPS)).astype(np.float16)
    divisors = scales.astype(np.float32)
    whole = np.rint((high + low) / (divisors + divisors))
    per_step, at_zero = table.resolution / divisors, table.shift - whole * table.resolution
    best = least_of(groups * per_step[..., None] + at_zero[..., None], table.words)
    zeros = (whole + PHASES[best]).astype(np.float16)
    made = Affine(scales, zeros, divisors, zeros.astype(np.float32))

    least, most = SEARCHED_KEYS
    safe = (parity.divisors >= least) & (parity.divisors < most)
    safe &= np.abs(parity.offsets) < LARGEST_ZERO
    return Affine(*(np.where(safe, a, b) for a, b in zip(made, parity, strict=True)))


def searched_values(
    units: Float32[np.ndarray, "*b g 32"],
    divisors: Float32[np.ndarray, "*b g"],
    scales: Float16[np.ndarray, "*b g"],
    bits: int,
) -> tuple[UInt8[np.ndarray, "*b g 32"], Float16[np.ndarray, "*b g"]]:
    """Codes under the best multiple for their group, and the scale without a bias along it.

    With `u` a unit over the multiple and `c` its centroid, the scale is
    ``sum(u*u) / sum(u*c)`` multiples, so that the group times what is read back is the
    group times itself, but at most twice the least-squares scale ``sum(u*c) / sum(c*c)``:
    then no group errs more than if zeros were read back.

    Args:
        units: Rotated values over their divisor.
        divisors: The root mean square of each group, as the parity encoder divides by it.
        scales: What is stored for a group that is not searched.
        bits: Width of a code.
    """
    table = value_candidates(bits)
    least, most = SEARCHED_VALUES
    safe = (divisors >= least) & (divisors < most)
    best = least_of(units * np.float32(table.resolution) + np.float32(table.shift), table.words)
    multiples = MULTIPLES[np.where(safe, best, PARITY)]
    units = units / multiples[..., None]
    codes = count_below(units, BOUNDARIES[bits])
    levels = CENTROIDS[bits][codes]
    fit = halving_sum(units * levels)
    least_squares = fit / halving_sum(levels * levels)
    unbiased = halving_sum(units * units) / fit
    ratios = np.minimum(unbiased, least_squares + least_squares)
    fitted = (divisors * multiples * ratios).astype(np.float16)
    return codes, np.where(safe, fitted, scales)


@cache
def key_candidates() -> Candidates:
    """Squared errors in steps, by steps from the whole zero, of each of `PHASES`."""
    least, most = code_range(SEARCHED_KEY_BITS)
    low, high, resolution = least - 2, most + 2, 16
    steps = middles(low, high, resolution) - PHASES[:, None]
    errors = steps - np.clip(np.rint(steps), least, most)
    return Candidates(in_words(errors**2), resolution, -low * resolution)


@cache
def value_candidates(bits: int) -> Candidates:
    """Squared errors in units, by units, of each of `MULTIPLES`."""
    resolution = 128
    units = middles(-LARGEST_UNIT, LARGEST_UNIT, resolution)
    multiples = MULTIPLES.astype(np.float64)[:, None]
    edges = BOUNDARIES[bits].astype(np.float64)
    levels = CENTROIDS[bits].astype(np.float64)[np.searchsorted(edges, units / multiples)]
    return Candidates(
        in_words((units - levels * multiples) ** 2), resolution, LARGEST_UNIT * resolution
    )


def count_below(
    units: Float32[np.ndarray, "*b"], edges: Float32[np.ndarray, " c"]
) -> UInt8[np.ndarray, "*b"]:
    """How many `edges` lie strictly below each unit: its code, a tie the lower one; NaN: 0."""
    below = np.searchsorted(edges, units, side="left")
    return np.where(np.isnan(units), 0, below).astype(np.uint8)


def halving_sum(x: Float32[np.ndarray, "*b n"]) -> Float32[np.ndarray, "*b"]:
    """Sum of the last axis, a power of two: its halves are added until one element is left.

    The same bits on every backend, where a library's own sum has an order of its own, and
    fewer steps than one element after the other.
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
