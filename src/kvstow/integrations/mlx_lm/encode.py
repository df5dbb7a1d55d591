"""Exact keys and values into packed ones, under a scheme."""

import mlx.core as mx

from kvstow.attention import fused as kernels
from kvstow.codec import mlx as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.errors import UnsupportedModel
from kvstow.scheme import Turbo


def encode(
    scheme: Turbo, keys: mx.array, values: mx.array, *, fused: bool = False
) -> tuple[PackedKeys, PackedValues]:
    """Keys and values ``(b, h, t, d)`` as the scheme stores them.

    With `fused` by the kernel where it can; the bytes are the same.
    """
    if fused and (planes := kernels.encode(scheme, keys, values)) is not None:
        return planes
    s = scheme
    return (
        codec.encode_keys(keys, bits=s.key_bits, guard=True, search=s.search),
        codec.encode_values(values, bits=s.value_bits, guard=True, search=s.search),
    )


def check_widths(scheme: Turbo, keys: mx.array, values: mx.array) -> None:
    """The backstop of three: the program and `attach` have refused this before.

    Raises:
        UnsupportedModel: If the head_dim cannot be stored.
    """
    if keys.shape[-1] != values.shape[-1]:
        raise UnsupportedModel(
            f"{scheme} needs keys and values of one head_dim, "
            f"got {keys.shape[-1]} and {values.shape[-1]}"
        )
    scheme.check_head_dim(keys.shape[-1])
