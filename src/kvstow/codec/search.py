"""The best of five scales for a group of values, in numpy: part of the definition.

The root mean square is the right scale for infinitely many normal elements. A group
has 32, and some multiple of it fits them better. `searched` codes a group against
five multiples and keeps the codes that point best the way the group does. The scale then
makes what is read back as long as the group *along the group*: a least-squares scale is
shorter, every token's value by about the same part, and attention adds up what all tokens
have in common while the rest averages out. Nothing that a reader knows changes: centroids,
layout and decoder are the same.

Exact like the rest: float32 in the order written here, no fused multiply-add. Axes as in
`reference`; callers silence numpy's warnings.
"""

import numpy as np
from jaxtyping import Float16, Float32, UInt8

from kvstow.codec.tables import BOUNDARIES, CENTROIDS

MULTIPLES = np.array([0.8, 0.9, 1.0, 1.1, 1.2], np.float32)
PARITY = 2  # the multiple 1, whose codes are those without a search
# Scales between keep all 11 bits of float16: a fitted scale lies within a factor of 2 below
# and of 4 above the root mean square. Others keep the bytes they have without a search.
SEARCHED = (2.0**-13, 2.0**14)


def searched(
    units: Float32[np.ndarray, "*b g 32"],
    divisors: Float32[np.ndarray, "*b g"],
    scales: Float16[np.ndarray, "*b g"],
    bits: int,
) -> tuple[UInt8[np.ndarray, "*b g 32"], Float16[np.ndarray, "*b g"]]:
    """Codes at the least angle to their group, and the scale without a bias along it.

    With `u` a unit and `c` its centroid, the cosine squared is ``sum(u*c)**2 / sum(c*c)``
    over ``sum(u*u)``; of two equal ones the smaller multiple is taken. The scale is
    ``sum(u*u) / sum(u*c)``, so that the group times what is read back is the group times
    itself, but at most twice the least-squares scale ``sum(u*c) / sum(c*c)``: then no
    group errs more than if zeros were read back.

    Args:
        units: Rotated values over their divisor.
        divisors: The root mean square of each group, as the parity encoder divides by it.
        scales: What is stored for a group that is not searched.
        bits: Width of a code.
    """
    codes = np.stack([count_below(units, edges) for edges in boundaries(bits)])
    levels = CENTROIDS[bits][codes]
    fit = halving_sum(units * levels)
    least_squares = fit / halving_sum(levels * levels)
    unbiased = halving_sum(units * units) / fit
    ratios = np.minimum(unbiased, least_squares + least_squares)
    safe = (divisors >= SEARCHED[0]) & (divisors < SEARCHED[1])
    best = np.where(safe, np.argmax(fit * least_squares, axis=0), PARITY)[None]
    codes = np.take_along_axis(codes, best[..., None], axis=0)[0]
    fitted = (divisors * np.take_along_axis(ratios, best, axis=0)[0]).astype(np.float16)
    return codes, np.where(safe, fitted, scales)


def boundaries(bits: int) -> Float32[np.ndarray, "5 c"]:
    """The boundaries between codes, in units, for each multiple of the scale."""
    scaled: np.ndarray = MULTIPLES[:, None] * BOUNDARIES[bits]
    return scaled


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
