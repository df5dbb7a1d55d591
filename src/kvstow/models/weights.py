"""Write the tensors of a GGUF file as one safetensors file, and count those of a directory.

A large model is never held in memory: a block of rows is read, decoded to float32 by gguf,
cast and written.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstow.cache_dir import Progress
from kvstow.errors import ModelFileError
from kvstow.models.architectures import ROPE_FACTORS, mlx_name, unpermute
from kvstow.models.gguf_file import GgufFile, Tensor
from kvstow.require import require

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
BLOCK_ELEMENTS = 1 << 22
FLOAT16_MAX = 65504.0


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that weights cannot be converted to.

    Raises:
        ModelFileError: If `dtype` is not a key of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ModelFileError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")


def kept_tensors(gguf: GgufFile) -> list[Tensor]:
    """The tensors that hold weights."""
    return [tensor for name, tensor in gguf.tensors.items() if name != ROPE_FACTORS]


def stored_elements(files: Iterable[Path]) -> Counter[str]:
    """How many elements of each of `DTYPES` some safetensors files hold, by their headers.

    Empty if a header is damaged: loading says what is wrong with it.
    """
    dtypes = {name: dtype for dtype, (name, _) in DTYPES.items()}
    found: Counter[str] = Counter()
    try:
        for path in files:
            for tensor in _read_header(path):
                if (dtype := dtypes.get(tensor["dtype"])) is not None:
                    found[dtype] += math.prod(tensor["shape"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return Counter()
    return found


def _read_header(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(n_bytes, path.stat().st_size)))
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


def check_kinds(gguf: GgufFile) -> None:
    """Refuse, before a long conversion, a quantisation that gguf cannot decode.

    Raises:
        ModelFileError: If there is one.
    """
    quants, constants = require("gguf.quants"), require("gguf.constants")
    for kind in {tensor.kind for tensor in kept_tensors(gguf)}:
        _, block_bytes = constants.GGML_QUANT_SIZES[kind]
        try:
            quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise ModelFileError(
                f"{gguf.path} holds weights of type {kind.name}, which cannot be converted"
            ) from error


def write_weights(
    gguf: GgufFile,
    config: dict[str, Any],
    dtype: str,
    out: Path,
    progress: Progress | None = None,
) -> None:
    """Write every weight of `gguf` to the safetensors file `out`, named as mlx-lm names them.

    Raises:
        ModelFileError: If a weight is not finite, or does not fit `dtype`.
    """
    tensors = kept_tensors(gguf)
    architecture = gguf.metadata["general.architecture"]
    total, done = sum(tensor.n_bytes for tensor in tensors), 0
    data = np.memmap(gguf.path, np.uint8, "r")
    with out.open("wb") as file:
        file.write(_header(tensors, architecture, dtype))
        for tensor in tensors:
            packed = _packed_rows(data, tensor, architecture, config)
            for values in _decoded(packed, tensor):
                if architecture == "gemma3" and tensor.name.endswith("norm.weight"):
                    values = values - 1
                _check_values(values, dtype, gguf.path, tensor.name)
                file.write(_cast(values, dtype).tobytes())
            done += tensor.n_bytes
            if progress:
                progress(done, total, f"Converting {gguf.path.name}")


def _header(tensors: list[Tensor], architecture: str, dtype: str) -> bytes:
    """Length, then JSON: dtype, shape and byte range of each tensor, in writing order."""
    name, item_bytes = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.size * item_bytes
        key = str(mlx_name(architecture, tensor.name))
        header[key] = {"dtype": name, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _packed_rows(
    data: np.ndarray, tensor: Tensor, architecture: str, config: dict[str, Any]
) -> np.ndarray:
    n_rows = tensor.shape[0]  # a vector (a norm, a bias) has one element in a row
    rows = data[tensor.start : tensor.start + tensor.n_bytes].reshape(n_rows, -1)
    if architecture == "llama" and ".attn_q." in tensor.name:
        return unpermute(rows, config["num_attention_heads"])
    if architecture == "llama" and ".attn_k." in tensor.name:
        return unpermute(rows, config["num_key_value_heads"])
    return rows


def _decoded(packed: np.ndarray, tensor: Tensor) -> Iterator[np.ndarray]:
    dequantize = require("gguf.quants").dequantize
    n_rows = len(packed)
    step = max(1, BLOCK_ELEMENTS * n_rows // max(1, tensor.size))
    for start in range(0, n_rows, step):
        yield dequantize(np.ascontiguousarray(packed[start : start + step]), tensor.kind)


def _check_values(values: np.ndarray, dtype: str, path: Path, name: str) -> None:
    peak = float(np.abs(values).max(initial=0))
    if not np.isfinite(peak):
        raise ModelFileError(f"{path} is damaged: {name!r} holds weights that are not finite")
    if dtype == "float16" and peak > FLOAT16_MAX:
        raise ModelFileError(
            f"{path}: {name!r} holds {peak:g}, too large for float16; use bfloat16 or float32"
        )


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite float32 to `dtype`, rounded to nearest even; bfloat16 as its bits."""
    if dtype != "bfloat16":
        return values.astype(dtype, copy=False)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
