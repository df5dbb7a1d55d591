"""Caches of mlx-lm and of kvstow as records of a snapshot, and back.

A cache is made again in the place of a fresh one of the model's, which decides its class
and how it hands out what it stores: neither is in a file. Capacity that holds no token is
not saved.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.errors import SnapshotError
from kvstow.integrations.mlx_lm.cache import DeferredKVCache, FusedKVCache, PackedKVCache
from kvstow.integrations.mlx_lm.pairs import as_pairs
from kvstow.integrations.mlx_lm.rotating import (
    DeferredRotatingKVCache,
    FusedRotatingKVCache,
    PackedRotatingKVCache,
)
from kvstow.integrations.mlx_lm.rows import PackedRows
from kvstow.scheme import Affine
from kvstow.snapshot import Record, Source
from kvstow.snapshot.record import AFFINE, EXACT, OF_ROWS, PACKED

DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}
_PACKED_CACHES = (PackedKVCache, DeferredKVCache, FusedKVCache)
_PACKED_SLIDING = (PackedRotatingKVCache, DeferredRotatingKVCache, FusedRotatingKVCache)
_KINDS: Mapping[type, str] = {
    **dict.fromkeys((KVCache, ConcatenateKVCache, QuantizedKVCache, *_PACKED_CACHES), "full"),
    **dict.fromkeys((RotatingKVCache, *_PACKED_SLIDING), "sliding"),
    ChunkedKVCache: "chunked",
    ArraysCache: "arrays",
    CacheList: "list",
}
Arrays = dict[str, mx.array]
Read = Callable[[str], mx.array]


def describe(cache: Any) -> tuple[Record, Arrays]:
    """A cache as a record, and its tensors under the names that the record gives them.

    Nothing is computed.

    Raises:
        SnapshotError: If there is no record of such a cache.
    """
    kind = _KINDS.get(type(cache))
    if kind is None:
        raise SnapshotError(f"a snapshot cannot hold a {type(cache).__name__}")
    if kind == "list":
        members = [describe(member) for member in cache.caches]
        arrays = {f"{i}.{k}": x for i, (_, own) in enumerate(members) for k, x in own.items()}
        return Record(kind, members=tuple(record for record, _ in members)), arrays
    if kind == "arrays":
        listed, *of_rows = cache.state
        names = (*map(str, range(len(listed))), *OF_ROWS)
        found = dict(zip(names, (*listed, *of_rows), strict=True))
        present = {name: x for name, x in found.items() if x is not None}
        return Record(kind, {"size": len(listed)}), present
    return _attention(cache, kind)


def sources(arrays: Mapping[str, mx.array], prefix: str) -> dict[str, Source]:
    """Arrays as tensors to be written, which are computed when their turn comes."""
    return {
        prefix + name: Source(_dtype(x), x.shape, partial(to_numpy, x))
        for name, x in arrays.items()
    }


def sources_now(arrays: Mapping[str, mx.array], prefix: str) -> dict[str, Source]:
    """As `sources`, but computed now: no data is copied, and another thread can read them.

    A view in numpy keeps its array, so nothing that happens to the cache later changes it.
    """
    bits = {name: _bits(x) for name, x in arrays.items()}
    mx.eval(bits)
    return {
        prefix + name: Source(_dtype(x), x.shape, partial(np.asarray, np.asarray(bits[name])))
        for name, x in arrays.items()
    }


def restored(fresh: Any, record: Record, read: Read, prefix: str) -> Any:
    """The cache of a record.

    Args:
        fresh: An empty cache of the same kind and scheme.
        record: What to make of it.
        read: Returns a tensor by its name.
        prefix: Of the names of the record's own.
    """
    if record.kind == "list":
        pairs = enumerate(zip(fresh.caches, record.members, strict=True))
        return CacheList(*(restored(c, r, read, f"{prefix}{i}.") for i, (c, r) in pairs))
    if record.kind == "arrays":
        own = dict.fromkeys(record.tensor_names()) | _read_some(record, read, prefix)
        listed = [own[str(i)] for i in range(record.numbers["size"])]
        return ArraysCache.from_state((listed, *(own[name] for name in OF_ROWS)))
    if record.stage == "empty":
        return fresh
    arrays = tuple(read(prefix + name) for name in record.tensor_names())
    return type(fresh).from_state(_state(fresh, record, arrays))


def to_numpy(x: mx.array) -> npt.NDArray[Any]:
    """The elements of an array, not copied; bfloat16 as its bits in uint16."""
    return np.asarray(_bits(x))


def to_mlx(x: npt.NDArray[Any], dtype: str) -> mx.array:
    """The inverse of `to_numpy`."""
    array = mx.array(x)
    return array.view(mx.bfloat16) if dtype == "BF16" else array


def _attention(cache: Any, kind: str) -> tuple[Record, Arrays]:
    stage, arrays = _stage(cache)
    numbers = {"offset": int(cache.offset)}
    rows: Any = cache
    if kind == "sliding":
        rows = cache if isinstance(cache, RotatingKVCache) else cache.rows().caches[0]
        numbers |= {"keep": rows.keep, "max_size": rows.max_size, "index": int(rows._idx)}
    elif kind == "chunked":
        numbers |= {"chunk_size": cache.chunk_size, "start_position": int(cache.start_position)}
    held = numbers["offset"] - numbers.get("start_position", 0)
    if stage == "empty" or not held:
        stage, arrays = "empty", {}
    # An arrays' end is capacity; where a window has forgotten tokens, all of it is held.
    arrays = {k: x if x.shape[2] <= held else x[:, :, :held] for k, x in arrays.items()}
    is_turbo = isinstance(cache, _PACKED_CACHES + _PACKED_SLIDING)
    if isinstance(cache, QuantizedKVCache):
        scheme: Any = Affine(cache.bits, cache.group_size)
    else:
        scheme = cache.scheme if is_turbo else Record(kind).scheme
    dtype = DTYPES[cache.dtype] if is_turbo else ""
    return Record(kind, numbers, scheme, stage, dtype), arrays


def _stage(cache: Any) -> tuple[str, Arrays]:
    """Whether tokens are exact, packed or affine, and their arrays, capacity included."""
    if isinstance(cache, _PACKED_CACHES):
        arrays, is_packed = cache.state[:2]
    elif isinstance(cache, _PACKED_SLIDING):
        rows, is_packed = cache.rows(), cache.is_packed
        if isinstance(rows, PackedRows):
            keys, values = rows.planes(cache.scheme)
            arrays = (*keys, *values)
        else:
            arrays = (rows.caches[0].keys, rows.caches[0].values)
    elif isinstance(cache, QuantizedKVCache):
        if cache.keys is None or cache.values is None:
            return "empty", {}
        return "affine", dict(zip(AFFINE, (*cache.keys, *cache.values), strict=True))
    else:
        arrays, is_packed = (cache.keys, cache.values), False
    if arrays[0] is None:
        return "empty", {}
    names = PACKED if is_packed else EXACT
    return ("packed" if is_packed else "exact"), dict(zip(names, arrays, strict=True))


def _state(fresh: Any, record: Record, arrays: tuple[mx.array, ...]) -> tuple[Any, ...]:
    """What ``from_state`` of the cache's class takes."""
    n = record.numbers
    is_packed = record.stage == "packed"
    if isinstance(fresh, _PACKED_CACHES):
        return (arrays, is_packed, n["offset"], str(fresh.scheme), _mlx_name(record.dtype))
    if record.kind == "sliding":
        where = (n["offset"], n["keep"], n["max_size"], n["index"])
        if isinstance(fresh, RotatingKVCache):
            return (*arrays, *where)
        pairs: Any = [arrays]
        if is_packed:
            pairs = as_pairs(PackedKeys(*arrays[:3]), PackedValues(*arrays[3:]))
        of_caches = tuple((*pair, *where) for pair in pairs)
        return (of_caches, is_packed, str(fresh.scheme), _mlx_name(record.dtype))
    if record.stage == "affine":
        return (arrays[:3], arrays[3:], n["offset"], fresh.group_size, fresh.bits)
    if record.kind == "chunked":
        return (*arrays, n["offset"], n["chunk_size"], n["start_position"])
    return arrays if isinstance(fresh, ConcatenateKVCache) else (*arrays, n["offset"])


def _read_some(record: Record, read: Read, prefix: str) -> dict[str, Any]:
    found = {}
    for name in record.tensor_names():
        try:
            found[name] = read(prefix + name)
        except KeyError:  # it was None
            continue
    return found


def _bits(x: mx.array) -> mx.array:
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x


def _dtype(x: mx.array) -> str:
    if x.dtype not in DTYPES:
        raise SnapshotError(f"a snapshot cannot hold numbers of {x.dtype}")
    return DTYPES[x.dtype]


def _mlx_name(dtype: str) -> str:
    names = {said: known for known, said in DTYPES.items()}
    return str(names[dtype]).removeprefix("mlx.core.")
