"""Exact keys and values into packed ones, under a scheme."""

from typing import Any, Protocol

import mlx.core as mx

from kvstow.attention import fused as kernels
from kvstow.attention.arrival import Arrival
from kvstow.codec import mlx as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.errors import UnsupportedModel
from kvstow.scheme import Turbo
from kvstow.store import Turns


class Writable(Protocol):
    """Where packed tokens may be written to the memory of planes: see `store.OwnPlanes`."""

    @property
    def end(self) -> int:
        """Where in the capacity the next token comes to be."""

    @property
    def arrival(self) -> Arrival | None:
        """Tokens that are on their way."""

    @property
    def turns(self) -> Turns:
        """Of the kernels that write to the planes and read them."""

    def writable(self, n_tokens: int) -> tuple[Any, ...]:
        """The planes, where so many more may be written; else ``()``."""

    def expect(self, n_tokens: int, arrival: Arrival) -> None:
        """So many are on their way."""


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


def append_in_place(scheme: Turbo, store: Writable, keys: mx.array, values: mx.array) -> bool:
    """Have ``(b, h, t, d)`` encoded straight into a store's planes, where a kernel can; else False.

    One launch at most, where arrays would be made anew and copied into the planes one by one. Not
    in planes that others may have or read, nor several tokens in a sliding window.
    """
    n_tokens = keys.shape[2]
    if not kernels.can_append():
        return False
    planes = store.writable(n_tokens)
    if not planes or not kernels.can_encode_in_place(scheme, keys, values):
        return False
    if store.arrival is not None:
        store.arrival.there()  # those before come first, be it by a launch of their own
    store.expect(n_tokens, Arrival(scheme, planes, store.end, (keys, values), store.turns))
    return True


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
