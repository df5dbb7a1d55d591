"""Read the header of a GGUF file: its metadata, and where each tensor lies.

Only the header is read, and every tensor is checked to lie inside the file, so
a truncated download is refused before any work starts. The format is GGUF
versions 2 and 3, little-endian: magic, version, counts, key-value pairs,
tensor infos, then the tensor data at the next multiple of ``general.alignment``.
"""

import math
import mmap
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvstow.errors import ModelFileError
from kvstow.models.locate import GGUF_MAGIC
from kvstow.require import require

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_T = TypeVar("_T", bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file.

    Args:
        name: llama.cpp's name.
        shape: Outermost axis first, as numpy has it (the file lists them the other way).
        kind: gguf's ``GGMLQuantizationType``.
        start: Position of its first byte in the file.
        n_bytes: Its size in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    start: int
    n_bytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file: metadata by key, tensors by name.

    Nothing says of which type a value is but the file, so each is read by a method
    that checks it.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The metadata `key`, which must be a `kind`; None if the file lacks it.

        Raises:
            ModelFileError: If it is something else.
        """
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:  # a bool would pass for an int
            raise self._wrong(key, _WORDS[kind])
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """The metadata `key`, which must be text.

        Raises:
            ModelFileError: If it is something else, or missing and has no default.
        """
        return self._needed(key, self.get(key, str), default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """The metadata `key`, which must be an integer from `least` on.

        Raises:
            ModelFileError: If it is something else, or missing and has no default.
        """
        value = self._needed(key, self.get(key, int), default)
        if value < least:
            raise self._wrong(key, f"an integer from {least} on", value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """The metadata `key`, which must be a positive number.

        Raises:
            ModelFileError: If it is something else, or missing and has no default.
        """
        value = self._needed(key, self.get(key, float), default)
        if not 0 < value < math.inf:
            raise self._wrong(key, "a positive number", value)
        return value

    def array(self, key: str, kind: type[_T]) -> list[_T]:
        """The metadata `key`, which must be an array of `kind`; empty if the file lacks it.

        Raises:
            ModelFileError: If it is something else.
        """
        values = self.metadata.get(key, [])
        if type(values) is not list or any(type(value) is not kind for value in values):
            raise self._wrong(key, f"an array, each item {_WORDS[kind]}")
        return values

    def _needed(self, key: str, value: _T | None, default: _T | None) -> _T:
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.path} lacks the metadata {key!r}")
        return value

    def _wrong(self, key: str, allowed: str, value: Any = None) -> ModelFileError:
        got = reprlib.repr(self.metadata.get(key, value))
        return ModelFileError(f"{self.path}: metadata {key!r} must be {allowed}, got {got}")


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of the GGUF file at `path`.

    Raises:
        MissingDependency: If gguf is not installed.
        ModelFileError: If the file is not GGUF, is truncated, or is one shard of several.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(GGUF_MAGIC) + 20:
                raise ModelFileError(f"{path} is truncated: it has only {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _read(_Cursor(path, view, size))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error


@dataclass(slots=True)
class _Cursor:
    """A position in the header that never runs past the end of the file."""

    path: Path
    view: Any
    size: int
    at: int = 0

    def take(self, n_bytes: int) -> int:
        """Step over `n_bytes`; returns where they start.

        Raises:
            ModelFileError: If the file ends before.
        """
        start, self.at = self.at, self.at + n_bytes
        if self.at > self.size:
            raise ModelFileError(
                f"{self.path} is truncated: its header needs at least {self.at:,} bytes, "
                f"the file has {self.size:,}"
            )
        return start

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start = self.take(count * struct.calcsize("<" + code))  # checked before it allocates
        return struct.unpack_from(f"<{count}{code}", self.view, start)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        length = self.number("Q")
        start = self.take(length)
        try:
            return bytes(self.view[start : start + length]).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path} is damaged: text that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.number("I"), self.number("Q")
            if item == _STRING:
                return [self.text() for _ in range(count)]
            if item in _SCALARS:
                return list(self.numbers(_SCALARS[item], count))
            kind = item
        raise ModelFileError(f"{self.path} is damaged: metadata of unknown type {kind}")


def _read(cursor: _Cursor) -> GgufFile:
    magic = bytes(cursor.view[: cursor.take(len(GGUF_MAGIC)) + len(GGUF_MAGIC)])
    if magic != GGUF_MAGIC:
        raise ModelFileError(
            f"{cursor.path} is not a GGUF file: expected {GGUF_MAGIC!r}, got {magic!r}"
        )
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ModelFileError(
            f"{cursor.path} is GGUF version {version:#x}; expected one of {VERSIONS}, little-endian"
        )
    n_tensors, n_pairs = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(n_pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    gguf = GgufFile(cursor.path, metadata, {})
    # llama-gguf-split leaves a count of 0 in what it has joined
    if (n_shards := gguf.integer("split.count", 1, least=0)) > 1:
        raise ModelFileError(
            f"{cursor.path} is one of {n_shards} shards; join them first with "
            "llama-gguf-split --merge"
        )
    infos = [_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = gguf.integer("general.alignment", DEFAULT_ALIGNMENT)
    data_start = -(-cursor.at // alignment) * alignment
    for info in infos:
        tensor = _tensor(cursor, data_start, *info)
        gguf.tensors[tensor.name] = tensor
    return gguf


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, n_dims = cursor.text(), cursor.number("I")
    if not 1 <= n_dims <= MAX_DIMS:
        raise ModelFileError(f"{cursor.path} is damaged: tensor {name!r} has {n_dims} axes")
    shape = cursor.numbers("Q", n_dims)[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(
    cursor: _Cursor, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> Tensor:
    constants = require("gguf.constants")
    try:
        kind = constants.GGMLQuantizationType(kind)
        block, block_bytes = constants.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelFileError(
            f"{cursor.path}: tensor {name!r} is of type {kind}, which the installed gguf package "
            "does not know; a newer one may: pip install -U gguf"
        ) from error
    if shape[-1] % block:
        raise ModelFileError(
            f"{cursor.path} is damaged: rows of {name!r} have {shape[-1]} elements, "
            f"not a multiple of {block}"
        )
    tensor = Tensor(name, shape, kind, data_start + offset, math.prod(shape) // block * block_bytes)
    if (end := tensor.start + tensor.n_bytes) > cursor.size:
        raise ModelFileError(
            f"{cursor.path} is truncated: tensor {name!r} ends at byte {end:,}, "
            f"the file has {cursor.size:,}"
        )
    return tensor
