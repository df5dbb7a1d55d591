"""Tensor parallelism: each process has a part of the heads, and a packed cache of its own for it.

mlx-lm's ``model.shard(group)`` does the splitting and does not check that heads divide: a
model with 3 KV heads over 2 processes gets heads of another width, without a word. As
`probe`, this lets the model build its graph to find out, before weights are loaded.
"""

from typing import Any

from kvstow.capacity import LayerShape, ModelShape
from kvstow.errors import UnsupportedModel
from kvstow.integrations.mlx_lm import probe
from kvstow.integrations.mlx_lm.shape import read_shape


def check_split(model: Any, group: Any) -> None:
    """Refuse a model that cannot be split over the processes of `group`. Computes nothing.

    Args:
        model: A skeleton of it, which is split by this.
        group: mlx's; its size is the number of processes.

    Raises:
        UnsupportedModel: If mlx-lm has no code to split it, or its heads do not divide.
    """
    n, name = group.size(), getattr(model, "model_type", type(model).__name__)
    if not hasattr(model, "shard"):
        raise UnsupportedModel(f"mlx-lm cannot split a {name} over processes, and {n} were started")
    whole = read_shape(model)
    refusal = f"this {name} cannot be split over {n} processes"
    try:
        model.shard(group)
    except Exception as error:  # whatever the model's own code runs into
        raise UnsupportedModel(f"{refusal}: {probe.say(error)}") from error
    if not _parts_fit(model, whole, n):
        kv_heads = max((layer.n_kv_heads for layer in whole.layers), default=0)
        raise UnsupportedModel(
            f"{refusal}: its {whole.n_heads} query heads and {kv_heads} KV heads do not divide"
        )


def _parts_fit(part: Any, whole: ModelShape, n: int) -> bool:
    """Whether the split model runs, on caches that are a part of the whole one's."""
    try:
        layers = read_shape(part).layers
    except UnsupportedModel:  # query heads of one width, keys of another
        return False
    return all(_is_part(*pair, n) for pair in zip(layers, whole.layers, strict=True))


def _is_part(part: LayerShape, whole: LayerShape, n: int) -> bool:
    """Whether `n` such parts make the whole; where heads are fewer, each process has a copy."""
    widths = (part.key_dim, part.value_dim) == (whole.key_dim, whole.value_dim)
    return widths and part.n_kv_heads * n >= whole.n_kv_heads
