"""`reference`, on MLX arrays. Function for function, in the same order."""

from functools import cache

import mlx.core as mx
from jaxtyping import Float, Float32, UInt8

from kvstow.codec import tables
from kvstow.codec.layout import PackedKeys, PackedValues, check_keys, check_rotation, check_values
from kvstow.codec.reference import EPS, FLOAT16_MAX, GUARD_BELOW, LARGEST_VALUE, SMALLEST_SCALE
from kvstow.scheme import GROUP_SIZE


def encode_keys(keys: Float[mx.array, "*b d"], *, bits: int, guard: bool = False) -> PackedKeys:
    """See `reference.encode_keys`."""
    check_keys(bits, keys.shape[-1])
    groups = _groups(keys)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    if bits == 8:
        steps = (high - low) / 254
        divisors = steps + EPS
        offsets = mx.round((high + low) / (2 * divisors))
    else:
        steps = (high - low) / (2**bits - 1)
        divisors = steps + EPS
        offsets = mx.round(low / divisors)
    scales, zeros = steps.astype(mx.float16), offsets.astype(mx.float16)
    if guard:
        n_steps, zero_limit = (238, 32768) if bits == 8 else (2**bits - 1, 1024)
        middle = 0.5 * low + 0.5 * high if bits == 8 else low
        largest = mx.maximum(-low, high)
        g = mx.maximum(high / n_steps - low / n_steps, largest / zero_limit)
        g = mx.clip(g, SMALLEST_SCALE, FLOAT16_MAX)
        h = g.astype(mx.float16)
        h = (h.view(mx.uint16) + (h.astype(mx.float32) < g).astype(mx.uint16)).view(mx.float16)
        d = h.astype(mx.float32)
        z = mx.clip(middle / d, -FLOAT16_MAX, FLOAT16_MAX).astype(mx.float16)
        s32 = scales.astype(mx.float32)
        keep = (s32 >= GUARD_BELOW) & mx.isfinite(s32) & mx.isfinite(zeros)
        keep = keep | ~mx.isfinite(low) | ~mx.isfinite(high) | (largest == 0)
        scales = mx.where(keep, scales, h)
        zeros = mx.where(keep, zeros, z)
        divisors = mx.where(keep, divisors, d)
        offsets = mx.where(keep, offsets, z.astype(mx.float32))
    low_code, high_code = (-127, 127) if bits == 8 else (0, 2**bits - 1)
    codes = mx.clip(mx.round(groups / divisors - offsets), low_code, high_code)
    codes = mx.where(mx.isnan(codes), 0, codes).reshape(keys.shape)
    scales, zeros = scales.squeeze(-1), zeros.squeeze(-1)
    if bits == 8:
        return PackedKeys(codes.astype(mx.int8), scales, zeros)
    return PackedKeys(pack_bits(codes.astype(mx.uint8), bits=bits), scales, zeros)


def decode_keys(
    packed: PackedKeys, *, bits: int, dtype: mx.Dtype = mx.float32
) -> Float[mx.array, "*b d"]:
    """See `reference.decode_keys`."""
    return narrow(dequantize_keys(packed, bits=bits), dtype)


def dequantize_keys(packed: PackedKeys, *, bits: int) -> Float32[mx.array, "*b d"]:
    """See `reference.dequantize_keys`."""
    check_keys(bits, packed.scales.shape[-1] * GROUP_SIZE)
    codes = packed.codes if bits == 8 else unpack_bits(packed.codes, bits=bits)
    scales = packed.scales[..., None].astype(mx.float32)
    zeros = packed.zeros[..., None].astype(mx.float32)
    keys: mx.array = (_groups(codes) + zeros) * scales
    return keys.reshape(codes.shape)


def encode_values(
    values: Float[mx.array, "*b d"], *, bits: int, guard: bool = False
) -> PackedValues:
    """See `reference.encode_values`."""
    check_values(bits, values.shape[-1])
    groups = _groups(rotate(values))
    total = mx.cumsum(groups * groups, axis=-1)[..., -1:]  # left to right
    rms = mx.sqrt(total / GROUP_SIZE)
    scales, divisors = rms.astype(mx.float16), rms + EPS
    if guard:
        largest = mx.abs(values.astype(mx.float32)).max(axis=-1, keepdims=True)[..., None]
        saturated = mx.isinf(scales) & (largest <= LARGEST_VALUE)
        scales = mx.where(saturated, mx.array(FLOAT16_MAX, mx.float16), scales)
        divisors = mx.where(saturated, FLOAT16_MAX, divisors)
    units = groups / divisors
    codes = mx.searchsorted(_boundaries(bits), units)
    codes = mx.where(mx.isnan(units), 0, codes).astype(mx.uint8).reshape(values.shape)
    return PackedValues(pack_bits(codes, bits=bits), scales.squeeze(-1))


def decode_values(
    packed: PackedValues, *, bits: int, head_dim: int, dtype: mx.Dtype = mx.float32
) -> Float[mx.array, "*b d"]:
    """See `reference.decode_values`."""
    rotated = dequantize_values(packed, bits=bits, head_dim=head_dim)
    return narrow(unrotate(rotated), dtype)


def dequantize_values(
    packed: PackedValues, *, bits: int, head_dim: int
) -> Float32[mx.array, "*b {head_dim}"]:
    """See `reference.dequantize_values`."""
    check_values(bits, head_dim)
    codes = unpack_bits(packed.codes, bits=bits)
    scales = packed.scales[..., None].astype(mx.float32)
    rotated: mx.array = _groups(mx.take(_centroids(bits), codes)) * scales
    return rotated.reshape(codes.shape)


def rotate(values: Float[mx.array, "*b d"]) -> Float32[mx.array, "*b d"]:
    """See `reference.rotate`."""
    check_rotation(values.shape[-1])
    return mx.hadamard_transform(values.astype(mx.float32) * _signs(values.shape[-1]))


def unrotate(rotated: Float[mx.array, "*b d"]) -> Float32[mx.array, "*b d"]:
    """See `reference.unrotate`."""
    check_rotation(rotated.shape[-1])
    return mx.hadamard_transform(rotated.astype(mx.float32)) * _signs(rotated.shape[-1])


def pack_bits(codes: UInt8[mx.array, "*b d"], *, bits: int) -> UInt8[mx.array, "*b d*{bits}//8"]:
    """See `reference.pack_bits`."""
    if bits == 8:
        return codes
    # 8 codes always fill whole bytes, and fit one uint64 for bits <= 8.
    words = codes.reshape(*codes.shape[:-1], -1, 8).astype(mx.uint64)
    words = (words << mx.arange(0, 8 * bits, bits, dtype=mx.uint64)).sum(axis=-1)
    octets = words[..., None] >> mx.arange(0, 8 * bits, 8, dtype=mx.uint64)  # (*b, d/8, bits)
    return (octets & 0xFF).astype(mx.uint8).reshape(*codes.shape[:-1], -1)


def unpack_bits(packed: UInt8[mx.array, "*b p"], *, bits: int) -> UInt8[mx.array, "*b p*8//{bits}"]:
    """See `reference.unpack_bits`."""
    if bits == 8:
        return packed
    octets = packed.reshape(*packed.shape[:-1], -1, bits).astype(mx.uint64)
    words = (octets << mx.arange(0, 8 * bits, 8, dtype=mx.uint64)).sum(axis=-1)
    codes = words[..., None] >> mx.arange(0, 8 * bits, bits, dtype=mx.uint64)
    return (codes & ((1 << bits) - 1)).astype(mx.uint8).reshape(*packed.shape[:-1], -1)


def narrow(x: Float32[mx.array, "*b"], dtype: mx.Dtype) -> Float[mx.array, "*b"]:
    """See `reference.narrow`."""
    if dtype == mx.float16:
        x = mx.clip(x, -FLOAT16_MAX, FLOAT16_MAX)
    return x.astype(dtype)


def count_nonfinite(packed: PackedKeys | PackedValues) -> int:
    """See `reference.count_nonfinite`."""
    lost = ~mx.isfinite(packed.scales)
    if isinstance(packed, PackedKeys):
        lost = lost | ~mx.isfinite(packed.zeros)
    return int(lost.sum())


def _groups(x: mx.array) -> Float32[mx.array, "*b g 32"]:
    n_groups = x.shape[-1] // GROUP_SIZE
    return x.astype(mx.float32).reshape(*x.shape[:-1], n_groups, GROUP_SIZE)


# Constants are made from numpy: they hold data, not a graph bound to one thread's stream.
@cache
def _signs(head_dim: int) -> Float32[mx.array, " {head_dim}"]:
    return mx.array(tables.SIGNS[head_dim])


@cache
def _centroids(bits: int) -> Float32[mx.array, " c"]:
    return mx.array(tables.CENTROIDS[bits])


@cache
def _boundaries(bits: int) -> Float32[mx.array, " c"]:
    return mx.array(tables.BOUNDARIES[bits])
