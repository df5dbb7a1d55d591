"""Launches the kernels on MLX arrays, through `mx.fast.cuda_kernel`.

A kernel is made at its first use, since MLX refuses to without a CUDA back-end, and kept.
MLX writes the kernel's signature from the arrays it is given, so the body only gathers them
into the arguments of the device source. Lengths and counts travel in one small array.
"""

import math
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstow.codec import tables
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.kernels.plan import DecodePlan, Device, Shape, plan_decode
from kvstow.kernels.source import cuda_header
from kvstow.kernels.specialise import DTYPES, DecodeKernel, Dtype, EncodeKernel, Kernel
from kvstow.scheme import GROUP_SIZE, Turbo

_PLANES = ("key_codes", "key_scales", "key_zeros", "value_codes", "value_scales")
_DECODE_COUNTS = (
    "n_kv_heads",
    "group",
    "n_queries",
    "capacity",
    "length",
    "row_blocks",
    "n_splits",
    "chunk",
    "window",
)
_ENCODE_COUNTS = ("n_kv_heads", "n_tokens", "n_vectors")
# A slot of arrivals is used again after so many calls of a thread. MLX runs at most
# MLX_MAX_OPS_PER_BUFFER of them at once, which is at most 100 unless it is set.
N_SLOTS = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row of a batch begins and ends: int32 arrays ``(b,)``.

    Attributes:
        starts: The first token; those before it are padding.
        lengths: Tokens from 0 on, the padding and those of this step included.
        longest: No row is longer.
    """

    starts: mx.array
    lengths: mx.array
    longest: int


def attend(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    *,
    scheme: Turbo,
    scale: float,
    window: int = 0,
) -> mx.array:
    """Causal attention of the last tokens over packed planes; see `attention.reference`.

    A query that sees no token gives zeros. Nothing outside a row is read.

    Args:
        queries: ``(b, hq, l, d)`` of any float dtype, the last `l` tokens of each row.
        planes: Whole planes ``(b, h, capacity, *)``; the capacity is a multiple of 8.
        tokens: How many of them are data, or the rows of a ragged batch.
        scheme: Widths that the planes were encoded with.
        scale: Factor of the scores, usually ``d ** -0.5``.
        window: Tokens that a query sees, itself included; 0: all.

    Returns:
        ``(b, hq, l, d)`` in the dtype of the queries.

    Raises:
        ValueError: If the heads do not divide, or the capacity is not a multiple of 8.
    """
    b, hq, n_queries, d = queries.shape
    keys, values = planes
    h, capacity = keys.codes.shape[1:3]
    if capacity % 8:
        raise ValueError(f"the capacity must be a multiple of 8, got {capacity}")
    ragged = isinstance(tokens, Rows)
    n_tokens = tokens.longest if isinstance(tokens, Rows) else tokens
    shape = Shape(b, hq, h, n_queries, d, n_tokens, ragged)
    widths = scheme.key_bits, scheme.value_bits
    plan = plan_decode(shape, widths, _dtype(queries), device())
    slot, arrivals = _arrivals(b * h * plan.row_blocks)
    counts = _decode_counts(plan, shape, capacity, window)
    factor = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))[0]
    inputs = [*keys, *values, queries, _centroids(scheme.value_bits), _signs(d), arrivals]
    inputs.append(mx.array([*counts, factor, slot], dtype=mx.int32))
    if isinstance(tokens, Rows):
        inputs += [tokens.starts, tokens.lengths]
    splits = (b * hq * n_queries, plan.n_splits)
    x, y, z = plan.grid
    output: mx.array = _decode(plan.kernel, ragged)(
        inputs=inputs,
        grid=(x * plan.kernel.threads, y, z),
        threadgroup=(plan.kernel.threads, 1, 1),
        output_shapes=[queries.shape, (*splits, d), (*splits, 2)],
        output_dtypes=[queries.dtype, mx.float32, mx.float32],
    )[0]
    return output


def encode(keys: mx.array, values: mx.array, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """Guarded keys and values in one launch; bit for bit `codec.reference`, ``guard=True``.

    Args:
        keys: ``(b, h, n, d)`` of any float dtype.
        values: The same shape and dtype.
        scheme: Widths to encode with; its options are not looked at.

    Raises:
        ValueError: If the two differ in shape or dtype.
    """
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(
            f"keys and values must be alike, got {keys.shape} {keys.dtype} "
            f"and {values.shape} {values.dtype}"
        )
    b, h, n, d = keys.shape
    kernel = EncodeKernel(d, scheme.key_bits, scheme.value_bits, _dtype(keys))
    groups = d // GROUP_SIZE
    key_dtype = mx.int8 if scheme.key_bits == 8 else mx.uint8
    key_bytes, value_bytes = d * scheme.key_bits // 8, d * scheme.value_bits // 8
    widths = (key_bytes, groups, groups, value_bytes, groups)
    counts = mx.array([h, n, b * h * n], dtype=mx.int32)
    made = _encode(kernel)(
        inputs=[keys, values, _signs(d), _boundaries(scheme.value_bits), counts],
        grid=(-(-b * h * n // kernel.vectors) * kernel.threads, 2, 1),
        threadgroup=(kernel.threads, 1, 1),
        output_shapes=[(b, h, n, width) for width in widths],
        output_dtypes=[key_dtype, mx.float16, mx.float16, mx.uint8, mx.float16],
    )
    return PackedKeys(*made[:3]), PackedValues(*made[3:])


@cache
def device() -> Device:
    """The GPU that MLX uses."""
    info = mx.device_info()
    major, minor = (int(info[f"compute_capability_{part}"]) for part in ("major", "minor"))
    return Device.of(10 * major + minor)


def _decode_counts(plan: DecodePlan, shape: Shape, capacity: int, window: int) -> Sequence[int]:
    """In the order of `_DECODE_COUNTS`."""
    sizes = shape.n_kv_heads, plan.group, shape.n_queries, capacity, shape.n_tokens
    return (*sizes, plan.row_blocks, plan.n_splits, plan.chunk, window)


@cache
def _decode(kernel: DecodeKernel, ragged: bool) -> Any:
    names = [*_PLANES, "queries", "centroids", "signs", "arrivals", "counts"]
    rows = ["starts", "lengths"] if ragged else []
    n = len(_DECODE_COUNTS)
    gathered = [
        *_counts(_DECODE_COUNTS),
        f"args.scale_log2 = __int_as_float(counts[{n}]);",
        "args.output = output; args.sums = sums; args.weights = weights;",
        "args.starts = " + ("starts;" if ragged else "nullptr;"),
        "args.lengths = " + ("lengths;" if ragged else "nullptr;"),
        f"args.arrivals = (int*)arrivals + counts[{n + 1}] * (gridDim.y * gridDim.z);",
        *_pointers([*_PLANES, "queries", "centroids", "signs"]),
    ]
    name = kernel.name + ("_ragged" if ragged else "")
    return _made(kernel, name, [*names, *rows], ["output", "sums", "weights"], gathered)


@cache
def _encode(kernel: EncodeKernel) -> Any:
    names = ["keys", "values", "signs", "boundaries", "counts"]
    gathered = [
        *_counts(_ENCODE_COUNTS),
        "args.capacity = args.n_tokens; args.position = 0;",
        f"args.token_step = {kernel.head_dim};",
        "args.head_step = args.token_step * args.n_tokens;",
        "args.batch_step = args.head_step * args.n_kv_heads;",
        *_pointers([*names[:-1], *_PLANES]),
    ]
    return _made(kernel, kernel.name, names, list(_PLANES), gathered)


def _made(
    kernel: Kernel, name: str, inputs: list[str], outputs: list[str], gathered: list[str]
) -> Any:
    """MLX's callable of a kernel whose body is `gathered` and then the kernel's work."""
    # MLX's signature has no launch bounds, without which registers may not suffice for a
    # block: the kernel's name is a macro that adds them.
    function = f"custom_kernel_{name}"
    bounds = f"#define {function} __launch_bounds__({kernel.threads}, 1) {function}\n"
    args = "DecodeArgs" if isinstance(kernel, DecodeKernel) else "EncodeArgs"
    lines = [
        f"\n#undef {function}",
        "extern __shared__ __align__(128) char kvstow_shared[];",
        f"kvstow::{args} args;",
        *gathered,
        kernel.call("args", "kvstow_shared") + ";\n",
    ]
    return mx.fast.cuda_kernel(
        name=name,
        input_names=inputs,
        output_names=outputs,
        header=cuda_header(kernel.file_name) + kernel.checks + "\n" + bounds,
        source="\n".join(lines),
        shared_memory=kernel.shared_bytes,
    )


def _counts(names: Sequence[str]) -> list[str]:
    return [f"args.{name} = counts[{i}];" for i, name in enumerate(names)]


def _pointers(names: Sequence[str]) -> list[str]:
    """Arrays keep MLX's own element types, which the device source does not know."""
    return [f"args.{name} = (decltype(args.{name})){name};" for name in names]


def _dtype(array: mx.array) -> Dtype:
    name = str(array.dtype).removeprefix("mlx.core.")
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ValueError(f"dtype must be one of {DTYPES}, got {name}")


_ring = threading.local()


def _arrivals(n_blocks: int) -> tuple[int, mx.array]:
    """A slot of `n_blocks` zeros that no call in flight uses, and the array it is in."""
    rings = _ring.__dict__.setdefault("rings", {})
    if n_blocks not in rings:
        rings[n_blocks] = mx.array(np.zeros((N_SLOTS, n_blocks), np.int32))
    _ring.slot = (getattr(_ring, "slot", -1) + 1) % N_SLOTS
    return _ring.slot, rings[n_blocks]


# Constants are made from numpy: they hold data, not a graph bound to one thread's stream.
@cache
def _signs(head_dim: int) -> mx.array:
    return mx.array(tables.SIGNS[head_dim].astype(np.int8))


@cache
def _centroids(bits: int) -> mx.array:
    return mx.array(tables.CENTROIDS[bits])


@cache
def _boundaries(bits: int) -> mx.array:
    return mx.array(tables.BOUNDARIES[bits])
