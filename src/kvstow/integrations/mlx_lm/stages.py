"""`Stages`: a batch's rows in its own order, of which some are plain and some are packed.

The plain ones lie in one group of mlx-lm's caches and the packed ones in another, each
group in the batch's order. What is asked of all rows is asked of both groups, padded on
the left to one width, and put in order.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import mlx.core as mx

from kvstow.attention.mlx import decode_window
from kvstow.attention.window import PackedWindow
from kvstow.integrations.mlx_lm import masks
from kvstow.integrations.mlx_lm.encode import append_in_place, encode
from kvstow.integrations.mlx_lm.pairs import Arrays
from kvstow.integrations.mlx_lm.rows import PackedRows, PlainRows, Rows
from kvstow.scheme import Turbo

AnyRows = TypeVar("AnyRows", bound=Rows)
Part = tuple[list[int], PackedWindow | Arrays]  # indices of rows, and what they hold


class Stages:
    """Rows at two stages.

    Args:
        scheme: Of the packed rows.
        is_packed: Of each row, whether it is one.
        plain: The rows that are not, in their order; None if there is none.
        packed: The rows that are.
        fused: Whether kernels encode where they can.
    """

    def __init__(
        self,
        scheme: Turbo,
        is_packed: list[bool],
        plain: PlainRows | None,
        packed: PackedRows | None,
        *,
        fused: bool = False,
    ) -> None:
        self.scheme = scheme
        self.is_packed = is_packed
        self.plain = plain
        self.packed = packed
        self.fused = fused

    @classmethod
    def merge(cls, caches: Sequence[Any], *, fused: bool = False) -> Self:
        """The rows of `caches`, one in each."""
        plain = [cache.rows() for cache in caches if not cache.is_packed]
        packed = [cache.rows() for cache in caches if cache.is_packed]
        return cls(
            caches[0].scheme,
            [cache.is_packed for cache in caches],
            PlainRows.merge(plain) if plain else None,
            PackedRows.merge(packed) if packed else None,
            fused=fused,
        )

    def copy(self) -> Self:
        """The same rows, which change apart from these."""
        plain = None if self.plain is None else self.plain.copy()
        packed = None if self.packed is None else self.packed.copy()
        return type(self)(self.scheme, list(self.is_packed), plain, packed, fused=self.fused)

    def of(self, *, packed: bool) -> list[int]:
        """Indices of the rows at one stage."""
        return [i for i, is_packed in enumerate(self.is_packed) if is_packed == packed]

    def groups(self) -> Iterator[tuple[list[int], Rows]]:
        """The groups that have rows, and which."""
        if self.plain is not None:
            yield self.of(packed=False), self.plain
        if self.packed is not None:
            yield self.of(packed=True), self.packed

    def ask(self, question: Callable[[Rows], int]) -> list[int]:
        """The answer of each group."""
        return [question(group) for _, group in self.groups()]

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, ``(b,)``."""
        return _in_order([(rows, group.offset) for rows, group in self.groups()])

    def make_mask(self, n_tokens: int, window_size: int | None, least: int) -> mx.array:
        """The mask of an append, ``(b, 1, n_tokens, width)``; no row has fewer than `least`."""
        options = {"return_array": True, "window_size": window_size}
        made = [(rows, group.make_mask(n_tokens, **options)) for rows, group in self.groups()]
        mask = _in_order(_widened(made, axis=3))
        groups = [group for _, group in self.groups()]
        if len(groups) > 1:
            return mask
        masked: mx.array = masks.known(mask, groups[0].sight(n_tokens, window_size, least))
        return masked

    def append_packed(self, packed: PackedRows, keys: mx.array, values: mx.array) -> None:
        """Append ``(b, h, s, d)`` to all rows, which are the packed ones."""
        if not (self.fused and append_in_place(self.scheme, packed, keys, values)):
            self._append(packed, keys, values)

    def append(
        self, keys: mx.array, values: mx.array, packing: Sequence[int]
    ) -> tuple[list[Part], list[Part]]:
        """Append ``(b, h, s, d)``, which packs some plain rows.

        Returns:
            What the rows attend to, and what they hold afterwards.
        """
        attended: list[Part] = []
        held: list[Part] = []
        if self.packed is not None:
            rows = self.of(packed=True)
            self._append(self.packed, _pick(keys, rows), _pick(values, rows))
            held.append((rows, self.packed.window(self.scheme)))
            attended = [*held]
        if self.plain is not None:
            rows = self.of(packed=False)
            exact = self.plain.append(_pick(keys, rows), _pick(values, rows))
            left = [i for i in rows if i not in packing]
            if packing:
                held.append(([*packing], self._pack(self.plain, packing)))
            if left:
                held.append((left, _chosen(exact, rows, left)))
            if self.scheme.stored:
                attended = held
            else:
                attended.append((rows, exact))
        return attended, held

    def keys_and_values(self, dtype: mx.Dtype) -> Arrays:
        """Every token held, decoded: ``(b, h, width, d)``, pads included."""
        parts: list[Part] = []
        if self.plain is not None:
            parts.append((self.of(packed=False), self.plain.keys_and_values()))
        if self.packed is not None:
            parts.append((self.of(packed=True), self.packed.window(self.scheme)))
        return put_together(parts, dtype)

    def pad_left(self, left: Sequence[int]) -> None:
        """Say that pads come before the first tokens; every row is plain."""
        if self.plain is not None:
            self.plain.caches[0].prepare(left_padding=list(left))

    def pad_right(self, right: Sequence[int]) -> None:
        """Move pads at the end of rows out of the way of the next tokens."""
        for rows, group in self.groups():
            group.pad([right[i] for i in rows])

    def filter(self, kept: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        places = {i: place for rows, _ in self.groups() for place, i in enumerate(rows)}
        plain = [places[i] for i in kept if not self.is_packed[i]]
        packed = [places[i] for i in kept if self.is_packed[i]]
        self.plain = _filtered(self.plain, plain)
        self.packed = _filtered(self.packed, packed)
        self.is_packed = [self.is_packed[i] for i in kept]

    def extend(self, other: Self) -> None:
        """Add the rows of `other`, which must not be used any more, after these."""
        self.plain = _joined(self.plain, other.plain)
        self.packed = _joined(self.packed, other.packed)
        self.is_packed = self.is_packed + other.is_packed

    def extract(self, i: int) -> Rows:
        """A row alone."""
        rows, group = next((rows, group) for rows, group in self.groups() if i in rows)
        return group.extract(rows.index(i))

    def _append(self, packed: PackedRows, keys: mx.array, values: mx.array) -> None:
        packed.append(*encode(self.scheme, keys, values, fused=self.fused))
        if self.fused:
            packed.align()

    def _pack(self, plain: PlainRows, packing: Sequence[int]) -> PackedWindow:
        """Move some plain rows to the packed ones; returns them as they lay before."""
        rows = self.of(packed=False)
        if len(packing) == len(rows):
            moved, self.plain = plain, None
        else:
            moved = plain.copy()
            moved.filter([rows.index(i) for i in packing])
            plain.filter([place for place, i in enumerate(rows) if i not in packing])
        packed = moved.pack(self.scheme, fused=self.fused)
        window = packed.window(self.scheme)
        order = [*self.of(packed=True), *packing]
        self.packed = packed = _both(self.packed, packed)
        if order != sorted(order):
            packed.filter([order.index(i) for i in sorted(order)])
        self.is_packed = [p or i in packing for i, p in enumerate(self.is_packed)]
        return window


def put_together(parts: Sequence[Part], dtype: mx.Dtype) -> Arrays:
    """What all rows hold, in order: ``(b, h, width, d)`` keys and values."""
    decoded = [
        (rows, x if isinstance(x, tuple) else decode_window(x.settled(), dtype, rotated=False))
        for rows, x in parts
    ]
    keys = _widened([(rows, k) for rows, (k, _) in decoded], axis=2)
    values = _widened([(rows, v) for rows, (_, v) in decoded], axis=2)
    return _in_order(keys), _in_order(values)


def _in_order(parts: Sequence[tuple[list[int], mx.array]]) -> mx.array:
    """The rows of all parts by their indices, which are 0 to b - 1."""
    if len(parts) == 1:
        return parts[0][1]
    order = [i for rows, _ in parts for i in rows]
    back = [order.index(i) for i in range(len(order))]
    return mx.concatenate([x for _, x in parts])[mx.array(back)]


def _widened(
    parts: Sequence[tuple[list[int], mx.array]], axis: int
) -> list[tuple[list[int], mx.array]]:
    """All as wide as the widest: a row's last token comes last, and nobody sees what is before."""
    width = max(x.shape[axis] for _, x in parts)
    return [
        (rows, mx.pad(x, [(width - x.shape[axis] if a == axis else 0, 0) for a in range(x.ndim)]))
        for rows, x in parts
    ]


def _pick(x: mx.array, rows: Sequence[int]) -> mx.array:
    return x if len(rows) == x.shape[0] else x[mx.array(list(rows))]


def _chosen(arrays: Arrays, of: Sequence[int], rows: Sequence[int]) -> Arrays:
    places = [of.index(i) for i in rows]
    return _pick(arrays[0], places), _pick(arrays[1], places)


def _filtered(group: AnyRows | None, rows: Sequence[int]) -> AnyRows | None:
    if group is None or not rows:
        return None
    group.filter(rows)
    return group


def _joined(group: AnyRows | None, more: AnyRows | None) -> AnyRows | None:
    return group if more is None else _both(group, more)


def _both(group: AnyRows | None, more: AnyRows) -> AnyRows:
    if group is None:
        return more
    group.extend(more)
    return group
