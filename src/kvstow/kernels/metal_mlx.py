"""Launches the kernels for Metal on MLX arrays, through `mx.fast.metal_kernel`.

MLX writes a kernel's signature from the arrays it is given. An array of fewer than 8 elements lies
in the address space `constant` there and others in `device`, so the body reads small ones itself
or hands them to functions that take either. MLX compiles with safe math; the source of the encoder
also forbids fused products and sums.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.codec.search import key_candidates, value_candidates
from kvstow.kernels.arguments import DECODE_COUNTS
from kvstow.kernels.calls import (
    Rows,
    Scores,
    boundaries,
    centroids,
    check_alike,
    check_tokens,
    decode_counts,
    dtype_of,
    encoded_planes,
    row_arrays,
    shape_of,
    signs,
    sink_arrays,
)
from kvstow.kernels.metal_plan import (
    SIMDGROUP,
    MetalDecodeKernel,
    MetalDevice,
    MetalEncodeKernel,
    MetalPlan,
    plan_metal,
)
from kvstow.kernels.plan import Shape
from kvstow.kernels.source import metal_header
from kvstow.kernels.specialise import Dtype
from kvstow.scheme import Turbo

_PLANES = ("key_codes", "key_scales", "key_zeros", "value_codes", "value_scales")
_AT = "threadgroup_position_in_grid"
_LANE = "thread_index_in_simdgroup"


def attend(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    scheme: Turbo,
    scores: Scores,
) -> mx.array:
    """See `backend.attend`."""
    shape, capacity = shape_of(queries, planes, tokens)
    widths = scheme.widths
    made = _prepare(shape, widths, dtype_of(queries), (capacity, scores.window, scores.scale))
    plan = made.plan
    n_rows, d = queries.size // shape.head_dim, shape.head_dim
    tables = [centroids(scheme.value_bits), made.counts]
    sums, weights = decode_callable(plan.kernel, shape.ragged)(
        inputs=[*planes[0], *planes[1], queries, *tables, *row_arrays(tokens)],
        grid=(plan.grid[0] * plan.kernel.threads, *plan.grid[1:]),
        threadgroup=(plan.kernel.threads, 1, 1),
        output_shapes=[(n_rows, plan.n_splits, d), (n_rows, plan.n_splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    sinks = sink_arrays(scores.sinks)
    output: mx.array = merge_callable(d, plan.kernel.dtype, bool(sinks))(
        inputs=[sums, weights, signs(d), made.counts, *sinks],
        grid=(n_rows * SIMDGROUP, 1, 1),
        threadgroup=(SIMDGROUP, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
    return output


def encode(keys: mx.array, values: mx.array, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """See `backend.encode`."""
    check_alike(keys, values)
    b, h, n, d = keys.shape
    widths = scheme.widths
    kernel = MetalDevice().encode_kernel(widths, d, dtype_of(keys), search=scheme.search)
    shapes, dtypes = encoded_planes(keys, scheme)
    if not keys.size:
        planes = list(map(mx.zeros, shapes, dtypes))
    else:
        tables = _search_tables(scheme.value_bits) if scheme.search else ()
        n_threadgroups = -(-b * h * n * kernel.groups // kernel.threads)
        planes = encode_callable(kernel)(
            inputs=[keys, values, signs(d), boundaries(scheme.value_bits), *tables],
            grid=(n_threadgroups * kernel.threads, 2, 1),
            threadgroup=(kernel.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
    return PackedKeys(*planes[:3]), PackedValues(*planes[3:])


@cache
def device() -> MetalDevice:
    """The GPU that MLX uses."""
    return MetalDevice()


@cache
def decode_callable(kernel: MetalDecodeKernel, ragged: bool) -> Any:
    """Takes planes, queries, centroids, counts, then the rows; gives sums and weights.

    Counts are those of `DECODE_COUNTS` and the factor's bits; no kernel here stores tokens.
    """
    rows = ["starts", "lengths"] if ragged else []
    codes = ("key_codes", "value_codes")
    lines = [
        f"threadgroup float shared[{kernel.shared_floats}];",
        "kvstow::DecodeArgs args;",
        *(f"args.{x} = counts[{i}];" for i, x in enumerate(DECODE_COUNTS) if x != "stored"),
        f"args.scale_log2 = as_type<float>(counts[{len(DECODE_COUNTS)}]);",
        *(f"args.{name} = (const device uchar*){name};" for name in codes),
        *(f"args.{name} = {name};" for name in _PLANES if name not in codes),
        f"args.start = starts[{_AT}.z];" if ragged else "args.start = 0;",
    ]
    if ragged:  # a row that claims more than the caller was told of is cut, not read beyond planes
        lines.append(f"args.length = metal::min(lengths[{_AT}.z], args.length);")
    given = "queries, centroids, sums, weights, shared"
    at = f"{_AT}, simdgroup_index_in_threadgroup, {_LANE}"
    lines.append(f"kvstow::decode_split<{kernel.shape}>(args, {given}, {at});")
    return mx.fast.metal_kernel(
        name=kernel.name + ("_ragged" if ragged else ""),
        input_names=[*_PLANES, "queries", "centroids", "counts", *rows],
        output_names=["sums", "weights"],
        header=metal_header(kernel.file_name),
        source="\n".join(lines),
    )


@cache
def merge_callable(head_dim: int, dtype: Dtype, with_sinks: bool) -> Any:
    """Takes sums, weights, signs and counts of `decode_callable`, then sinks; gives the output."""
    count = {name: f"counts[{i}]" for i, name in enumerate(DECODE_COUNTS)}
    n_heads = f"({count['n_kv_heads']} * {count['group']})"
    sink = f"sinks[{_AT}.x / {count['n_queries']} % {n_heads}]" if with_sinks else "-INFINITY"
    given = f"sums, weights, {count['n_splits']}, {sink}, signs, output"
    return mx.fast.metal_kernel(
        name=f"kvstow_metal_merge_d{head_dim}_{dtype}" + ("_sinks" if with_sinks else ""),
        input_names=["sums", "weights", "signs", "counts", *(["sinks"] if with_sinks else [])],
        output_names=["output"],
        header=metal_header("merge_splits.metal"),
        source=f"kvstow::merge_splits<{head_dim}>({given}, {_AT}.x, {_LANE});",
    )


@cache
def encode_callable(kernel: MetalEncodeKernel) -> Any:
    """Takes keys, values, signs, boundaries, for a search its tables; gives planes.

    The tables are centroids, errors of keys and errors of values.
    """
    tables = ["centroids", "key_errors", "value_errors"] if kernel.search else []
    none = ("(const device float*)0", "(const device uint*)0", "(const device uint*)0")
    centroids, key_errors, value_errors = tables or none
    d, key_bits, value_bits = kernel.head_dim, kernel.key_bits, kernel.value_bits
    options = f"{value_bits}, {str(kernel.search).lower()}"
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=["keys", "values", "signs", "boundaries", *tables],
        output_names=list(_PLANES),
        header=metal_header(kernel.file_name),
        source=f"""
threadgroup float edges[{kernel.shared_floats}];
const ulong n_vectors = ulong(keys_shape[0]) * keys_shape[1] * keys_shape[2];
const kvstow::Place<{d}> place({_AT}.x, thread_index_in_threadgroup, n_vectors);
if ({_AT}.y == 0) {{
  kvstow::encode_key_group<{key_bits}, {str(kernel.search).lower()}>(
      keys + place.group * 32, {key_errors}, place.is_mine,
      (device uint*)key_codes + place.group * {key_bits},
      key_scales + place.group, key_zeros + place.group);
}} else {{
  kvstow::fill_edges<{value_bits}>(boundaries, edges, thread_index_in_threadgroup);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  kvstow::encode_value_group<{d}, {options}>(
      values + place.group * 32, signs + place.of_vector * 32, edges, {centroids}, {value_errors},
      place.is_mine, {_LANE}, (device uint*)value_codes + place.group * {value_bits},
      value_scales + place.group);
}}""",
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What all layers of a step share."""

    plan: MetalPlan
    counts: mx.array


@lru_cache(maxsize=256)
def _prepare(
    shape: Shape, widths: tuple[int, int], dtype: Dtype, options: tuple[int, int, float]
) -> _Prepared:
    """`options` are the capacity, the window and the scale.

    Raises:
        ValueError: If the capacity is not a multiple of 8, or there are more tokens than it.
    """
    capacity, window, scale = options
    check_tokens(shape.n_tokens, capacity)
    plan = plan_metal(shape, widths, dtype, window)
    numbers = decode_counts(shape, plan, capacity=capacity, window=window, scale=scale)
    counts = mx.array(np.array(numbers, np.int32))
    return _Prepared(plan, counts)


@cache
def _search_tables(bits: int) -> tuple[mx.array, ...]:
    """The centroids, and errors as two halves of each word, the lower one first."""
    errors = key_candidates().words, value_candidates(bits).words
    return centroids(bits), *(mx.array(words.astype("<u8").view("<u4")) for words in errors)
