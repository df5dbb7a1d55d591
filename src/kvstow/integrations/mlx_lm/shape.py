"""The shape of a model: what each of its caches holds, and how wide its layers are.

The caches are exact, for any architecture: the model itself fills them, and
nothing is computed (see `probe`). Widths that no cache shows come from the
model's args, whose names differ between architectures.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mlx_lm.models import cache as host

from kvstow.capacity import LayerShape, ModelShape
from kvstow.errors import UnsupportedModel
from kvstow.integrations.mlx_lm import members, probe
from kvstow.integrations.mlx_lm.attach import plain_caches

_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "num_query_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "dim")
_FFN = (
    *("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "block_ff_dim"),
    *("ffn_hidden_size", "ff_intermediate_size", "mlp_hidden_size", "n_inner"),
)
_EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_EXPERTS_OF_ONE_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk"),
)


def read_shape(model: Any, max_tokens: int | None = None) -> ModelShape:
    """Read the shape of an mlx-lm model, be it loaded or a `kvstow.models.skeleton`.

    Args:
        model: The model; it may be attached.
        max_tokens: The longest context it allows. Its config tells, and its args often do not.

    Raises:
        UnsupportedModel: If the model does not run, or a cache grows in a way of its own.
    """
    caches = plain_caches(model)
    logits = probe.fill(model, caches, (1, 1))
    n_bytes = [int(cache.nbytes) for _, cache, _ in _flat(caches)]
    probe.fill(model, caches, (2,))
    layers = tuple(
        replace(_layer(cache, before, kept=kept), index=i)
        for (i, cache, kept), before in zip(_flat(caches), n_bytes, strict=True)
        if cache.nbytes  # else the model stores nothing in it
    )
    args = probe.text_args(model)
    key_dim = max((layer.key_dim for layer in layers), default=0)
    n_heads = _number(args, _HEADS)
    hidden_size = _number(args, _HIDDEN) or n_heads * key_dim
    expert_size = _number(args, _EXPERT) * _number(args, _EXPERTS_OF_ONE_TOKEN)
    keys = [cache.keys for _, cache, _ in _flat(caches) if getattr(cache, "keys", None) is not None]
    return ModelShape(
        layers=layers,
        n_heads=n_heads or (hidden_size // key_dim if key_dim else 0),
        hidden_size=hidden_size,
        ffn_size=max(_number(args, _FFN), expert_size) or 4 * hidden_size,
        vocab_size=int(logits.shape[-1]),
        max_tokens=max_tokens,
        dtype_bytes=int((keys[0] if keys else logits).dtype.size),
    )


def _flat(caches: Iterable[Any]) -> Iterator[tuple[int, Any, bool]]:
    """Index of, and every cache, those of a `CacheList` too, and whether `attach` leaves it."""
    for i, cache in enumerate(caches):
        for member in getattr(cache, "caches", (cache,)):
            yield i, member, member is not members.plain(cache)


def _layer(cache: Any, bytes_before: int, *, kept: bool) -> LayerShape:
    if not kept:
        return probe.shape_of(cache)
    if isinstance(cache, host.RotatingKVCache):
        return LayerShape("bounded", *probe.widths(cache), window=int(cache.max_size))
    if isinstance(cache, host.ChunkedKVCache):
        return LayerShape("bounded", *probe.widths(cache), window=int(cache.chunk_size))
    if isinstance(cache, host.KVCache):
        return LayerShape("plain", *probe.widths(cache))
    if cache.nbytes != bytes_before:
        raise UnsupportedModel(
            f"this model's {type(cache).__name__} grows in a way that is not known here, "
            "so what a context costs cannot be said"
        )
    return LayerShape("recurrent", state_bytes=bytes_before)


def _number(args: Any, names: tuple[str, ...]) -> int:
    """The first number under one of `names`, the largest of a list; 0 if there is none."""
    for name in names:
        value = getattr(args, name, None)
        numbers = value if isinstance(value, list) else [value]
        if found := [n for n in numbers if isinstance(n, int)]:
            return max(found)
    return 0
