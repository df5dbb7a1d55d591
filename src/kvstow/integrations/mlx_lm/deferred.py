"""The functions of mlx-lm that deferred fetching replaces, while it is needed.

`base.scaled_dot_product_attention` sends every layer whose cache has ``bits``
to `base.quantized_scaled_dot_product_attention`, which it looks up as a global
of its module. Assigning that global reaches every model that uses mlx-lm's own
attention. Ours takes packed windows (by a kernel where one is for them), passes
exact keys and values (a row's first append) to the fast attention, and
everything else to the original.

Attention sinks it refuses there, and packed windows of a layer that is given another's, and no
cache. So it is replaced itself, too, in every module of mlx-lm's models that has it: only calls
with sinks or a packed window are not handed on as they are.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, local
from typing import Any
from weakref import ref

import mlx.core as mx
from mlx_lm.models import base

from kvstow.attention.fused import attend, dtype_name
from kvstow.attention.window import PackedWindow


class Owner:
    """Whoever needs the replacement; one that is gone needs it no longer."""


_original = base.quantized_scaled_dot_product_attention
_original_with_sinks = base.scaled_dot_product_attention
_NAME = "scaled_dot_product_attention"
_owners: set[ref[Owner]] = set()  # asked by every layer in every step: no WeakSet, which is slower
_lock = Lock()


class _Seen(local):
    """What a probe is told of the windows of its own thread."""

    windows: "list[tuple[PackedWindow, Heads]] | None" = None


_seen = _Seen()


def install(owner: Owner) -> None:
    """Take over the global for `owner`; doing so twice changes nothing."""
    with _lock:
        _owners.add(ref(owner, _owners.discard))
        base.quantized_scaled_dot_product_attention = attention  # type: ignore[assignment]
        _put(with_sinks, in_the_place_of=_original_with_sinks)


def remove(owner: Owner) -> None:
    """`owner` needs it no longer; after the last one mlx-lm has its own function back."""
    with _lock:
        _owners.discard(ref(owner))
        if not _owners:
            base.quantized_scaled_dot_product_attention = _original
            _put(_original_with_sinks, in_the_place_of=with_sinks)


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


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention over a window is specialised for, lengths aside."""

    key_bits: int
    value_bits: int
    head_dim: int
    n_kv_heads: int
    n_heads: int
    dtype: str
    sinks: bool

    @classmethod
    def of(cls, queries: mx.array, window: PackedWindow, *, sinks: bool) -> "Heads":
        """Of one call."""
        scheme, n_kv_heads = window.scheme, int(window.keys.scales.shape[1])
        widths = scheme.key_bits, scheme.value_bits, window.head_dim
        return cls(*widths, n_kv_heads, queries.shape[1], dtype_name(queries.dtype), sinks)


@contextmanager
def windows_seen() -> Iterator[list[tuple[PackedWindow, Heads]]]:
    """The windows that arrive from this thread during the block, one for each call."""
    before, _seen.windows = _seen.windows, []
    try:
        yield _seen.windows
    finally:
        _seen.windows = before


def with_sinks(  # noqa: PLR0913  mlx-lm's own signature
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention, with sinks over packed windows too."""
    if isinstance(keys, PackedWindow):
        return _of_window(queries, keys, scale=scale, mask=mask, sinks=sinks)
    if sinks is None or not hasattr(cache, "bits"):
        return _original_with_sinks(queries, keys, values, cache, scale, mask, sinks)
    if isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    return _original_with_sinks(queries, keys, values, cache, scale, mask, sinks)


def attention(
    queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, **affine: int
) -> mx.array:
    """mlx-lm's quantised attention, for packed windows too."""
    if isinstance(q_keys, PackedWindow):
        return _of_window(queries, q_keys, scale=scale, mask=mask)
    if isinstance(q_keys, mx.array):
        return mx.fast.scaled_dot_product_attention(
            queries, q_keys, q_values, scale=scale, mask=mask
        )
    return _original(queries, q_keys, q_values, scale=scale, mask=mask, **affine)


def _of_window(
    queries: mx.array,
    window: PackedWindow,
    *,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if (seen := _seen.windows) is not None:
        seen.append((window, Heads.of(queries, window, sinks=sinks is not None)))
    return attend(queries, window, scale=scale, mask=mask, sinks=sinks)


def _put(function: Any, *, in_the_place_of: Any) -> None:
    """Change a function in mlx-lm's modules, which import it by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and vars(module).get(_NAME) is in_the_place_of:
            setattr(module, _NAME, function)
