"""A cache that holds what a codec would give back, for formats that are no cache format.

It shows what storing keys, or values, or both under some codec does to a model's
output, and says nothing about bytes: it takes as many as the host's own cache. Its
rule is that of `PackedKVCache`: a first append attends to what was appended, every
later one to what is stored. So with the product's codec on both keys and values its
output is that of the eager path (``tests/evaluate/test_simulated.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvstow.codec import mlx as codec
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.paper import TurboQuantMse, TurboQuantProd
from kvstow.evaluate.paper_mlx import reconstruct
from kvstow.scheme import Turbo

Rounding = Callable[[mx.array], mx.array]


def _exact(x: mx.array) -> mx.array:
    return x


@dataclass(frozen=True, slots=True)
class Codec:
    """Keys, and values, ``(b, h, t, d)`` to what would be read back, in the same dtype."""

    keys: Rounding = _exact
    values: Rounding = _exact


class _Simulated:
    """What makes one of mlx-lm's caches a simulated one."""

    offset: int

    def __init__(self, rounding: Codec, *args: Any) -> None:
        super().__init__(*args)
        self.rounding = rounding

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``(b, h, s, d)``; returns what this append attends to."""
        is_first = self.offset == 0
        rounded = self.rounding.keys(keys), self.rounding.values(values)
        stored: tuple[mx.array, mx.array] = super().update_and_fetch(*rounded)  # type: ignore[misc]
        return (keys, values) if is_first else stored


class SimulatedKVCache(_Simulated, KVCache):
    """One layer's keys and values, rounded to what `rounding` can represent."""


class SimulatedRotatingKVCache(_Simulated, RotatingKVCache):
    """The same of a layer with a sliding window."""


def simulated(rounding: Codec, window: int, plain: Any = None) -> _Simulated:
    """A cache with the tokens of a plain one, as if they had been appended at once.

    Args:
        rounding: What is done to the tokens.
        window: Tokens that the layer sees; 0: all.
        plain: Where the tokens are; None: there is none yet.
    """
    cache: Any = (
        SimulatedRotatingKVCache(rounding, window) if window else SimulatedKVCache(rounding)
    )
    if plain is not None and plain.offset:
        keys, values = plain.keys_and_values()
        cache.__dict__ |= vars(plain)  # where tokens lie, in a window that may have moved on
        cache.keys, cache.values = rounding.keys(keys), rounding.values(values)
    return cache  # type: ignore[no-any-return]


def codec_of(arm: Arm, head_dim: int) -> tuple[Codec, float]:
    """What `arm` does to the vectors of a layer, and its bits per element.

    Raises:
        TypeError: If `arm` is not simulated.
    """
    if arm.paper is not None:
        kind = TurboQuantMse if arm.paper.startswith("mse") else TurboQuantProd
        algorithm = kind(int(arm.paper[-1]), head_dim)
        both = _paper(algorithm)
        rounding = Codec(both, both)
        bits = arm.bits_per_value(head_dim, algorithm.bits_per_value)
    elif isinstance(arm.scheme, Turbo):
        rounding, bits = _turbo(arm.scheme), arm.bits_per_value(head_dim)
    else:
        raise TypeError(f"{arm} is not simulated")
    if arm.part == "keys":
        return Codec(keys=rounding.keys), bits
    return (rounding if arm.part == "both" else Codec(values=rounding.values)), bits


def _paper(algorithm: TurboQuantMse | TurboQuantProd) -> Rounding:
    return lambda x: reconstruct(algorithm, x).astype(x.dtype)


def _turbo(scheme: Turbo) -> Codec:
    def keys(x: mx.array) -> mx.array:
        packed = codec.encode_keys(x, bits=scheme.key_bits, guard=True, search=scheme.search)
        return codec.decode_keys(packed, bits=scheme.key_bits, dtype=x.dtype)

    def values(x: mx.array) -> mx.array:
        packed = codec.encode_values(x, bits=scheme.value_bits, guard=True, search=scheme.search)
        return codec.decode_values(
            packed, bits=scheme.value_bits, head_dim=x.shape[-1], dtype=x.dtype
        )

    return Codec(keys, values)
