"""GGUF to a directory that mlx-lm loads, made once and kept in the cache.

The directory's name holds a hash of the file's contents, the dtype and this
converter's version. It is filled under a temporary name and renamed when it is
complete, so that what has the right name is whole, and two processes that
convert the same file at once both succeed.
"""

import hashlib
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from kvstow.cache_dir import Progress, cache_dir, file_sha256
from kvstow.errors import ModelFileError
from kvstow.models.architectures import architecture_of, make_config
from kvstow.models.gguf_file import GgufFile, read_gguf
from kvstow.models.tokenizer import save_tokenizer
from kvstow.models.weights import DTYPES, check_dtype, check_kinds, kept_tensors, write_weights

CONVERTER_VERSION = 2
ABANDONED_AFTER_S = 24 * 3600


def convert(path: Path, dtype: str, progress: Progress | None = None) -> Path:
    """The directory with the model of the GGUF file at `path`, converted unless it already is.

    Args:
        path: A GGUF file of llama, qwen2, qwen3 or gemma3.
        dtype: float32, float16 or bfloat16.
        progress: Called with bytes done, bytes in all, and what is being done.

    Raises:
        MissingDependency: If gguf, transformers or tokenizers is not installed.
        ModelFileError: If the file cannot be converted, or the cache not written.
    """
    check_dtype(dtype)
    gguf = read_gguf(path)
    config = make_config(gguf) | {"torch_dtype": dtype}
    check_kinds(gguf)
    target = converted_dir(path, dtype, progress)
    if target.is_dir():
        return target
    try:
        _make(gguf, config, dtype, target, progress)
    except OSError as error:
        raise ModelFileError(
            f"cannot write the converted model to {target.parent}: {error}; "
            "KVSTOW_CACHE names another directory"
        ) from error
    return target


def converted_dir(path: Path, dtype: str, progress: Progress | None = None) -> Path:
    """Where the conversion of the file at `path` to `dtype` is kept, once it is made."""
    contents = file_sha256(path, progress)
    key = hashlib.sha256(f"{contents}|{dtype}|{CONVERTER_VERSION}".encode()).hexdigest()
    return cache_dir() / "models" / f"{path.stem}-{dtype}-{key[:16]}"


def _make(
    gguf: GgufFile, config: dict[str, Any], dtype: str, target: Path, progress: Progress | None
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    _check_space(gguf, dtype, target.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    try:
        (unfinished / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
        save_tokenizer(gguf, architecture_of(gguf), unfinished)
        write_weights(gguf, config, dtype, unfinished / "model.safetensors", progress)
        unfinished.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same result
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}."


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes left; a young one may still be at work."""
    for left in target.parent.glob(f"{_prefix(target)}*"):
        if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
            shutil.rmtree(left, ignore_errors=True)


def _check_space(gguf: GgufFile, dtype: str, folder: Path) -> None:
    needed = sum(tensor.size for tensor in kept_tensors(gguf)) * DTYPES[dtype][1]
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelFileError(
            f"converting {gguf.path.name} to {dtype} needs {needed / 1e9:.1f} GB in {folder}, "
            f"{free / 1e9:.1f} GB is free; KVSTOW_CACHE names another directory"
        )
