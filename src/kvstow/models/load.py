"""Load a model and its tokenizer, wherever the weights come from, through mlx-lm."""

import warnings
from typing import Any

from kvstow.cache_dir import Progress
from kvstow.errors import KvstowWarning, ModelFileError
from kvstow.models.config import hub_config
from kvstow.models.convert import convert
from kvstow.models.locate import Source, locate
from kvstow.models.weights import check_dtype
from kvstow.require import require


def load(
    model: str,
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
    group: Any = None,
) -> tuple[Any, Any]:
    """Load `model` with mlx-lm; returns the model and its tokenizer.

    Warns where it is going to be slow: in two-byte numbers on a CPU.

    Args:
        model: ``smollm2``, a GGUF file, a directory or a hub id; see `kvstow.models.locate`.
        dtype: float32, float16 or bfloat16. None: weights as they are stored; for a GGUF
            file, float32 on a CPU (where the others are slow) and bfloat16 elsewhere.
        progress: Called with bytes done, bytes in all and a label while a GGUF is converted.
        group: mlx's group of the processes that the model is split over; this one loads its part.

    Raises:
        MissingDependency: If mlx, mlx-lm or gguf is not installed.
        ModelNotFound: If nothing is where `model` points.
        ModelFileError: If what is there cannot be loaded.
    """
    if dtype is not None:
        check_dtype(dtype)
    source = locate(model)
    mx = require("mlx.core")
    dtype = dtype or default_dtype(source)
    if source.kind == "gguf" and source.path is not None and dtype is not None:
        where = str(convert(source.path, dtype, progress))
        loaded, tokenizer = _load(where, group)
    else:
        if source.kind == "hub":
            hub_config(source.name)  # says what is wrong with a name before much is fetched
        loaded, tokenizer = _load(str(source.path or source.name), group)
        if dtype is not None:
            loaded.set_dtype(getattr(mx, dtype))
    _warn_of_halves(loaded, mx)
    return loaded, tokenizer


def _warn_of_halves(model: Any, mx: Any) -> None:
    if mx.default_device() != mx.cpu:
        return
    utils = require("mlx.utils")
    found = {array.dtype for _, array in utils.tree_flatten(model.parameters())}
    for name in ("bfloat16", "float16"):
        if getattr(mx, name) in found:
            warnings.warn(
                f"weights in {name} are many times slower on a CPU than in float32 "
                "(--dtype float32, which takes more memory)",
                KvstowWarning,
                stacklevel=3,
            )


def default_dtype(source: Source) -> str | None:
    """The dtype that `load` gives weights where it is not told; None: as they are stored.

    Raises:
        MissingDependency: If mlx is not installed.
    """
    if source.kind != "gguf":
        return None
    mx = require("mlx.core")
    return "float32" if mx.default_device() == mx.cpu else "bfloat16"


def _load(where: str, group: Any) -> tuple[Any, Any]:
    mlx_lm = require("mlx_lm")
    try:
        if group is None:
            loaded, tokenizer, *_ = mlx_lm.load(where)
        else:
            # By default it would run code that comes with a tokenizer, as `load` does not.
            trust = {"trust_remote_code": False}
            loaded, tokenizer = mlx_lm.utils.sharded_load(
                where, None, group, tokenizer_config=trust
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelFileError(f"mlx-lm cannot load {where}: {error}") from error
    return loaded, tokenizer
