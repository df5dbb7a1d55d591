"""`PackedBatchKVCache`: rows of several requests in one layer, each at its own stage.

mlx-lm merges the caches of requests into one batch and then adds, drops and extracts
rows as requests come and go. Stored tokens are moved as they are: a row that went
through a batch has the bytes that it would have alone.

A row of a batch follows the rule of `PackedKVCache` on its own, whatever the others do:
plain until an append leaves it with enough tokens, packed from then on. What a row
attends to is what it would attend to alone; where some rows attend to exact tokens and
some to stored ones, all are handed out as arrays, in the deferred class too.

Pads are no tokens: they do not count towards ``+start<N>``, nobody attends to them, and
nothing reports them but ``nbytes``, which is what is allocated.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from kvstow.attention.window import PackedWindow
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.integrations.mlx_lm import masks
from kvstow.integrations.mlx_lm.counts import Counts, Row
from kvstow.integrations.mlx_lm.encode import check_widths
from kvstow.integrations.mlx_lm.fetch import Deferred, Eager, Fetched, Fused
from kvstow.integrations.mlx_lm.pairs import Arrays
from kvstow.integrations.mlx_lm.rows import PackedRows
from kvstow.integrations.mlx_lm.stages import Part, Stages, put_together


class PackedBatchKVCache(Eager):
    """One layer's rows under a turbo scheme, fetched eagerly.

    Args:
        caches: Of one class, one scheme and one row each; they are not changed. The first
            one also says how a row that leaves the batch is kept, see `PackedKVCache`.

    Attributes:
        scheme: The scheme of every row.

    Raises:
        ValueError: If the caches cannot be in one batch.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._blank = caches[0].fresh()
        for cache in caches[1:]:
            self._blank.check_same(cache)
        self.scheme = self._blank.scheme
        self._counts = Counts([Row(cache.offset) for cache in caches])
        self._stages = Stages.merge(caches, fused=self.fused)
        self._dtype = next((c.dtype for c in caches if c.offset), mx.float32)
        self._right: list[int] = []  # pads behind each row's last token
        self._held: list[Part] = []  # by rows that lay apart during the last append

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, ``(b,)``."""
        return self._counts.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Fetched, Fetched]:
        """Append ``(b, h, s, d)`` keys and values; returns what this append attends to.

        Raises:
            UnsupportedModel: If the head_dim cannot be stored.
            RuntimeError: If the prompt was padded, and there are only pads to come.
        """
        check_widths(self.scheme, keys, values)
        self._settle()
        self._right = self._counts.append(keys.shape[2])
        self._dtype = keys.dtype
        stages = self._stages
        if stages.packed is not None and stages.plain is None:
            stages.append_packed(stages.packed, keys, values)
            return self._hand_out()
        start = self.scheme.start_tokens or 1
        packing = [i for i in stages.of(packed=False) if self._rows[i].n_tokens >= start]
        attended, held = stages.append(keys, values, packing)
        self._held = held if len(held) > 1 else []
        if len(attended) > 1:
            return put_together(attended, self._dtype)
        ((_, only),) = attended
        return only if isinstance(only, tuple) else self._hand_out()

    def keys_and_values(self) -> Arrays:
        """Every token held, decoded: ``(b, h, width, d)``, pads included."""
        if self._held:
            return put_together(self._held, self._dtype)
        return self._stages.keys_and_values(self._dtype)

    def window(self) -> PackedWindow | None:
        """The stored planes, not decoded; None where a row is plain."""
        packed, plain = self._stages.packed, self._stages.plain
        if packed is None or plain is not None:
            return None
        return packed.window(self.scheme, fused=self.fused)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of an append of `N` tokens, ``(b, 1, N, width)`` if rows are padded."""
        self._settle()
        if self._is_unpadded():
            size = self.size()
            mask = create_attention_mask(
                N, offset=size, return_array=return_array, window_size=window_size
            )
            return masks.known(mask, masks.of_offset(N, size, window_size))
        least = min((row.n_tokens for row in self._rows), default=0)
        return self._stages.make_mask(N, window_size, least)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say which of the tokens to come are pads, row by row.

        Args:
            left_padding: Pads before a row's first token; no row may have one yet.
            lengths: Tokens to come.
            right_padding: Pads after them, until `finalize`.

        Raises:
            ValueError: If rows with tokens are padded on the left, or `lengths` lacks.
        """
        self._settle()
        if left_padding is not None:
            if not self.empty():
                raise ValueError("only an empty batch can be padded on the left")
            self._stages.pad_left(left_padding)
            for row, n in zip(self._rows, left_padding, strict=True):
                row.left += n
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right_padding needs lengths, the tokens before the pads")
            for row, n in zip(self._rows, lengths, strict=True):
                row.due = n

    def finalize(self) -> None:
        """The padded prompt was read: no more pads are to come."""
        self._settle()
        for row in self._rows:
            row.due = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._settle()
        self._stages.filter(batch_indices)
        self._counts = Counts([replace(self._rows[i]) for i in batch_indices])

    def extend(self, other: Self) -> None:
        """Add the rows of `other`, which must not be used any more, after these.

        Raises:
            ValueError: If they cannot be in one batch.
        """
        self._blank.check_same(other._blank)
        self._settle()
        other._settle()
        if self.empty():
            self._dtype = other._dtype
        self._stages.extend(other._stages)
        self._counts = Counts(self._rows + other._rows)

    def extract(self, idx: int) -> Any:
        """A row alone, in a cache of the class that it came in."""
        self._settle()
        if not self._rows[idx].n_tokens:
            return self._blank.fresh()
        row = self._stages.extract(idx)
        mx.eval(row.state)  # or it would keep the whole batch until somebody reads it
        return self._blank.refilled(row, self._dtype)

    def is_trimmable(self) -> bool:
        """Whether mlx-lm's caches can forget the last tokens."""
        return all(group.is_trimmable for _, group in self._stages.groups())

    def trim(self, n: int) -> int:
        """Forget up to `n` tokens from the end of every row; returns how many of the longest.

        A row that has no more is fresh, and plain again.
        """
        self._settle()
        n = min(n, self.n_tokens)
        gone = [i for i, row in enumerate(self._rows) if row.n_tokens <= n]
        self._stages.ask(lambda group: group.trim(n))
        for row in self._rows:
            row.n_tokens = max(row.n_tokens - n, 0)
        if n and gone:
            left = [i for i in range(len(self._rows)) if i not in gone]
            self.filter(left)
            self.extend(type(self)([self._blank.fresh() for _ in gone]))
            order = left + gone
            self.filter([order.index(i) for i in range(len(order))])
        return n

    def size(self) -> int:
        """Tokens and pads of a row that the next append can see."""
        return max(self._stages.ask(lambda group: group.size), default=0)

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return self.n_tokens == 0

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest row."""
        return max((row.n_tokens for row in self._rows), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, pads and unused capacity included."""
        return sum(self._stages.ask(lambda group: group.nbytes))

    @property
    def capacity(self) -> int:
        """Tokens that fit into a row before the arrays grow."""
        return max(self._stages.ask(lambda group: group.capacity), default=0)

    @property
    def n_elements(self) -> int:
        """Key and value elements that the allocated memory has room for."""
        return sum(self._stages.ask(lambda group: group.n_elements))

    def stored_rows(self) -> Iterator[tuple[PackedKeys, PackedValues]]:
        """See `Eager.stored_rows`."""
        self._settle()
        for i in self._stages.of(packed=True):
            row = self._stages.extract(i)
            if isinstance(row, PackedRows):
                yield row.planes(self.scheme)

    @property
    def state(self) -> list[Any]:
        """What mlx-lm evaluates after each chunk of a prompt; nothing sets it."""
        return [cache.state for _, group in self._stages.groups() for cache in group.caches]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A batch of its own, without copying data until one of the two grows."""
        twin = copy.copy(self)
        twin._stages = self._stages.copy()
        twin._counts = self._counts.copy()
        return twin

    def _settle(self) -> None:
        """Before the next operation: the pads of the last append move out of its way."""
        if any(self._right):
            self._stages.pad_right(self._right)
        self._right, self._held = [], []

    @property
    def _rows(self) -> list[Row]:
        return self._counts.rows

    def _is_unpadded(self) -> bool:
        n_tokens = {row.n_tokens for row in self._rows}
        return n_tokens == {self.size()} and not any(row.left for row in self._rows)


class DeferredBatchKVCache(Deferred, PackedBatchKVCache):
    """A `PackedBatchKVCache` that hands out its packed window."""


class FusedBatchKVCache(Fused, PackedBatchKVCache):
    """A `PackedBatchKVCache` whose packed window is for the kernels."""
