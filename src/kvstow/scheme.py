"""How a KV cache is quantised, as a value: ``turbo:k8v3``.

A `Scheme` is what users type, what files record and what cache keys contain,
so it has exactly one spelling: ``Scheme.parse(str(s)) == s``. Nothing else
configures quantisation::

    off                                   the host's own cache
    affine:<4|8>[g<32|64>]                mlx-lm's QuantizedKVCache; g64 unless said
    turbo[:k<2|4|5|8>v<2|3|4|5|8>][+option...]   TurboQuant KV; bare turbo is turbo:k8v3

Options of turbo, sorted: ``+search`` (each group takes the best of several grids),
``+start<N>`` (a row stays plain until it holds N tokens), ``+stored`` (even the first
append attends to what is stored). None changes the format or the bytes of a token;
``+search`` only costs time to encode.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from kvstow.errors import SchemeError, UnsupportedModel

KEY_BITS = (2, 4, 5, 8)
VALUE_BITS = (2, 3, 4, 5, 8)
AFFINE_BITS = (4, 8)
AFFINE_GROUP_SIZES = (32, 64)
DEFAULT_AFFINE_GROUP_SIZE = 64
HEAD_DIMS = (64, 128, 256, 512)
GROUP_SIZE = 32
SCALE_BYTES = 2  # float16

GRAMMAR = (
    "off | affine:<4|8>[g<32|64>] | "
    "turbo[:k<2|4|5|8>v<2|3|4|5|8>][+search][+start<N>][+stored], "
    "for example turbo:k8v3"
)
_AFFINE = re.compile(r"affine:(?P<bits>\d{1,9})(?:g(?P<group>\d{1,9}))?", re.ASCII)
_TURBO = re.compile(
    r"turbo(?::k(?P<k>\d{1,9})v(?P<v>\d{1,9}))?(?P<options>(?:\+[a-z]+\d*)*)", re.ASCII
)
_FLAGS = ("search", "stored")  # options without a number, named as their fields
_START = re.compile(r"start(?P<tokens>[1-9]\d{0,11})", re.ASCII)


class Scheme:
    """Base of `Off`, `Affine` and `Turbo`; `parse` makes the right one."""

    __slots__ = ()
    default: ClassVar[str] = "turbo:k8v3"

    @staticmethod
    def parse(text: "str | Scheme | None") -> "Scheme":
        """Read a scheme in the grammar above; None is ``off``, a `Scheme` is returned as it is.

        >>> Scheme.parse("turbo")
        Turbo(key_bits=8, value_bits=3, start_tokens=None, stored=False, search=False)
        >>> str(Scheme.parse("affine:8g64"))
        'affine:8'

        Raises:
            SchemeError: If `text` is not in the grammar or a width is not allowed.
        """
        if isinstance(text, Scheme):
            return text
        if text is None or text == "off":
            return Off()
        if not isinstance(text, str):
            raise SchemeError(f"a scheme is a string, got {text!r}; expected {GRAMMAR}")
        if match := _AFFINE.fullmatch(text):
            return Affine(int(match["bits"]), int(match["group"] or DEFAULT_AFFINE_GROUP_SIZE))
        if match := _TURBO.fullmatch(text):
            options = _parse_options(match["options"].split("+")[1:])
            if match["k"] is None:
                return Turbo(**options)
            return Turbo(int(match["k"]), int(match["v"]), **options)
        raise SchemeError(f"unknown scheme {text!r}; expected {GRAMMAR}")

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse a model before it loads, not on its first token.

        Raises:
            UnsupportedModel: If vectors of `head_dim` elements cannot be stored.
        """

    def bytes_per_token(self, head_dim: int, *, dtype_bytes: int = 2) -> int:
        """Stored bytes for one token of one KV head, keys and values together.

        Args:
            head_dim: Elements of one key and of one value.
            dtype_bytes: Bytes of one element of the model's own activations.
        """
        raise NotImplementedError

    def bits_per_value(self, head_dim: int) -> float:
        """Stored bits per key or value element, all metadata included.

        >>> Scheme.parse("turbo:k8v3").bits_per_value(128)
        6.25
        """
        return self.bytes_per_token(head_dim) * 8 / (2 * head_dim)


@dataclass(frozen=True, slots=True)
class Off(Scheme):
    """The host's own cache, unchanged."""

    def __str__(self) -> str:
        return "off"

    def bytes_per_token(self, head_dim: int, *, dtype_bytes: int = 2) -> int:
        """See `Scheme.bytes_per_token`."""
        return 2 * head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Affine(Scheme):
    """mlx-lm's own affine quantisation of keys and values, for comparison.

    Args:
        bits: Bits per element, one of `AFFINE_BITS`.
        group_size: Elements that share a scale and a bias.

    Raises:
        SchemeError: If a field is not in its table.
    """

    bits: int = 8
    group_size: int = DEFAULT_AFFINE_GROUP_SIZE

    def __post_init__(self) -> None:
        _check_in("affine bits", self.bits, AFFINE_BITS)
        _check_in("affine group size", self.group_size, AFFINE_GROUP_SIZES)

    def __str__(self) -> str:
        default = self.group_size == DEFAULT_AFFINE_GROUP_SIZE
        return f"affine:{self.bits}" + ("" if default else f"g{self.group_size}")

    def check_head_dim(self, head_dim: int) -> None:
        """See `Scheme.check_head_dim`.

        Raises:
            UnsupportedModel: As there.
        """
        if head_dim % self.group_size:
            raise UnsupportedModel(
                f"{self} needs a head_dim that is a multiple of {self.group_size}, "
                f"the model has {head_dim}"
            )

    def bytes_per_token(self, head_dim: int, *, dtype_bytes: int = 2) -> int:
        """See `Scheme.bytes_per_token`. Scales and biases take the model's own dtype."""
        metadata = 2 * (head_dim // self.group_size) * dtype_bytes
        return 2 * (head_dim * self.bits // 8 + metadata)


@dataclass(frozen=True, slots=True)
class Turbo(Scheme):
    """TurboQuant KV: affine keys, Hadamard-rotated Lloyd-Max values, groups of 32.

    Args:
        key_bits: Bits per key element, one of `KEY_BITS`.
        value_bits: Bits per value element, one of `VALUE_BITS`.
        start_tokens: A row stays plain until it holds this many tokens; None: from the first.
        stored: Whether even the first append attends to what is stored.
        search: Whether each group takes the best of several grids, see `codec.search`.

    Raises:
        SchemeError: If a width is not in its table, or `start_tokens` is not positive.
    """

    key_bits: int = 8
    value_bits: int = 3
    start_tokens: int | None = None
    stored: bool = False
    search: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Bits of a key code and of a value code."""
        return self.key_bits, self.value_bits

    def __post_init__(self) -> None:
        _check_in("key bits", self.key_bits, KEY_BITS)
        _check_in("value bits", self.value_bits, VALUE_BITS)
        if self.start_tokens is not None and self.start_tokens < 1:
            raise SchemeError(f"+start<N> needs N >= 1, got {self.start_tokens}")

    def __str__(self) -> str:
        start = "" if self.start_tokens is None else f"+start{self.start_tokens}"
        flags = {name: f"+{name}" if getattr(self, name) else "" for name in _FLAGS}
        return f"turbo:k{self.key_bits}v{self.value_bits}{flags['search']}{start}{flags['stored']}"

    def check_head_dim(self, head_dim: int) -> None:
        """See `Scheme.check_head_dim`.

        Raises:
            UnsupportedModel: As there.
        """
        if head_dim not in HEAD_DIMS:
            raise UnsupportedModel(
                f"{self} needs head_dim in {HEAD_DIMS}, the model has {head_dim}"
            )

    def bytes_per_token(self, head_dim: int, *, dtype_bytes: int = 2) -> int:  # noqa: ARG002
        """See `Scheme.bytes_per_token`. The same for every dtype of the model.

        >>> Turbo().bytes_per_token(128)  # bfloat16 needs 512
        200
        """
        n_groups = head_dim // GROUP_SIZE
        keys = head_dim * self.key_bits // 8 + 2 * n_groups * SCALE_BYTES
        values = head_dim * self.value_bits // 8 + n_groups * SCALE_BYTES
        return keys + values


def _check_in(name: str, got: int, allowed: tuple[int, ...]) -> None:
    if got not in allowed:
        raise SchemeError(f"{name} must be one of {allowed}, got {got}; expected {GRAMMAR}")


def _parse_options(words: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        value: int | bool
        if word in _FLAGS:
            name, value = word, True
        elif match := _START.fullmatch(word):
            name, value = "start_tokens", int(match["tokens"])
        else:
            raise SchemeError(f"unknown option '+{word}'; expected {GRAMMAR}")
        if name in options:
            raise SchemeError(f"option '+{word}' is given twice; expected {GRAMMAR}")
        options[name] = value
    return options
