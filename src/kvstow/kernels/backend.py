"""The kernels of the GPU that MLX computes on: those for CUDA, or those for Metal."""

from dataclasses import replace
from functools import cache
from types import ModuleType

import mlx.core as mx

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.kernels import metal_mlx
from kvstow.kernels import mlx as cuda_mlx
from kvstow.kernels.calls import Planned, Rows, Scores
from kvstow.kernels.metal_plan import MetalDevice
from kvstow.kernels.plan import Device
from kvstow.scheme import Turbo

__all__ = [
    "Rows",
    "Scores",
    "append",
    "attend",
    "can_append",
    "device",
    "encode",
    "name",
    "planned",
]

_MODULES = {"cuda": cuda_mlx, "metal": metal_mlx}


@cache
def name() -> str:
    """``"cuda"`` or ``"metal"``; empty where MLX has no GPU."""
    if mx.cuda.is_available():
        return "cuda"
    return "metal" if mx.metal.is_available() else ""


def device() -> Device | MetalDevice:
    """The GPU that MLX uses."""
    found: Device | MetalDevice = _module().device()
    return found


def attend(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    scheme: Turbo,
    scores: Scores,
    *,
    after: mx.array | None = None,
) -> mx.array:
    """Causal attention of the last tokens over packed planes; see `attention.reference`.

    A query that sees no token gives zeros. Nothing outside a row is read.

    Args:
        queries: ``(b, hq, l, d)`` of any float dtype, the last `l` tokens of each row.
        planes: Whole planes ``(b, h, capacity, *)``; the capacity is a multiple of 8.
        tokens: How many of them are data, or the rows of a ragged batch.
        scheme: Widths that the planes were encoded with.
        scores: How the scores become weights.
        after: What the last call on these planes returned, where it is to come before.

    Returns:
        ``(b, hq, l, d)`` in the dtype of the queries.

    Raises:
        ValueError: If the heads do not divide, the capacity is not a multiple of 8, or there
            are more tokens than it.
    """
    options = {} if after is None else {"after": after}
    output: mx.array = _module().attend(queries, planes, tokens, scheme, scores, **options)
    return output


def planned(
    queries: mx.array,
    planes: tuple[PackedKeys, PackedValues],
    tokens: int | Rows,
    scheme: Turbo,
    scores: Scores,
    *,
    stores: int | None = None,
) -> Planned:
    """What `attend` does for these, to be called for others that are alike.

    Nothing checks that they are, in sizes and dtypes.

    Args:
        queries: As those of `attend`.
        planes: As those of `attend`; with `stores`, of `append`.
        tokens: As those of `attend`, the one to be stored included.
        scheme: Widths of the planes; with `stores` it does not search.
        scores: How the scores become weights.
        stores: Which token of each row it is to store before it reads it, for one query token
            that sees it.

    Raises:
        ValueError: As `attend`, and if there are more query tokens, a search or a token
            that is not there with `stores`.
    """
    if name() == "cuda":
        return cuda_mlx.planned(queries, planes, tokens, scheme, scores, stores=stores)

    if stores is not None:
        raise ValueError("no kernel for Metal stores tokens before it attends")

    def call(
        queries: mx.array,
        planes: tuple[PackedKeys, PackedValues],
        *_: object,
        sinks: mx.array | None = None,
        **__: object,
    ) -> mx.array:
        return attend(queries, planes, tokens, scheme, replace(scores, sinks=sinks))

    return call


def encode(keys: mx.array, values: mx.array, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """Keys and values in one launch, bit for bit those of `codec.reference`, guarded.

    Args:
        keys: ``(b, h, n, d)`` of any float dtype.
        values: The same shape and dtype.
        scheme: Widths to encode with, and whether to search.

    Raises:
        ValueError: If the two differ in shape or dtype.
    """
    planes: tuple[PackedKeys, PackedValues] = _module().encode(keys, values, scheme)
    return planes


def can_append() -> bool:
    """Whether there is `append`, which Metal has not."""
    return name() == "cuda"


def append(
    planes: tuple[mx.array, ...],
    position: int,
    exact: tuple[mx.array, mx.array],
    scheme: Turbo,
    *,
    after: mx.array | None = None,
) -> mx.array:
    """What `encode` gives, written to the memory of planes, which MLX does not see.

    Args:
        planes: The five of them ``(b, h, capacity, *)``, row-contiguous: of others MLX would
            hand a copy to the kernel. No other array may have their memory.
        position: Where in the capacity the first token comes to be.
        exact: Keys and values, as those of `encode`, of at least one token.
        scheme: Widths to encode with, and whether to search.
        after: What the last call on these planes returned, where it is to come before.

    Returns:
        An array that is there once the tokens are, these and those of `after`: whoever reads
        them must depend on it.

    Raises:
        ValueError: If keys and values differ in shape or dtype, or do not fit.
    """
    return cuda_mlx.append(planes, position, exact, scheme, after=after)


def _module() -> ModuleType:
    return _MODULES[name()]
