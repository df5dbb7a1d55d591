"""Launches the kernels for CUDA on MLX arrays, through `mx.fast.cuda_kernel`.

Lengths and counts travel in one small array, which all layers of a step share: what a call
costs on the host matters more at short contexts than what the kernel does.
"""

import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.codec.search import key_candidates, value_candidates
from kvstow.kernels.calls import (
    Rows,
    Scores,
    boundaries,
    centroids,
    check_alike,
    check_tokens,
    dtype_of,
    signs,
)
from kvstow.kernels.mlx_build import decode_callable, encode_callable
from kvstow.kernels.plan import DecodePlan, Device, Shape, plan_decode
from kvstow.kernels.specialise import Dtype, EncodeKernel
from kvstow.scheme import GROUP_SIZE, Turbo

# Arrivals are used again after so many calls of a thread. MLX puts at most
# MLX_MAX_OPS_PER_BUFFER of them, 100 unless it is set, into one graph, and runs graphs of a
# stream one after the other.
N_SLOTS = 256


def attend(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    scheme: Turbo,
    scores: Scores,
) -> mx.array:
    """See `backend.attend`."""
    b, hq, n_queries, d = queries.shape
    keys, values = planes
    h, capacity = keys.codes.shape[1:3]
    rows = [tokens.starts, tokens.lengths] if isinstance(tokens, Rows) else []
    rows = [array.astype(mx.int32) for array in rows]
    sinks = [] if scores.sinks is None else [scores.sinks.astype(mx.float32)]
    n_tokens = tokens.longest if isinstance(tokens, Rows) else tokens
    shape = Shape(b, hq, h, n_queries, d, n_tokens, ragged=bool(rows))
    widths = scheme.key_bits, scheme.value_bits
    options = capacity, scores.window, scores.scale, bool(sinks)
    made = _prepare(shape, widths, dtype_of(queries), options)
    plan = made.plan
    n_rows = b * hq * n_queries
    output: mx.array = made.kernel(
        inputs=[
            *keys,
            *values,
            queries,
            centroids(scheme.value_bits),
            signs(d),
            _arrivals(b * h * plan.row_blocks),
            made.counts,
            *rows,
            *sinks,
        ],
        grid=(plan.grid[0] * plan.kernel.threads, *plan.grid[1:]),
        threadgroup=(plan.kernel.threads, 1, 1),
        output_shapes=[queries.shape, (n_rows, plan.n_splits, d), (n_rows, plan.n_splits, 2)],
        output_dtypes=[queries.dtype, mx.float32, mx.float32],
    )[0]
    return output


def encode(keys: mx.array, values: mx.array, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """See `backend.encode`."""
    check_alike(keys, values)
    b, h, n, d = keys.shape
    widths = scheme.key_bits, scheme.value_bits
    kernel = EncodeKernel(d, *widths, dtype_of(keys), search=scheme.search)
    groups = d // GROUP_SIZE
    row_bytes = d * scheme.key_bits // 8, groups, groups, d * scheme.value_bits // 8, groups
    shapes = [(b, h, n, width) for width in row_bytes]
    key_dtype = mx.int8 if scheme.key_bits == 8 else mx.uint8
    dtypes = [key_dtype, mx.float16, mx.float16, mx.uint8, mx.float16]
    if not keys.size:
        planes = list(map(mx.zeros, shapes, dtypes))
    else:
        tables = _search_tables(scheme.value_bits) if scheme.search else ()
        counts = _encode_counts(h, n, b * h * n)
        planes = encode_callable(kernel)(
            inputs=[keys, values, signs(d), boundaries(scheme.value_bits), *tables, counts],
            grid=(-(-b * h * n // kernel.vectors) * kernel.threads, 2, 1),
            threadgroup=(kernel.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
    return PackedKeys(*planes[:3]), PackedValues(*planes[3:])


@cache
def device() -> Device:
    """The GPU that MLX uses."""
    info = mx.device_info()
    major, minor = (int(info[f"compute_capability_{part}"]) for part in ("major", "minor"))
    return Device.of(10 * major + minor)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What all layers of a step share."""

    plan: DecodePlan
    kernel: Any
    counts: mx.array


@lru_cache(maxsize=256)
def _prepare(
    shape: Shape, widths: tuple[int, int], dtype: Dtype, options: tuple[int, int, float, bool]
) -> _Prepared:
    """`options` are the capacity, the window, the scale, and whether there are sinks.

    Raises:
        ValueError: If the capacity is not a multiple of 8, or there are more tokens than it.
    """
    capacity, window, scale, with_sinks = options
    check_tokens(shape.n_tokens, capacity)
    plan = plan_decode(shape, widths, dtype, device())
    sizes = shape.n_kv_heads, plan.group, shape.n_queries, capacity, shape.n_tokens
    counts = *sizes, plan.row_blocks, plan.n_splits, plan.chunk, window
    factor = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))[0]
    array = mx.array(np.array([*counts, factor], np.int32))
    return _Prepared(plan, decode_callable(plan.kernel, shape.ragged, with_sinks), array)


class _Slots(threading.local):
    """Arrivals of each thread, by number of blocks."""

    def __init__(self) -> None:
        self.by_size: dict[int, Iterator[mx.array]] = {}


_slots = _Slots()


def _arrivals(n_blocks: int) -> mx.array:
    """`n_blocks` zeros that no call in flight uses."""
    if n_blocks not in _slots.by_size:
        zeros = mx.zeros((N_SLOTS, n_blocks), mx.int32)
        slots = [zeros[i] for i in range(N_SLOTS)]
        mx.eval(slots)
        _slots.by_size[n_blocks] = cycle(slots)
    return next(_slots.by_size[n_blocks])


@lru_cache(maxsize=256)
def _encode_counts(*counts: int) -> mx.array:
    return mx.array(np.array(counts, np.int32))


@cache
def _search_tables(bits: int) -> tuple[mx.array, ...]:
    errors = key_candidates().words, value_candidates(bits).words
    return centroids(bits), *map(mx.array, errors)
