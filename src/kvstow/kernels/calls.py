"""What calls of kernels through MLX have in common, whatever GPU they run on."""

import math
import struct
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.kernels.plan import Plan, Shape
from kvstow.kernels.specialise import DTYPES, Dtype
from kvstow.scheme import GROUP_SIZE, Turbo

# What a step costs on the host is what a token costs, with short contexts: values that many
# layers and steps share are looked up, since making a frozen dataclass takes microseconds.
NAMES: dict[mx.Dtype, Dtype] = {getattr(mx, name): name for name in DTYPES}


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights.

    Attributes:
        scale: Factor of the scores, usually ``d ** -0.5``.
        window: Tokens that a query sees, itself included; 0: all.
        sinks: A score for each query head of a token without a value, ``(hq,)``.
    """

    scale: float
    window: int = 0
    sinks: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row of a batch begins and ends: arrays of whole numbers ``(b,)``.

    Attributes:
        starts: The first token; those before it are padding.
        lengths: Tokens from 0 on, the padding and those of this step included.
        longest: No row is longer.
    """

    starts: mx.array
    lengths: mx.array
    longest: int


class Planned(Protocol):
    """Attention as it was planned for a call, for any other of the same sizes."""

    def __call__(
        self,
        queries: mx.array,
        planes: tuple[PackedKeys, PackedValues],
        exact: tuple[mx.array, ...] = (),
        after: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """The output; once it is there, so is what is stored.

        Args:
            queries: ``(b, hq, l, d)``.
            planes: Whole planes ``(b, h, capacity, *)``.
            exact: Keys and values ``(b, h, 1, d)`` of the new token of each row, of the dtype of
                the queries, where it is to be stored.
            after: What the last call on these planes returned, where it is to come before.
            sinks: As `Scores.sinks`, where it was planned for some.
        """


def shape_of(
    queries: mx.array, planes: tuple[PackedKeys, PackedValues], tokens: int | Rows
) -> tuple[Shape, int]:
    """The sizes of a call of attention, and the capacity of its planes."""
    b, hq, n_queries, d = queries.shape
    h, capacity = planes[0].codes.shape[1:3]
    ragged = isinstance(tokens, Rows)
    n_tokens = tokens.longest if isinstance(tokens, Rows) else tokens
    return Shape(b, hq, h, n_queries, d, n_tokens, ragged=ragged), capacity


def row_arrays(tokens: int | Rows) -> list[mx.array]:
    """Starts and lengths as kernels take them, where there are some."""
    rows = [tokens.starts, tokens.lengths] if isinstance(tokens, Rows) else []
    return [array.astype(mx.int32) for array in rows]


def sink_arrays(sinks: mx.array | None) -> list[mx.array]:
    """Sinks as kernels take them, where there are some."""
    return [] if sinks is None else [sinks.astype(mx.float32)]


def check_tokens(n_tokens: int, capacity: int) -> None:
    """Refuse planes that the kernels cannot follow.

    Raises:
        ValueError: If the capacity is not a multiple of 8, or there are more tokens than it.
    """
    if capacity % 8:
        raise ValueError(f"the capacity must be a multiple of 8, got {capacity}")
    if n_tokens > capacity:
        raise ValueError(f"{n_tokens} tokens do not fit in a capacity of {capacity}")


def decode_counts(
    shape: Shape,
    plan: Plan[object],
    *,
    capacity: int,
    window: int,
    scale: float,
    stored: int | None = None,
) -> tuple[int, ...]:
    """The numbers of `arguments.DECODE_COUNTS`, and the bits of the scores' factor."""
    sizes = shape.batch, shape.n_kv_heads, plan.group, shape.n_queries, capacity, shape.n_tokens
    factor = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))[0]
    at = -1 if stored is None else stored
    return *sizes, plan.row_blocks, plan.n_splits, plan.chunk, window, at, factor


def check_alike(keys: mx.array, values: mx.array) -> None:
    """Refuse to encode keys and values that differ.

    Raises:
        ValueError: If they do in shape or dtype.
    """
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(
            f"keys and values must be alike, got {keys.shape} {keys.dtype} "
            f"and {values.shape} {values.dtype}"
        )


def dtype_of(array: mx.array) -> Dtype:
    """The name of an array's element type.

    Raises:
        ValueError: If no kernel takes it.
    """
    if (name := NAMES.get(array.dtype)) is None:
        got = str(array.dtype).removeprefix("mlx.core.")
        raise ValueError(f"dtype must be one of {DTYPES}, got {got}")
    return name


def encoded_planes(keys: mx.array, scheme: Turbo) -> tuple[list[tuple[int, ...]], list[mx.Dtype]]:
    """Shapes and dtypes of the five planes of keys ``(b, h, n, d)`` and values like them."""
    b, h, n, d = keys.shape
    groups = d // GROUP_SIZE
    row_bytes = d * scheme.key_bits // 8, groups, groups, d * scheme.value_bits // 8, groups
    key_dtype = mx.int8 if scheme.key_bits == 8 else mx.uint8
    dtypes = [key_dtype, mx.float16, mx.float16, mx.uint8, mx.float16]
    return [(b, h, n, width) for width in row_bytes], dtypes


# Constants are made from numpy: they hold data, not a graph bound to one thread's stream.
@cache
def signs(head_dim: int) -> mx.array:
    """int8 ``(d,)``, 1 or -1."""
    return mx.array(SIGNS[head_dim].astype(np.int8))


@cache
def centroids(bits: int) -> mx.array:
    """float32 ``(2 ** bits,)``."""
    return mx.array(CENTROIDS[bits])


@cache
def boundaries(bits: int) -> mx.array:
    """float32 ``(2 ** bits - 1,)``."""
    return mx.array(BOUNDARIES[bits])
