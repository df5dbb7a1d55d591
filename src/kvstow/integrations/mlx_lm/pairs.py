"""How five planes lie in three of mlx-lm's caches, and how such a cache is copied."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import Turbo

Arrays = tuple[mx.array, mx.array]


def as_pairs(keys: PackedKeys, values: PackedValues) -> list[Arrays]:
    """Five planes as the keys and values of three caches.

    mlx-lm makes zeros in the dtype of the keys for both, so a pair has one dtype. The
    last pair is the odd plane and nothing, ``(b, h, t, 0)``.
    """
    return [
        (keys.codes.view(mx.uint8), values.codes),
        (keys.scales, keys.zeros),
        (values.scales, nothing_beside(values.scales)),
    ]


def as_planes(pairs: Sequence[Any], scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """What `as_pairs` was made of."""
    (key_codes, value_codes), (scales, zeros), (value_scales, _) = pairs
    codes = key_codes.view(mx.int8) if scheme.key_bits == 8 else key_codes
    return PackedKeys(codes, scales, zeros), PackedValues(value_codes, value_scales)


def nothing_beside(plane: mx.array) -> mx.array:
    """Not a slice of the plane, which would be a handle of its memory until it is computed."""
    return mx.zeros((*plane.shape[:3], 0), plane.dtype)


def holding(cache: Any, keys: Any, values: Any) -> Any:
    """A cache of mlx-lm's in the state of `cache`, with other things in the same places."""
    twin = copy.copy(cache)
    for name, x in vars(cache).items():
        if isinstance(x, mx.array):
            setattr(twin, name, copy.copy(x))  # mlx updates an array object in place
    twin.keys, twin.values = copy.copy(keys), copy.copy(values)
    return twin
