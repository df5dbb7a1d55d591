"""Write a snapshot at once or not at all, one tensor at a time.

The file is filled under a temporary name in the same directory, with room for checksums
that are not known yet, which are filled in at the end; it is synced, renamed, and the
directory is synced. A crash at any byte leaves the old file or none, and perhaps the
temporary one, which a later write of the same file removes once it is a day old.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from kvstow.errors import SnapshotError
from kvstow.snapshot import header
from kvstow.snapshot.header import Header, TensorInfo
from kvstow.snapshot.manifest import Manifest

ABANDONED_AFTER_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be written.

    Attributes:
        dtype: As safetensors spells it.
        shape: Its axes.
        read: Makes the array, when its turn comes; any dtype of the right size.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the array."""
        return TensorInfo(self.dtype, self.shape).n_bytes


def write(path: Path, manifest: Manifest, sources: Mapping[str, Source]) -> int:
    """Write a snapshot to `path`; returns its bytes. Only its owner may read it.

    Args:
        path: Where; a file that is there is replaced.
        manifest: What the tensors are.
        sources: The tensors, in the order in which they are written.

    Raises:
        SnapshotError: If the file cannot be written. The old one is unchanged then.
    """
    tensors, end = {}, 0
    for name, source in sources.items():
        tensors[name] = tensor = TensorInfo(source.dtype, tuple(source.shape), end)
        end = tensor.end
    manifest.check(tensors)
    try:
        _remove_abandoned(path)
        number, temporary = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
        try:
            with os.fdopen(number, "w+b") as file:
                n_bytes = _fill(file, Header(manifest.as_dict(), tensors), sources)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror}") from error
    return n_bytes


def _fill(file: BinaryIO, head: Header, sources: Mapping[str, Source]) -> int:
    first = header.encode(head)
    if len(first) > header.MAX_HEADER_BYTES:
        raise SnapshotError(f"the header would take {len(first)} bytes: too many layers")
    file.write(first)
    tensors = dict(head.tensors)
    for name, source in sources.items():
        checksum = _write_one(file, source, name)
        tensors[name] = replace(tensors[name], checksum=checksum)
    n_bytes = file.tell()
    file.seek(0)
    file.write(header.encode(Header(head.manifest, tensors)))
    file.flush()
    os.fsync(file.fileno())
    return n_bytes


def _write_one(file: BinaryIO, source: Source, name: str) -> str:
    array = np.ascontiguousarray(source.read())
    if array.nbytes != TensorInfo(source.dtype, source.shape).n_bytes:
        raise SnapshotError(f"tensor {name} has {array.nbytes} bytes, and was announced otherwise")
    raw = array.reshape(-1).view(np.uint8).data
    file.write(raw)
    return xxhash.xxh3_64(raw).hexdigest()


def _sync_directory(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def _remove_abandoned(path: Path) -> None:
    """Remove what killed writers left; a young one may still be at work."""
    for left in path.parent.iterdir():
        if left.name.startswith(_prefix(path)) and left.is_file():
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
                    left.unlink()
