"""`affine`, on MLX arrays: scale and zero of a group of keys."""

from typing import NamedTuple

import mlx.core as mx
from jaxtyping import Float32

from kvstow.codec.affine import EPS, GUARD_STEPS, LARGEST_SCALE, SMALLEST_SCALE, n_steps

FLOAT16_OVERFLOW = 65520.0  # the least float32 that rounds to inf in float16
ROUNDS_TO_GUARD = 255.5 * 2.0**-24  # the least float32 that rounds to `affine.GUARD_BELOW`


class Affine(NamedTuple):
    """See `affine.Affine`; scales and offsets are not yet float16."""

    scales: Float32[mx.array, "*b g 1"]
    divisors: Float32[mx.array, "*b g 1"]
    offsets: Float32[mx.array, "*b g 1"]


def affine_of(low: mx.array, high: mx.array, middle: mx.array, bits: int) -> Affine:
    """See `affine.affine_of`; `middle` is what `_to_steps` takes."""
    scales = (high - low) / n_steps(bits)
    divisors = scales + EPS
    return Affine(scales, divisors, mx.round(_to_steps(middle, divisors, bits)))


def guarded(parity: Affine, low: mx.array, high: mx.array, middle: mx.array, bits: int) -> Affine:
    """See `affine.guarded`."""
    guard_steps, zero_limit = GUARD_STEPS[bits]
    largest = mx.maximum(-low, high)
    scales = mx.maximum(high / guard_steps - low / guard_steps, largest / zero_limit)
    scales = _float16_above(mx.clip(scales, SMALLEST_SCALE, LARGEST_SCALE))
    offsets = mx.clip(_to_steps(middle, scales, bits), -LARGEST_SCALE, LARGEST_SCALE)
    offsets = offsets.astype(mx.float16).astype(mx.float32)

    fits = mx.maximum(parity.scales, mx.abs(parity.offsets)) < FLOAT16_OVERFLOW
    sane = (parity.scales >= ROUNDS_TO_GUARD) & fits
    ratio = largest / largest  # 1, but NaN of 0, inf and NaN, which keep their bytes
    bad = (ratio == ratio) > sane
    return Affine(
        mx.where(bad, scales, parity.scales),
        mx.where(bad, scales, parity.divisors),
        mx.where(bad, offsets, parity.offsets),
    )


def _to_steps(middle: mx.array, divisors: mx.array, bits: int) -> mx.array:
    # At 8 bits `middle` is the sum of both ends; halving it first would change no bit.
    return middle / (divisors + divisors) if bits == 8 else middle / divisors


def _float16_above(x: Float32[mx.array, "*b"]) -> Float32[mx.array, "*b"]:
    """See `affine._float16_above`; widened again."""
    nearest = x.astype(mx.float16)
    below = nearest.astype(mx.float32) < x
    return (nearest.view(mx.uint16) + below).view(mx.float16).astype(mx.float32)
