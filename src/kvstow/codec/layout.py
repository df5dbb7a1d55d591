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
value ``scales``      ``(g,)`` float16                   RMS of the rotated group
====================  =================================  ========================

Leading axes (batch, KV heads, tokens) are kept in front. Groups lie along
head_dim only, so any slice, roll or concatenation over tokens is byte-exact.
"""

from typing import Any, NamedTuple


class PackedKeys(NamedTuple):
    """Keys as stored: three planes with the same leading axes."""

    codes: Any
    scales: Any
    zeros: Any


class PackedValues(NamedTuple):
    """Values as stored: two planes with the same leading axes."""

    codes: Any
    scales: Any
