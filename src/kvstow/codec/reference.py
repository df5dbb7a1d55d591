"""The definition of the codec, in numpy.

Slow and plain on purpose: every other backend must equal this file bit for
bit (``tests/parity``). All arithmetic is IEEE float32 after widening the input,
in the order written here, without fused multiply-add. Axes: ``b`` leading ones
(batch, KV heads, tokens), ``d`` head_dim, ``g`` groups of 32 along ``d``.
Source: vllm-metal, ``attention/caches/turboquant.py``; where its comments and
its code disagree, this file follows its code.

Keys are affine per group, values are rotated and coded against a fixed
codebook. ``guard=False`` gives the bytes of vllm-metal, degenerate groups
included (a constant key group decodes to NaN). A cache stores ``guard=True``:
the same bytes wherever those are sane, otherwise bytes for the same decoder
that give finite output for finite input. ``search`` stores better numbers in
the same bytes, for the same decoder. Widths and sizes without an encoding raise
as `layout.check_keys` and `layout.check_values` say.
"""

from functools import reduce

import numpy as np
from jaxtyping import Float, Float32, UInt8

from kvstow.codec.affine import EPS, affine_of, code_range, guarded
from kvstow.codec.layout import PackedKeys, PackedValues, check_keys, check_rotation, check_values
from kvstow.codec.search import (
    SEARCHED_KEY_BITS,
    count_below,
    searched_keys,
    searched_values,
)
from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.scheme import GROUP_SIZE

FLOAT16_MAX = 65504.0
# Beyond it, the sums of the rotation may overflow float32.
LARGEST_VALUE = 2.0**100


def encode_keys(
    keys: Float[np.ndarray, "*b d"], *, bits: int, guard: bool = False, search: bool = False
) -> PackedKeys:
    """Code keys as ``x = (code + zero) * scale``, a scale and a zero per group.

    A group with a non-finite element is lost, whole: its scale and zero say so
    (`count_nonfinite`).

    >>> packed = encode_keys(np.linspace(-1, 1, 32, dtype=np.float32), bits=8)
    >>> packed.codes[:3], float(packed.scales[0]), float(packed.zeros[0])
    (array([-127, -119, -111], dtype=int8), 0.00787353515625, 0.0)

    Args:
        keys: Any float dtype; narrowed or widened to float32 first.
        bits: Width of one code, one of `scheme.KEY_BITS`.
        guard: Whether groups that would decode to NaN or lose their value are re-coded.
        search: Whether each group takes the best of several grids, where `search` has some.
    """
    check_keys(bits, keys.shape[-1])
    with _ieee():
        groups = _groups(keys)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        affine = affine_of(low, high, bits)
        if search and bits == SEARCHED_KEY_BITS:
            affine = searched_keys(affine, groups, low, high)
        if guard:
            affine = guarded(affine, low, high, bits)
        steps = groups / affine.divisors[..., None] - affine.offsets[..., None]
        codes = _round_to(steps, *code_range(bits))
    codes = codes.reshape(keys.shape)
    if bits == 8:
        return PackedKeys(codes.astype(np.int8), affine.scales, affine.zeros)
    return PackedKeys(pack_bits(codes.astype(np.uint8), bits=bits), affine.scales, affine.zeros)


def decode_keys(
    packed: PackedKeys, *, bits: int, dtype: type[np.floating] = np.float32
) -> Float[np.ndarray, "*b d"]:
    """Inverse of `encode_keys`, up to the loss of quantisation.

    Args:
        packed: Keys as `encode_keys` made them, or any slice over leading axes.
        bits: The width they were made with.
        dtype: Of the result, see `narrow`.
    """
    return narrow(dequantize_keys(packed, bits=bits), dtype)


def dequantize_keys(packed: PackedKeys, *, bits: int) -> Float32[np.ndarray, "*b d"]:
    """Codes, scales and zeros to float32: ``(code + zero) * scale``."""
    check_keys(bits, packed.scales.shape[-1] * GROUP_SIZE)
    codes = packed.codes if bits == 8 else unpack_bits(packed.codes, bits=bits)
    with _ieee():
        zeros = packed.zeros.astype(np.float32)[..., None]
        scales = packed.scales.astype(np.float32)[..., None]
        keys: np.ndarray = (_groups(codes) + zeros) * scales
    return keys.reshape(codes.shape)


def encode_values(
    values: Float[np.ndarray, "*b d"], *, bits: int, guard: bool = False, search: bool = False
) -> PackedValues:
    """Code rotated values against a fixed codebook, one RMS scale per group.

    Args:
        values: Any float dtype; narrowed or widened to float32 first.
        bits: Width of one code, one of `scheme.VALUE_BITS`.
        guard: Whether a scale beyond float16 is stored as the largest float16.
        search: Whether each group takes the best of several scales, see `search.searched_values`.
    """
    check_values(bits, values.shape[-1])
    with _ieee():
        groups = _groups(rotate(values))
        total = reduce(np.add, np.moveaxis(groups * groups, -1, 0))  # left to right
        rms = np.sqrt(total / GROUP_SIZE)
        scales, divisors = rms.astype(np.float16), rms + np.float32(EPS)
        if guard:
            largest = np.abs(values.astype(np.float32)).max(axis=-1, keepdims=True)
            saturated = np.isinf(scales) & (largest <= LARGEST_VALUE)
            scales = np.where(saturated, np.float16(FLOAT16_MAX), scales)
            divisors = np.where(saturated, np.float32(FLOAT16_MAX), divisors)
        units = groups / divisors[..., None]
        if search:
            codes, scales = searched_values(units, divisors, scales, bits)
        else:
            codes = count_below(units, BOUNDARIES[bits])
    return PackedValues(pack_bits(codes.reshape(values.shape), bits=bits), scales)


def decode_values(
    packed: PackedValues, *, bits: int, head_dim: int, dtype: type[np.floating] = np.float32
) -> Float[np.ndarray, "*b d"]:
    """Inverse of `encode_values`, up to the loss of quantisation.

    Args:
        packed: Values as `encode_values` made them, or any slice over leading axes.
        bits: The width they were made with.
        head_dim: Elements of one value.
        dtype: Of the result, see `narrow`.
    """
    rotated = dequantize_values(packed, bits=bits, head_dim=head_dim)
    return narrow(unrotate(rotated), dtype)


def dequantize_values(
    packed: PackedValues, *, bits: int, head_dim: int
) -> Float32[np.ndarray, "*b {head_dim}"]:
    """Codes and scales to float32, still rotated: ``centroid * scale``.

    Attention is linear in the values, so its output can be un-rotated instead,
    once per query and not once per stored token.
    """
    check_values(bits, head_dim)
    codes = unpack_bits(packed.codes, bits=bits)
    with _ieee():
        scales = packed.scales.astype(np.float32)[..., None]
        rotated: np.ndarray = _groups(CENTROIDS[bits][codes]) * scales
    return rotated.reshape(codes.shape)


def rotate(values: Float[np.ndarray, "*b d"]) -> Float32[np.ndarray, "*b d"]:
    """Flip signs, then the orthonormal Walsh-Hadamard transform."""
    check_rotation(values.shape[-1])
    with _ieee():
        return _walsh_hadamard(values.astype(np.float32) * SIGNS[values.shape[-1]])


def unrotate(rotated: Float[np.ndarray, "*b d"]) -> Float32[np.ndarray, "*b d"]:
    """Inverse of `rotate`: the transform is its own inverse, then the signs."""
    check_rotation(rotated.shape[-1])
    with _ieee():
        values: np.ndarray = _walsh_hadamard(rotated.astype(np.float32)) * SIGNS[rotated.shape[-1]]
    return values


def pack_bits(
    codes: UInt8[np.ndarray, "*b d"], *, bits: int
) -> UInt8[np.ndarray, "*b d*{bits}//8"]:
    """Concatenate the low `bits` of each code into a little-endian bit stream.

    Code ``i`` occupies bits ``[i*bits, (i+1)*bits)``; a code may straddle two
    bytes (3 bits: 8 codes in 3 bytes).

    >>> pack_bits(np.array([1, 2, 3, 4, 5, 6, 7, 0], np.uint8), bits=3)
    array([209,  88,  31], dtype=uint8)

    Args:
        codes: Values in ``[0, 2**bits)``; ``d * bits`` is a multiple of 8.
        bits: Width of one code.
    """
    planes = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1  # (*b, d, bits)
    stream = planes.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    return np.packbits(stream, axis=-1, bitorder="little")


def unpack_bits(
    packed: UInt8[np.ndarray, "*b p"], *, bits: int
) -> UInt8[np.ndarray, "*b p*8//{bits}"]:
    """Inverse of `pack_bits`."""
    planes = np.unpackbits(packed, axis=-1, bitorder="little")
    planes = planes.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits, bits)
    weights = 1 << np.arange(bits, dtype=np.uint8)
    return planes @ weights


def narrow(x: Float32[np.ndarray, "*b"], dtype: type[np.floating]) -> Float[np.ndarray, "*b"]:
    """Cast decoded elements; float16 is clamped to its range, NaN stays NaN.

    A sane group can decode to 65532, which is inf in float16.
    """
    if np.dtype(dtype) == np.float16:
        x = np.clip(x, -FLOAT16_MAX, FLOAT16_MAX)
    return x.astype(dtype)


def count_nonfinite(packed: PackedKeys | PackedValues) -> int:
    """How many groups were lost to NaN or inf, read from the scales and zeros alone.

    With ``guard=True`` they are those that held NaN or inf, and values beyond 2**100.
    """
    lost = ~np.isfinite(packed.scales)
    if isinstance(packed, PackedKeys):
        lost = lost | ~np.isfinite(packed.zeros)
    return int(lost.sum())


def _round_to(x: Float32[np.ndarray, "*b"], low: int, high: int) -> Float32[np.ndarray, "*b"]:
    """Half to even, into the range; NaN, in a group that is lost anyway, to 0."""
    return np.where(np.isnan(x), 0, np.clip(np.rint(x), low, high))


def _groups(x: np.ndarray) -> Float32[np.ndarray, "*b g 32"]:
    n_groups = x.shape[-1] // GROUP_SIZE
    return x.astype(np.float32).reshape(*x.shape[:-1], n_groups, GROUP_SIZE)


def _walsh_hadamard(x: Float32[np.ndarray, "*b d"]) -> Float32[np.ndarray, "*b d"]:
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / np.sqrt(size))


def _ieee() -> np.errstate:
    """Overflow and NaN are part of the definition here, not a mistake to warn about."""
    return np.errstate(all="ignore")
