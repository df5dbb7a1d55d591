"""The one function of mlx-lm that deferred fetching replaces, while it is needed.

`base.scaled_dot_product_attention` sends every layer whose cache has ``bits``
to `base.quantized_scaled_dot_product_attention`, which it looks up as a global
of its module. Assigning that global reaches every model that uses mlx-lm's own
attention. Ours takes packed windows (by a kernel where one is for them), passes
exact keys and values (a row's first append) to the fast attention, and
everything else to the original.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, local
from typing import Any
from weakref import WeakSet

import mlx.core as mx
from mlx_lm.models import base

from kvstow.attention.fused import attend, dtype_name
from kvstow.attention.window import PackedWindow


class Owner:
    """Whoever needs the replacement; one that is gone needs it no longer.

    Attributes:
        prompts: Whether it asked for kernels for prompts too, which all get while it is there.
    """

    prompts: bool = False


_original = base.quantized_scaled_dot_product_attention
_owners: WeakSet[Owner] = WeakSet()
_lock = Lock()
_seen = local()  # a probe counts the windows of its own thread


def install(owner: Owner) -> None:
    """Take over the global for `owner`; doing so twice changes nothing."""
    with _lock:
        _owners.add(owner)
        base.quantized_scaled_dot_product_attention = attention  # type: ignore[assignment]


def remove(owner: Owner) -> None:
    """`owner` needs it no longer; after the last one mlx-lm has its own function back."""
    with _lock:
        _owners.discard(owner)
        if not _owners:
            base.quantized_scaled_dot_product_attention = _original


def is_installed() -> bool:
    """Whether a packed window handed to mlx-lm's attention arrives here."""
    return bool(_owners)


@contextmanager
def installed() -> Iterator[None]:
    """Install for the length of the block."""
    owner = Owner()
    install(owner)
    try:
        yield
    finally:
        remove(owner)


def windows_seen() -> int:
    """How many packed windows have arrived from this thread."""
    return getattr(_seen, "n_windows", 0)


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention over a window is specialised for, lengths aside."""

    key_bits: int
    value_bits: int
    head_dim: int
    n_kv_heads: int
    n_heads: int
    dtype: str

    @classmethod
    def of(cls, queries: mx.array, window: PackedWindow) -> "Heads":
        """Of one call."""
        scheme, n_kv_heads = window.scheme, int(window.keys.scales.shape[1])
        widths = scheme.key_bits, scheme.value_bits, window.head_dim
        return cls(*widths, n_kv_heads, queries.shape[1], dtype_name(queries.dtype))


@contextmanager
def heads_seen() -> Iterator[set[Heads]]:
    """What windows arrive from this thread during the block."""
    _seen.heads = set()
    try:
        yield _seen.heads
    finally:
        _seen.heads = None


def attention(
    queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, **affine: int
) -> mx.array:
    """mlx-lm's quantised attention, for packed windows too."""
    if isinstance(q_keys, PackedWindow):
        _seen.n_windows = windows_seen() + 1
        if (heads := getattr(_seen, "heads", None)) is not None:
            heads.add(Heads.of(queries, q_keys))
        prompts = any(owner.prompts for owner in _owners)
        return attend(queries, q_keys, scale=scale, mask=mask, prompts=prompts)
    if isinstance(q_keys, mx.array):
        return mx.fast.scaled_dot_product_attention(
            queries, q_keys, q_values, scale=scale, mask=mask
        )
    return _original(queries, q_keys, q_values, scale=scale, mask=mask, **affine)
