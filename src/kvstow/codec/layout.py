"""Names, shapes and dtypes of packed keys and values.

One token of one KV head, ``d`` = head_dim, ``g = d / 32`` groups:

====================  =================================  ========================
plane                 shape, dtype                       meaning
====================  =================================  ========================
key ``codes``         ``(d,)`` int8 at 8 bits,           ``x = (code + zero) * scale``
                      else ``(d * bits / 8,)`` uint8
key ``scales``        ``(g,)`` float16                   step of the group
key ``zeros``         ``(g,)`` float16                   offset, in steps
value ``codes``       ``(d * bits / 8,)`` uint8          index into the centroids
value ``scales``      ``(g,)`` float16                   RMS of the rotated group, or near
====================  =================================  ========================

Leading axes (batch, KV heads, tokens) are kept in front. Groups lie along
head_dim only, so any slice, roll or concatenation over tokens is byte-exact.
"""

from typing import Any, NamedTuple

from kvstow.errors import SchemeError, UnsupportedModel
from kvstow.scheme import GROUP_SIZE, HEAD_DIMS, KEY_BITS, VALUE_BITS


class PackedKeys(NamedTuple):
    """Keys as stored: three planes with the same leading axes."""

    codes: Any
    scales: Any
    zeros: Any


class PackedValues(NamedTuple):
    """Values as stored: two planes with the same leading axes."""

    codes: Any
    scales: Any


def check_keys(bits: int, head_dim: int) -> None:
    """Refuse keys that have no encoding.

    Raises:
        SchemeError: If `bits` is not a key width.
        UnsupportedModel: If `head_dim` is not a positive multiple of the group size.
    """
    if bits not in KEY_BITS:
        raise SchemeError(f"key bits must be one of {KEY_BITS}, got {bits}")
    if head_dim < GROUP_SIZE or head_dim % GROUP_SIZE:
        raise UnsupportedModel(
            f"keys need a head_dim that is a multiple of {GROUP_SIZE}, got {head_dim}"
        )


def check_values(bits: int, head_dim: int) -> None:
    """Refuse values that have no encoding, as `check_rotation` does.

    Raises:
        SchemeError: If `bits` is not a value width.
    """
    if bits not in VALUE_BITS:
        raise SchemeError(f"value bits must be one of {VALUE_BITS}, got {bits}")
    check_rotation(head_dim)


def check_rotation(head_dim: int) -> None:
    """Refuse vectors that cannot be rotated.

    Raises:
        UnsupportedModel: If there are no signs for `head_dim`.
    """
    if head_dim not in HEAD_DIMS:
        raise UnsupportedModel(f"values need head_dim in {HEAD_DIMS}, got {head_dim}")
