"""What calls of kernels through MLX have in common, whatever GPU they run on."""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.kernels.specialise import DTYPES, Dtype


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


def check_tokens(n_tokens: int, capacity: int) -> None:
    """Refuse planes that the kernels cannot follow.

    Raises:
        ValueError: If the capacity is not a multiple of 8, or there are more tokens than it.
    """
    if capacity % 8:
        raise ValueError(f"the capacity must be a multiple of 8, got {capacity}")
    if n_tokens > capacity:
        raise ValueError(f"{n_tokens} tokens do not fit in a capacity of {capacity}")


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
    name = str(array.dtype).removeprefix("mlx.core.")
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ValueError(f"dtype must be one of {DTYPES}, got {name}")


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
