"""Scale and zero of a group of keys, in numpy: part of the definition.

`affine_of` makes vllm-metal's, and `guarded` replaces those that lose their group. A
group decodes as ``x = (code + zero) * scale`` whoever made them. Callers silence numpy's
warnings: overflow and NaN are part of the definition. Axes as in `reference`.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float16, Float32

from kvstow.scheme import KEY_BITS

EPS = 1e-8
# A smaller key scale keeps fewer than 8 significant bits in float16.
GUARD_BELOW = 2.0**-16
SMALLEST_SCALE = 2.0**-24  # the least positive float16
LARGEST_SCALE = 65504.0  # the greatest
# Steps of a guarded group by key width, and the limit of its zero: float16 still resolves
# half a step there (unsigned), or errs by 2**-11 of the element (signed).
GUARD_STEPS = {bits: (238, 32768) if bits == 8 else (2**bits - 1, 1024) for bits in KEY_BITS}


class Affine(NamedTuple):
    """Per group: what is stored, and the float32 values that codes are taken against."""

    scales: Float16[np.ndarray, "*b g"]
    zeros: Float16[np.ndarray, "*b g"]
    divisors: Float32[np.ndarray, "*b g"]
    offsets: Float32[np.ndarray, "*b g"]


def affine_of(
    low: Float32[np.ndarray, "*b g"], high: Float32[np.ndarray, "*b g"], bits: int
) -> Affine:
    """The minimum and the maximum as the ends of the range: vllm-metal's own."""
    scales = (high - low) / n_steps(bits)
    divisors = scales + np.float32(EPS)
    offsets = np.rint((high + low) / (2 * divisors) if bits == 8 else low / divisors)
    return Affine(scales.astype(np.float16), offsets.astype(np.float16), divisors, offsets)


def guarded(
    parity: Affine,
    low: Float32[np.ndarray, "*b g"],
    high: Float32[np.ndarray, "*b g"],
    bits: int,
) -> Affine:
    """`parity`, but where it is not sane: a scale rounded up and a fractional zero."""
    guard_steps, zero_limit = GUARD_STEPS[bits]
    middle = 0.5 * low + 0.5 * high if bits == 8 else low
    largest = np.maximum(-low, high)
    scales = np.maximum(high / guard_steps - low / guard_steps, largest / zero_limit)
    scales = _float16_above(np.clip(scales, SMALLEST_SCALE, LARGEST_SCALE))
    divisors = scales.astype(np.float32)
    zeros = np.clip(middle / divisors, -LARGEST_SCALE, LARGEST_SCALE).astype(np.float16)
    made = Affine(scales, zeros, divisors, zeros.astype(np.float32))

    sane = parity.scales.astype(np.float32) >= GUARD_BELOW
    sane &= np.isfinite(parity.scales) & np.isfinite(parity.zeros)
    keep = sane | ~np.isfinite(low) | ~np.isfinite(high) | (largest == 0)
    return Affine(*(np.where(keep, a, b) for a, b in zip(parity, made, strict=True)))


def _float16_above(x: Float32[np.ndarray, "*b"]) -> Float16[np.ndarray, "*b"]:
    """The least float16 not below `x`, for positive `x` within float16."""
    nearest = x.astype(np.float16)
    return np.where(nearest < x, np.nextafter(nearest, np.float16(np.inf)), nearest)


def code_range(bits: int) -> tuple[int, int]:
    """Least and greatest key code."""
    return (-127, 127) if bits == 8 else (0, 2**bits - 1)


def n_steps(bits: int) -> int:
    """Steps between the least and the greatest key code."""
    low, high = code_range(bits)
    return high - low
