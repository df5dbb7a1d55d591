"""Launches the kernels for CUDA on MLX arrays, through `mx.fast.cuda_kernel`.

Lengths and counts travel in one small array, which all layers of a step share: what a call
costs on the host matters more at short contexts than what the kernel does.
"""

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
    decode_counts,
    dtype_of,
    encoded_planes,
    row_arrays,
    shape_of,
    signs,
    sink_arrays,
)
from kvstow.kernels.mlx_build import decode_callable, encode_callable
from kvstow.kernels.plan import AttentionPlan, Device, Shape, plan_attention
from kvstow.kernels.specialise import Dtype, EncodeKernel
from kvstow.scheme import Turbo

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
    shape, capacity = shape_of(queries, planes, tokens)
    sinks = sink_arrays(scores)
    widths = scheme.key_bits, scheme.value_bits
    options = capacity, scores.window, scores.scale, bool(sinks)
    made = _prepare(shape, widths, dtype_of(queries), options)
    plan = made.plan
    d = shape.head_dim
    n_rows = queries.size // d if plan.writes_parts else 1
    output: mx.array = made.kernel(
        inputs=[
            *planes[0],
            *planes[1],
            queries,
            centroids(scheme.value_bits),
            signs(d),
            _arrivals(shape.batch * shape.n_kv_heads * plan.row_blocks),
            made.counts,
            *row_arrays(tokens),
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
    shapes, dtypes = encoded_planes(keys, scheme)
    if not keys.size:
        planes = list(map(mx.zeros, shapes, dtypes))
    else:
        tables = _search_tables(scheme.value_bits) if scheme.search else ()
        counts = _encode_counts(h, n, b * h * n)
        planes = encode_callable(kernel)(
            inputs=[keys, values, signs(d), boundaries(scheme.value_bits), *tables, counts],
            grid=(kernel.n_blocks(b * h * n) * kernel.threads, 1, 1),
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

    plan: AttentionPlan
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
    plan = plan_attention(shape, widths, dtype, device())
    counts = decode_counts(shape, plan, capacity=capacity, window=window, scale=scale)
    return _Prepared(plan, decode_callable(plan.kernel, shape.ragged, with_sinks), counts)


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
