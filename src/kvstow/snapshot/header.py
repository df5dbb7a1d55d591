"""The header of a snapshot: bytes to names, places and checksums, and back.

`docs/format.md` has the rules. A snapshot is a safetensors file whose header begins in
one fixed way, so that what it is, its version and its checksum are read from fixed places
before anything in it is parsed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from kvstow.errors import (
    DamagedSnapshot,
    ForeignSnapshot,
    NewerSnapshot,
    OversizedHeader,
    TruncatedSnapshot,
)

VERSION = 1
MAX_HEADER_BYTES = 1 << 24
LENGTH_BYTES = 8
_OF_BYTES = {1: "BOOL U8 I8", 2: "U16 I16 F16 BF16", 4: "U32 I32 F32", 8: "U64 I64 F64"}
DTYPE_BYTES = {name: n for n, names in _OF_BYTES.items() for name in names.split()}
_BEGIN = b'{"__metadata__":{"kvstow_snapshot":"'
_MIDDLE = b'","xxh3":"'
_AFTER = b'","checksums":"'
_VERSION_AT = LENGTH_BYTES + len(_BEGIN)
_CHECKSUM_AT = _VERSION_AT + 4 + len(_MIDDLE)
FIXED_BYTES = _CHECKSUM_AT + 16 + len(_AFTER)
UNKNOWN = "0" * 16  # a checksum that is not known yet, as long as one that is


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: As safetensors spells it.
        shape: Its axes.
        start: Of its bytes, from the end of the header.
        checksum: XXH3 (64 bits) of its bytes, 16 hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    checksum: str = UNKNOWN

    @property
    def n_bytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Of its bytes."""
        return self.start + self.n_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says.

    Attributes:
        manifest: A JSON object; see `manifest`.
        tensors: In the order of their bytes, without holes.
    """

    manifest: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return max((tensor.end for tensor in self.tensors.values()), default=0)


def encode(header: Header) -> bytes:
    """The first bytes of the file. Their number does not depend on the checksums."""
    sums = {name: tensor.checksum for name, tensor in header.tensors.items()}
    content: dict[str, Any] = {
        "__metadata__": {
            "kvstow_snapshot": f"{VERSION:04}",
            "xxh3": UNKNOWN,
            "checksums": _dump(sums),
            "manifest": _dump(header.manifest),
        }
    }
    for name, x in header.tensors.items():
        content[name] = {
            "dtype": x.dtype,
            "shape": list(x.shape),
            "data_offsets": [x.start, x.end],
        }
    text = _dump(content).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return raw[:_CHECKSUM_AT] + _checksum(raw).encode() + raw[_CHECKSUM_AT + 16 :]


def length(first: bytes, file_bytes: int) -> int:
    """Bytes of the whole header, from the first `FIXED_BYTES` of a file.

    Args:
        first: As many as there are.
        file_bytes: Size of the file.

    Raises:
        ForeignSnapshot: If the file begins otherwise.
        TruncatedSnapshot: If it ends within the header.
        OversizedHeader: If the header claims more than `MAX_HEADER_BYTES`.
        DamagedSnapshot: If it claims fewer than there are.
    """
    fixed = {LENGTH_BYTES: _BEGIN, _VERSION_AT + 4: _MIDDLE, _CHECKSUM_AT + 16: _AFTER}
    for at, expected in fixed.items():
        got = first[at : at + len(expected)]
        if got != expected[: len(got)]:
            raise ForeignSnapshot(
                "this is not a snapshot of kvstow (mlx-lm's own prompt caches are not read)"
            )
    n_bytes = int.from_bytes(first[:LENGTH_BYTES], "little") + LENGTH_BYTES
    if len(first) >= LENGTH_BYTES and n_bytes > MAX_HEADER_BYTES:
        raise OversizedHeader(
            f"the header claims {n_bytes} bytes; kvstow writes at most {MAX_HEADER_BYTES}"
        )
    if len(first) >= FIXED_BYTES > n_bytes:
        raise DamagedSnapshot(f"the header claims {n_bytes} bytes, fewer than any has")
    if len(first) < FIXED_BYTES or file_bytes < n_bytes:
        raise TruncatedSnapshot(f"the file ends within its header, after {file_bytes} bytes")
    return n_bytes


def decode(raw: bytes) -> Header:
    """What a whole header says, once its checksum fits.

    Args:
        raw: The header, the length at its beginning included.

    Raises:
        DamagedSnapshot: If the checksum does not fit, or the header contradicts itself.
        NewerSnapshot: If the version is not known.
    """
    if raw[_CHECKSUM_AT : _CHECKSUM_AT + 16] != _checksum(raw).encode():
        raise DamagedSnapshot("the checksum of the header does not fit")
    version = raw[_VERSION_AT : _VERSION_AT + 4]
    if version != f"{VERSION:04}".encode():
        raise NewerSnapshot(
            f"the format has version {version.decode(errors='replace')}; "
            f"this program reads version {VERSION:04}"
        )
    content = load(raw[LENGTH_BYTES:])
    metadata = content.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        damaged("the metadata are not strings")
    sums, manifest = (load(metadata.get(key, "")) for key in ("checksums", "manifest"))
    if sums.keys() != content.keys():
        damaged("tensors and checksums have different names")
    tensors, end = {}, 0
    for name, said in content.items():
        tensors[name] = tensor = _tensor(name, said, end, sums[name])
        end = tensor.end
    return Header(manifest, tensors)


def load(text: str | bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DamagedSnapshot: If `text` is something else.
    """
    try:
        content = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedSnapshot("the header is not JSON") from error
    if not isinstance(content, dict):
        damaged("the header holds no JSON object")
    return content


def damaged(why: str) -> NoReturn:
    """Refuse the file.

    Raises:
        DamagedSnapshot: Always.
    """
    raise DamagedSnapshot(f"the snapshot contradicts itself: {why}")


def is_count(x: Any) -> bool:
    """Whether `x` is a whole number that a size can be."""
    return type(x) is int and 0 <= x < 1 << 48


def _is_axis(x: Any) -> bool:
    return is_count(x) and x < 1 << 31


def _tensor(name: str, said: Any, start: int, checksum: Any) -> TensorInfo:
    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        damaged(f"tensor {name[:80]!r} is not described")
    dtype, shape, place = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        damaged(f"tensor {name[:80]!r} has an unknown dtype")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_axis, shape)):
        damaged(f"tensor {name[:80]!r} has no shape")
    if not isinstance(checksum, str) or len(checksum) != len(UNKNOWN):
        damaged(f"tensor {name[:80]!r} has no checksum")
    tensor = TensorInfo(dtype, tuple(shape), start, checksum)
    if place != [start, tensor.end]:
        damaged(f"tensor {name[:80]!r} is not where the one before it ends")
    return tensor


def _checksum(raw: bytes) -> str:
    """Of the header with zeros in the place of its own checksum."""
    state = xxhash.xxh3_64(raw[:_CHECKSUM_AT])
    state.update(UNKNOWN.encode())
    state.update(raw[_CHECKSUM_AT + 16 :])
    return state.hexdigest()


def _dump(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        damaged("a name is given twice")
    return content


def _no_constant(name: str) -> NoReturn:
    damaged(f"{name} is no number of JSON")
