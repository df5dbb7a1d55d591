"""Launches the kernels for CUDA on MLX arrays, through `mx.fast.cuda_kernel`.

Counts and tables travel in one small array, which all layers of a step share (decision 17).
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
    Planned,
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
    signs,
    sink_arrays,
)
from kvstow.kernels.mlx_build import (
    append_callable,
    constants,
    decode_callable,
    encode_callable,
)
from kvstow.kernels.plan import Device, Shape, plan_attention
from kvstow.kernels.specialise import Dtype, EncodeKernel
from kvstow.scheme import Turbo

# Counters of arriving splits are used again after so many calls of a thread. MLX puts at most
# MLX_MAX_OPS_PER_BUFFER of them, 100 unless it is set, into one graph, and runs graphs of a
# stream one after the other.
N_SLOTS = 256


def attend(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    scheme: Turbo,
    scores: Scores,
    *,
    after: mx.array | None = None,
) -> mx.array:
    """See `backend.attend`."""
    call = planned(queries, planes, tokens, scheme, scores)
    return call(queries, planes, after=after, sinks=scores.sinks)


def planned(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    scheme: Turbo,
    scores: Scores,
    *,
    stores: int | None = None,
) -> Planned:
    """See `backend.planned`.

    Raises:
        ValueError: As there.
    """
    n_tokens = tokens.longest if isinstance(tokens, Rows) else tokens
    if stores is not None and (
        queries.shape[2] != 1 or scheme.search or not 0 <= stores < n_tokens
    ):
        raise ValueError(
            "one of the tokens of each row is stored for one query token and without a search, "
            f"got token {stores} of {n_tokens}, {queries.shape[2]} and {scheme}"
        )
    sizes = queries.shape, planes[0].codes.shape[1:3], n_tokens
    ragged, with_sinks = isinstance(tokens, Rows), scores.sinks is not None
    options = ragged, stores, with_sinks, scores.window, scores.scale
    made = _prepare(sizes, scheme.widths, dtype_of(queries), options)
    return _Call(made, queries.dtype, row_arrays(tokens))


class _Call:
    """See `calls.Planned`."""

    __slots__ = ("_constants", "_counters", "_kernel", "_options", "_rows")

    def __init__(self, made: "_Prepared", dtype: mx.Dtype, rows: list[mx.array]) -> None:
        self._kernel, self._constants, self._rows = made.kernel, made.constants, rows
        self._options = {**made.launch, "output_dtypes": [dtype, mx.float32]}
        self._counters = _counters(made.n_blocks)

    def __call__(
        self,
        queries: mx.array,
        planes: tuple[PackedKeys, PackedValues],
        exact: tuple[mx.array, ...] = (),
        after: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        after = _nothing() if after is None else after
        of_call = queries, self._constants, next(self._counters), after
        inputs = [*planes[0], *planes[1], *of_call, *self._rows, *sink_arrays(sinks), *exact]
        return self._kernel(inputs=inputs, **self._options)[0]  # type: ignore[no-any-return]


def encode(keys: mx.array, values: mx.array, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """See `backend.encode`."""
    check_alike(keys, values)
    shapes, dtypes = encoded_planes(keys, scheme)
    if not keys.size:
        planes = list(map(mx.zeros, shapes, dtypes))
    else:
        b, h, n, _ = keys.shape
        made = _prepare_encoding(keys.shape, scheme, dtype_of(keys))
        planes = encode_callable(made.kernel)(
            inputs=[keys, values, *made.tables, _counts(h, n, b * h * n)],
            output_shapes=shapes,
            output_dtypes=dtypes,
            **made.launch,
        )
    return PackedKeys(*planes[:3]), PackedValues(*planes[3:])


def append(
    planes: tuple[mx.array, ...],
    position: int,
    exact: tuple[mx.array, mx.array],
    scheme: Turbo,
    *,
    after: mx.array | None = None,
) -> mx.array:
    """See `backend.append`.

    Raises:
        ValueError: If keys and values differ in shape or dtype, or do not fit.
    """
    keys, values = exact
    check_alike(keys, values)
    shape = keys.shape
    b, h, n, _ = shape
    capacity = planes[0].shape[2]
    if not 0 <= position <= position + n <= capacity:
        raise ValueError(f"{n} tokens do not fit at {position} in a capacity of {capacity}")
    made = _prepare_encoding(shape, scheme, dtype_of(keys))
    done: mx.array = append_callable(made.kernel)(
        inputs=[
            keys,
            values,
            *made.tables,
            _counts(h, n, b * h * n, capacity, position),
            *planes,
            _nothing() if after is None else after,
        ],
        output_shapes=_ONE,
        output_dtypes=_WHOLE,
        **made.launch,
    )[0]
    return done


_ONE, _WHOLE = [(1,)], [mx.int32]


@dataclass(frozen=True, slots=True)
class _PreparedEncoding:
    kernel: EncodeKernel
    launch: dict[str, Any]  # MLX's options; on the GPU whatever the default device is by then
    tables: tuple[mx.array, ...]  # signs and boundaries, and for a search its tables


@lru_cache(maxsize=256)
def _prepare_encoding(shape: tuple[int, ...], scheme: Turbo, dtype: Dtype) -> _PreparedEncoding:
    b, h, n, d = shape
    kernel = EncodeKernel(d, *scheme.widths, dtype, search=scheme.search)
    grid = kernel.n_blocks(b * h * n) * kernel.threads, 1, 1
    return _PreparedEncoding(
        kernel,
        launch={"grid": grid, "threadgroup": (kernel.threads, 1, 1), "stream": mx.gpu},
        tables=_encoding_tables(d, scheme.value_bits, scheme.search),
    )


@cache
def device() -> Device:
    """The GPU that MLX uses."""
    info = mx.device_info()
    major, minor = (int(info[f"compute_capability_{part}"]) for part in ("major", "minor"))
    return Device.of(10 * major + minor)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What all layers of a step share."""

    kernel: Any
    launch: dict[str, Any]  # MLX's options: grid, blocks, and shapes of what is made
    constants: mx.array
    n_blocks: int  # that wait for each other's splits


# Few, since every step has counts of its own: the memory of those that go is used again.
@lru_cache(maxsize=32)
def _prepare(
    sizes: tuple[tuple[int, ...], tuple[int, int], int],
    widths: tuple[int, int],
    dtype: Dtype,
    options: tuple[bool, int | None, bool, int, float],
) -> _Prepared:
    """How a call is launched.

    Args:
        sizes: Shape of the queries; KV heads and capacity; tokens of the longest row.
        widths: Of a key code and a value code.
        dtype: Of the queries.
        options: Whether rows differ, which token is stored, whether there are sinks; the
            window and the scale.

    Raises:
        ValueError: If the capacity is not a multiple of 8, or there are more tokens than it.
    """
    (b, hq, n_queries, d), (h, capacity), n_tokens = sizes
    ragged, stores, with_sinks, window, scale = options
    check_tokens(n_tokens, capacity)
    shape = Shape(b, hq, h, n_queries, d, n_tokens, ragged=ragged, stores=stores is not None)
    plan = plan_attention(shape, widths, dtype, device())
    n_rows = b * hq * n_queries if plan.writes_parts else 1
    counts = decode_counts(
        shape, plan, capacity=capacity, window=window, scale=scale, stored=stores
    )
    return _Prepared(
        kernel=decode_callable(plan.kernel, ragged, with_sinks),
        launch={
            "grid": (plan.grid[0] * plan.kernel.threads, *plan.grid[1:]),
            "threadgroup": (plan.kernel.threads, 1, 1),
            "output_shapes": [(b, hq, n_queries, d), (n_rows, plan.n_splits, d + 2)],
        },
        constants=constants(d, widths[1], counts),
        n_blocks=b * h * plan.row_blocks,
    )


class _Slots(threading.local):
    """Counters of each thread, by number of blocks."""

    def __init__(self) -> None:
        self.by_size: dict[int, Iterator[mx.array]] = {}


_slots = _Slots()


def _counters(n_blocks: int) -> Iterator[mx.array]:
    """Arrays of `n_blocks` zeros, each of which no call in flight uses; for this thread."""
    if n_blocks not in _slots.by_size:
        zeros = mx.zeros((N_SLOTS, n_blocks), mx.int32)
        slots = [zeros[i] for i in range(N_SLOTS)]
        mx.eval(slots)
        _slots.by_size[n_blocks] = cycle(slots)
    return _slots.by_size[n_blocks]


@lru_cache(maxsize=32)  # few, as above
def _counts(*counts: int) -> mx.array:
    return mx.array(np.array(counts, np.int32))


@cache
def _nothing() -> mx.array:
    """Stands for an array that there is nothing to wait for."""
    return mx.array(np.zeros(1, np.int32))


@cache
def _encoding_tables(head_dim: int, bits: int, search: bool) -> tuple[mx.array, ...]:
    tables = signs(head_dim), boundaries(bits)
    if not search:
        return tables
    errors = key_candidates().words, value_candidates(bits).words
    return (*tables, centroids(bits), *map(mx.array, errors))
