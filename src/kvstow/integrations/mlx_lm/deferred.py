"""The one function of mlx-lm that deferred fetching replaces, while it is needed.

`base.scaled_dot_product_attention` sends every layer whose cache has ``bits``
to `base.quantized_scaled_dot_product_attention`, which it looks up as a global
of its module. Assigning that global reaches every model that uses mlx-lm's own
attention. Ours takes packed windows, passes exact keys and values (a row's
first append) to the fast attention, and everything else to the original.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from kvstow.attention.mlx import PackedWindow, attend


class _Calls:
    """How often the global was asked to attend over a packed window."""

    n_packed = 0


_original = base.quantized_scaled_dot_product_attention
_calls = _Calls()
_users = 0


def install() -> None:
    """Take over the global; each call needs one `remove`."""
    global _users
    _users += 1
    base.quantized_scaled_dot_product_attention = attention  # type: ignore[assignment]


def remove() -> None:
    """Undo one `install`; the last one restores mlx-lm's own function."""
    global _users
    _users -= 1
    if _users == 0:
        base.quantized_scaled_dot_product_attention = _original


def is_installed() -> bool:
    """Whether a packed window handed to mlx-lm's attention arrives here."""
    return _users > 0


@contextmanager
def installed() -> Iterator[_Calls]:
    """Install for the length of the block; yields the count of packed windows that arrive."""
    _calls.n_packed = 0
    install()
    try:
        yield _calls
    finally:
        remove()


def attention(
    queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, **affine: int
) -> mx.array:
    """mlx-lm's quantised attention, for packed windows too."""
    if isinstance(q_keys, PackedWindow):
        _calls.n_packed += 1
        return attend(queries, q_keys, scale=scale, mask=mask)
    if isinstance(q_keys, mx.array):
        return mx.fast.scaled_dot_product_attention(
            queries, q_keys, q_values, scale=scale, mask=mask
        )
    return _original(queries, q_keys, q_values, scale=scale, mask=mask, **affine)
