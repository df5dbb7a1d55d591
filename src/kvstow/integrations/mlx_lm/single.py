"""`Single`: what the caches of one request have in common, which is that they can be merged."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

from kvstow.integrations.mlx_lm.batch import PackedBatchKVCache
from kvstow.integrations.mlx_lm.fetch import Eager
from kvstow.integrations.mlx_lm.rows import PackedRows, PlainRows


class Single(Eager):
    """A cache of one request.

    Attributes:
        batch: The class that several of them are merged into.
        dtype: Of the model's keys and values, and of decoded ones.
    """

    batch: ClassVar[type[PackedBatchKVCache]] = PackedBatchKVCache
    dtype: mx.Dtype

    @property
    @abstractmethod
    def offset(self) -> int:
        """Position of the next token."""

    @property
    @abstractmethod
    def is_packed(self) -> bool:
        """Whether the tokens are stored in the scheme's format yet."""

    @property
    def configuration(self) -> str:
        """What makes two caches of one class alike."""
        return str(self.scheme)

    @abstractmethod
    def fresh(self) -> Self:
        """An empty cache of this kind."""

    @abstractmethod
    def rows(self) -> PlainRows | PackedRows:
        """This row in mlx-lm's own caches, to be merged."""

    @abstractmethod
    def refilled(self, rows: PlainRows | PackedRows, dtype: mx.Dtype) -> Self:
        """A cache of this kind with a row that leaves a batch."""

    @classmethod
    def merge(cls, caches: Sequence["Single"]) -> PackedBatchKVCache:
        """One batch of the rows of `caches`, which stay as they are.

        Raises:
            ValueError: If their classes or configurations differ.
        """
        return cls.batch(caches)

    def check_same(self, other: Any) -> None:
        """Refuse a cache that cannot be in one batch with this one.

        Raises:
            ValueError: If its class or its configuration differs.
        """
        theirs = getattr(other, "configuration", None)
        if type(other) is not type(self) or theirs != self.configuration:
            raise ValueError(
                f"a batch holds caches of one class and one scheme, got {type(self).__name__} "
                f"({self.configuration}) and {type(other).__name__} ({theirs})"
            )

    @property
    def n_tokens(self) -> int:
        """Tokens held, and those that a window has forgotten."""
        return self.offset

    def empty(self) -> bool:
        """Whether no token was appended, or all were trimmed."""
        return self.offset == 0
