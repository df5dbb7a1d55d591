"""Read a snapshot, as numpy arrays, one tensor at a time; nothing in it is believed unchecked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvstow.errors import DamagedSnapshot, SnapshotError, TruncatedSnapshot
from kvstow.snapshot import header
from kvstow.snapshot.header import TensorInfo
from kvstow.snapshot.manifest import Manifest

NUMPY_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": np.uint16,  # its bits: numpy has no such number
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}


class Snapshot:
    """An open snapshot; use it in a ``with`` block.

    Args:
        path: The file.

    Attributes:
        path: As given.
        manifest: What it holds.
        tensors: Name to place, in the order of the file.
        n_bytes: Size of the file.

    Raises:
        SnapshotError: If it cannot be read, one of its own kinds for each cause.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.n_bytes, self._start = self._read_header()
        except SnapshotError as error:
            self.close()
            raise type(error)(f"{path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name to place, in the order of the file."""
        return self._tensors

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor called `name`; bfloat16 as its bits in uint16.

        Raises:
            DamagedSnapshot: If its checksum does not fit.
            TruncatedSnapshot: If the file ends within it.
            SnapshotError: If it cannot be read.
        """
        info = self.tensors[name]
        raw = np.empty(info.n_bytes, np.uint8)
        try:
            self._file.seek(self._start + info.start)
            n_read = self._file.readinto(raw.data) if info.n_bytes else 0  # type: ignore[attr-defined]
        except OSError as error:
            raise SnapshotError(f"cannot read {self.path}: {error.strerror}") from error
        if n_read != info.n_bytes:
            raise TruncatedSnapshot(f"{self.path}: the file ends within tensor {name}")
        if xxhash.xxh3_64(raw.data).hexdigest() != info.checksum:
            raise DamagedSnapshot(f"{self.path}: the checksum of tensor {name} does not fit")
        array: npt.NDArray[Any] = raw.view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        return array

    def verify(self) -> None:
        """Read every tensor once, and keep none.

        Raises:
            SnapshotError: As `read`.
        """
        for name in self.tensors:
            self.read(name)

    def tokens(self) -> list[int]:
        """The tokens that the cache holds.

        Raises:
            SnapshotError: As `read`.
        """
        return [int(token) for token in self.read("tokens")]

    def _read_header(self) -> tuple[int, int]:
        try:
            n_bytes = self._file.seek(0, 2)
            self._file.seek(0)
            first = self._file.read(header.FIXED_BYTES)
            n_header = header.length(first, n_bytes)
            raw = first + self._file.read(n_header - len(first))
        except OSError as error:
            raise SnapshotError(error.strerror or "it cannot be read") from error
        found = header.decode(raw)
        missing = n_header + found.n_bytes - n_bytes
        if missing > 0:
            raise TruncatedSnapshot(f"the last {missing} of its bytes are missing")
        if missing < 0:
            raise DamagedSnapshot(f"there are {-missing} bytes behind its last tensor")
        self.manifest = Manifest.from_dict(found.manifest)
        self.manifest.check(found.tensors)
        self._tensors = found.tensors
        return n_bytes, n_header
