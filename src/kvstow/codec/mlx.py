"""`reference`, on MLX arrays. Function for function, in the same order.

Equal to it bit for bit, on the CPU back-end and on CUDA. A graph of few operations matters more
than their size: each costs about 2 us, for every layer and every token generated.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32, UInt, UInt8

from kvstow.codec import tables
from kvstow.codec.affine import EPS, code_range
from kvstow.codec.layout import PackedKeys, PackedValues, check_keys, check_rotation, check_values
from kvstow.codec.mlx_affine import FLOAT16_OVERFLOW, affine_of, guarded
from kvstow.codec.mlx_lookup import centroid_table, code_table, look_up
from kvstow.codec.mlx_places import Edges, codes_of
from kvstow.codec.mlx_search import searched_keys, searched_values
from kvstow.codec.reference import FLOAT16_MAX, LARGEST_VALUE
from kvstow.codec.search import SEARCHED_KEY_BITS
from kvstow.scheme import GROUP_SIZE


def encode_keys(
    keys: Float[mx.array, "*b d"], *, bits: int, guard: bool = False, search: bool = False
) -> PackedKeys:
    """See `reference.encode_keys`."""
    check_keys(bits, keys.shape[-1])
    groups = _groups(keys)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    middle = high + low if bits == 8 else low
    affine = affine_of(low, high, middle, bits)
    if search and bits == SEARCHED_KEY_BITS:
        affine = searched_keys(affine, groups, low, high)
    if guard:
        affine = guarded(affine, low, high, middle, bits)
    steps = groups / affine.divisors - affine.offsets
    rounded = mx.clip(mx.round(steps), *code_range(bits))
    scales, zeros = affine.scales.astype(mx.float16), affine.offsets.astype(mx.float16)
    # NaN, in a group that is lost anyway, is cast to code 0.
    codes = rounded.astype(mx.int8 if bits == 8 else mx.uint8).reshape(keys.shape)
    if bits < 8:
        codes = pack_bits(codes, bits=bits)
    return PackedKeys(codes, scales.squeeze(-1), zeros.squeeze(-1))


def decode_keys(
    packed: PackedKeys, *, bits: int, dtype: mx.Dtype = mx.float32
) -> Float[mx.array, "*b d"]:
    """See `reference.decode_keys`."""
    return narrow(dequantize_keys(packed, bits=bits), dtype)


def dequantize_keys(packed: PackedKeys, *, bits: int) -> Float32[mx.array, "*b d"]:
    """See `reference.dequantize_keys`."""
    check_keys(bits, packed.scales.shape[-1] * GROUP_SIZE)
    codes = packed.codes if bits == 8 else look_up(packed.codes, code_table(bits, mx.float32), bits)
    scales = packed.scales[..., None].astype(mx.float32)
    zeros = packed.zeros[..., None].astype(mx.float32)
    keys: mx.array = (_groups(codes) + zeros) * scales
    return keys.reshape(codes.shape)


def encode_values(
    values: Float[mx.array, "*b d"], *, bits: int, guard: bool = False, search: bool = False
) -> PackedValues:
    """See `reference.encode_values`."""
    check_values(bits, values.shape[-1])
    groups = _groups(rotate(values))
    rms = mx.sqrt(_sum_in_order(groups * groups) / GROUP_SIZE)
    if guard:
        saturated = (rms >= FLOAT16_OVERFLOW) & _is_codable(values)
        rms = mx.where(saturated, FLOAT16_MAX, rms)
    divisors, scales = rms + EPS, rms.astype(mx.float16)
    units = groups / divisors
    if search:
        codes, scales = searched_values(units, divisors, scales, _boundaries(bits), bits)
    else:
        codes = codes_of(units, _boundaries(bits))
    packed = pack_bits(codes.reshape(values.shape), bits=bits)
    return PackedValues(packed, scales.squeeze(-1))


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
    scales = packed.scales[..., None].astype(mx.float32)
    units = look_up(packed.codes, centroid_table(bits), bits)
    rotated: mx.array = _groups(units) * scales
    return rotated.reshape(units.shape)


def rotate(values: Float[mx.array, "*b d"]) -> Float32[mx.array, "*b d"]:
    """See `reference.rotate`."""
    check_rotation(values.shape[-1])
    return _walsh_hadamard(values.astype(mx.float32) * _signs(values.shape[-1]))


def unrotate(rotated: Float[mx.array, "*b d"]) -> Float32[mx.array, "*b d"]:
    """See `reference.unrotate`."""
    check_rotation(rotated.shape[-1])
    return _walsh_hadamard(rotated.astype(mx.float32)) * _signs(rotated.shape[-1])


def pack_bits(codes: UInt[mx.array, "*b d"], *, bits: int) -> UInt8[mx.array, "*b d*{bits}//8"]:
    """See `reference.pack_bits`; here ``d`` is a multiple of 32."""
    if bits == 8:
        return codes.astype(mx.uint8)
    shifts = _shifts(bits)
    *lead, head_dim = codes.shape
    words = codes.reshape(*lead, head_dim // shifts.size, shifts.size).astype(shifts.dtype)
    octets = (words << shifts).sum(axis=-1).view(mx.uint8)
    if bits in (3, 5):  # the word of 8 codes has empty bytes on top
        octets = octets.reshape(*lead, head_dim // 8, 8)[..., :bits]
        octets = octets.reshape(*lead, head_dim * bits // 8)
    return octets


def unpack_bits(packed: UInt8[mx.array, "*b p"], *, bits: int) -> UInt8[mx.array, "*b p*8//{bits}"]:
    """See `reference.unpack_bits`."""
    return packed if bits == 8 else look_up(packed, code_table(bits, mx.uint8), bits)


def narrow(x: Float32[mx.array, "*b"], dtype: mx.Dtype) -> Float[mx.array, "*b"]:
    """See `reference.narrow`."""
    if dtype == mx.float16:
        x = mx.clip(x, -FLOAT16_MAX, FLOAT16_MAX)
    return x.astype(dtype)


def count_nonfinite(packed: PackedKeys | PackedValues) -> mx.array:
    """See `reference.count_nonfinite`; nothing is computed before the number is read."""
    lost = ~mx.isfinite(packed.scales)
    if isinstance(packed, PackedKeys):
        lost = lost | ~mx.isfinite(packed.zeros)
    return lost.sum()


def on_gpu() -> bool:
    """Whether arrays are computed on a GPU unless said otherwise."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _is_codable(values: mx.array) -> mx.array:
    largest = mx.abs(values).astype(mx.float32).max(axis=-1, keepdims=True)
    return (largest <= LARGEST_VALUE)[..., None]


def _sum_in_order(x: Float32[mx.array, "*b g 32"]) -> Float32[mx.array, "*b g 1"]:
    """Left to right, as `mx.sum` need not be; CUDA's `mx.cumsum` adds in a tree."""
    n_groups = x.size // GROUP_SIZE
    if not n_groups or not mx.cuda.is_available() or not on_gpu():
        return mx.cumsum(x, axis=-1)[..., -1:]
    sums: mx.array = _ordered_sum_kernel()(
        inputs=[x, mx.array([n_groups])],
        grid=(n_groups, 1, 1),
        threadgroup=(min(n_groups, 256), 1, 1),
        output_shapes=[(*x.shape[:-1], 1)],
        output_dtypes=[mx.float32],
    )[0]
    return sums


@cache
def _ordered_sum_kernel() -> Any:
    """One thread adds one group of 32; made on first use, since a CPU back-end refuses to."""
    source = """
        int group = blockIdx.x * blockDim.x + threadIdx.x;
        if (group < n_groups[0]) {
            float sum = squares[32 * group];
            for (int i = 1; i < 32; ++i) sum += squares[32 * group + i];
            sums[group] = sum;
        }
    """
    return mx.fast.cuda_kernel(
        name="kvstow_ordered_sum",
        input_names=["squares", "n_groups"],
        output_names=["sums"],
        source=source,
    )


def _groups(x: mx.array) -> Float32[mx.array, "*b g 32"]:
    return x.astype(mx.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP_SIZE, GROUP_SIZE)


def _walsh_hadamard(x: Float32[mx.array, "*b d"]) -> Float32[mx.array, "*b d"]:
    # On the CPU this is the butterfly of the reference, order included.
    return mx.hadamard_transform(x) if x.size else x


# Constants are made from numpy: they hold data, not a graph bound to one thread's stream.
@cache
def _signs(head_dim: int) -> Float32[mx.array, " {head_dim}"]:
    return mx.array(tables.SIGNS[head_dim])


@cache
def _boundaries(bits: int) -> Edges:
    return Edges.of(tables.BOUNDARIES[bits])


@cache
def _shifts(bits: int) -> mx.array:
    """Bit offsets of as many codes as fill a word, or at least whole bytes of it."""
    if 32 % bits == 0:
        return mx.array(np.arange(0, 32, bits, dtype=np.uint32))
    return mx.array(np.arange(0, 8 * bits, bits, dtype=np.uint64))
