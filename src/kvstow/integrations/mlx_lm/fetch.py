"""How a cache hands out what it stores: decoded, or as a packed window.

Every cache class of this package is of one of the three kinds here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from kvstow.attention.window import PackedWindow
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.integrations.mlx_lm import deferred
from kvstow.scheme import GROUP_SIZE, Turbo

Fetched = mx.array | PackedWindow


class Eager(ABC):
    """A cache that decodes its window for the host's attention.

    Attributes:
        scheme: What its tokens are stored under.
        fused: Whether kernels encode, and attend to its windows, where they can.
    """

    scheme: Turbo
    fused: ClassVar[bool] = False

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Tokens held, of a batch by its longest row; pads are none."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that fit into a row before the arrays grow."""

    @property
    @abstractmethod
    def n_elements(self) -> int:
        """Key and value elements that the allocated memory has room for."""

    @abstractmethod
    def stored_rows(self) -> Iterator[tuple[PackedKeys, PackedValues]]:
        """The planes of each packed row's tokens, ``(1, h, t, *)``, pads left out."""

    @abstractmethod
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Every token held, decoded."""

    @abstractmethod
    def window(self) -> PackedWindow | None:
        """The stored planes, not decoded; None where some tokens are not stored."""

    def _hand_out(self) -> tuple[Fetched, Fetched]:
        return self.keys_and_values()


class Deferred(Eager):
    """Hands its packed window to `deferred.attention`, which leaves the values rotated.

    ``bits`` is what makes mlx-lm's attention call the function that `deferred`
    replaces. A cache that outlives the attachment has no ``bits`` and is eager.
    """

    group_size = GROUP_SIZE

    @property
    def bits(self) -> int:
        """Read by mlx-lm, and not used by `deferred.attention`.

        Raises:
            AttributeError: If nothing is attached, as on a cache without ``bits``.
        """
        if not deferred.is_installed():
            raise AttributeError("bits")
        return self.scheme.key_bits

    def _hand_out(self) -> tuple[Fetched, Fetched]:
        window = self.window() if deferred.is_installed() else None
        if window is None:
            return self.keys_and_values()
        if self.fused and not window.fused:
            window = replace(window, fused=True)
        return window, window


class Fused(Deferred):
    """Marks its window for the kernels; what they do not take is deferred."""

    fused = True
