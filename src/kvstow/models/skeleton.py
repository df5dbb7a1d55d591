"""A model of mlx-lm from its config alone: every shape, and no weights.

MLX computes nothing before it is asked to, so a model of any size is made in
some tens of milliseconds and kilobytes, and calling it tells which shapes its
caches take and what its own code accepts. Nothing that comes out of a skeleton
may be evaluated: the parameters are one zero each, seen in many places.
"""

import copy
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from kvstow.capacity import DTYPE_BYTES
from kvstow.errors import ModelFileError, UnsupportedModel
from kvstow.require import require

DEFAULT_DTYPE = "bfloat16"
# Model types whose code reads values back while it builds its graph, which would compute it.
READ_VALUES = frozenset({"dbrx"})
_LACKS = re.compile(r"missing \d+ required \S+ arguments?: (?P<names>.*)")


def skeleton(config: Mapping[str, Any], dtype: str | None = None) -> Any:
    """The model that mlx-lm would make of `config`, without weights.

    Args:
        config: As in config.json.
        dtype: Of weights and activations; what the config says if None, or bfloat16.

    Raises:
        MissingDependency: If mlx-lm is not installed.
        ModelFileError: If the config lacks something, or no model can be made of it.
        UnsupportedModel: If mlx-lm has no such model type, or only code that comes with the
            weights can run it.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError("the config lacks 'model_type'")
    if (file := config.get("model_file")) is not None:
        raise UnsupportedModel(
            f"this {model_type} needs code of its own ({file!r}), and code from a model is not run"
        )
    if model_type in READ_VALUES:
        raise UnsupportedModel(
            f"mlx-lm's {model_type} reads values back while it runs, "
            "so nothing can be known of it without its weights"
        )
    name = dtype or config_dtype(config)
    mx, utils = require("mlx.core"), require("mlx_lm.utils")
    given = copy.deepcopy(dict(config))  # some classes of mlx-lm change what they are given
    model_class, args_class = _classes(utils, given, model_type)
    try:
        model = model_class(args_class.from_dict(given))
        model.update(_placeholders(mx, model, getattr(mx, name)))
    except Exception as error:
        raise ModelFileError(_explain(error, model_type)) from error
    model.is_skeleton = True  # so that nobody measures it
    return model.eval()


def config_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a config names, the language model's own first.

    Raises:
        ModelFileError: If it is none of `DTYPE_BYTES`.
    """
    inner = config.get("text_config")
    parts = (inner, config) if isinstance(inner, Mapping) else (config,)
    names = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    name = next((name for name in names if name is not None), DEFAULT_DTYPE)
    if name not in DTYPE_BYTES:
        raise ModelFileError(
            f"'dtype' in the config must be one of {', '.join(DTYPE_BYTES)}, got {name!r}"
        )
    return str(name)


def _classes(utils: Any, config: dict[str, Any], model_type: str) -> Any:
    try:
        return utils._get_classes(config)
    except (Exception, SystemExit) as error:  # the module of olmo exits where a package is missing
        raise UnsupportedModel(
            f"mlx-lm {version('mlx-lm')} does not run the model type {model_type!r}"
        ) from error


def _placeholders(mx: Any, model: Any, dtype: Any) -> Any:
    """The model's parameters, as shapes that take no memory even where they are evaluated."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def placeholder(path: str, parameter: Any) -> Any:
        cast = mx.issubdtype(parameter.dtype, mx.floating) and may_cast(path)
        zero = mx.zeros((), dtype if cast else parameter.dtype)
        return mx.broadcast_to(zero, parameter.shape)

    return require("mlx.utils").tree_map_with_path(placeholder, model.parameters())


def _explain(error: Exception, model_type: str) -> str:
    if match := _LACKS.search(str(error)):
        return f"the config of this {model_type} lacks {match['names']}"
    lines = str(error).strip().splitlines() or [""]
    return f"mlx-lm makes no {model_type} of this config: {type(error).__name__}: {lines[0]}"
