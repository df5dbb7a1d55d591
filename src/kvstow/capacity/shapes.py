"""A config.json to the layers of which mlx-lm keeps a cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstow.capacity.families import FAMILIES, GEMMA3_INSIDE, KINDS, Kind, family_name
from kvstow.errors import ModelFileError, UnsupportedModel

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's cache.

    Args:
        kind: ``full`` grows with the context, ``sliding`` stops at `window` tokens,
            ``recurrent`` has a fixed state and no keys or values.
        n_kv_heads: Heads of keys and of values.
        head_dim: Elements of one key and of one value.
        window: Tokens that a sliding layer sees; 0 for others.
    """

    kind: Kind
    n_kv_heads: int = 0
    head_dim: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory of a running model depends on, beside its weights.

    Args:
        model_type: The language model's type, as mlx-lm names it.
        layers: The layers that have a cache of their own.
        n_heads: Query heads.
        hidden_size: Width of the residual stream.
        ffn_size: Width of the feed-forward layer, over all experts of one token.
        vocab_size: Tokens in the vocabulary.
        max_tokens: Longest context the config allows; None if it does not say.
        dtype_bytes: Bytes of one element of the activations, and of a plain cache.
    """

    model_type: str
    layers: tuple[LayerShape, ...]
    n_heads: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_tokens: int | None
    dtype_bytes: int

    def of_kind(self, kind: Kind) -> list[LayerShape]:
        """List the layers of one kind."""
        return [layer for layer in self.layers if layer.kind == kind]


class _Config:
    """A language model's config, with mlx-lm's defaults and errors that name the key."""

    def __init__(self, values: Mapping[str, Any], model_type: str, *, inside: bool) -> None:
        self.values = values
        self.model_type = model_type
        self.family = FAMILIES[model_type]
        self.defaults = dict(self.family.defaults)
        if inside and model_type == "gemma3_text":
            self.defaults |= GEMMA3_INSIDE

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The integer under the first of `keys` that the config holds.

        Raises:
            ModelFileError: If it is none, too small, or absent and there is no default.
        """
        for key in keys:
            value = self.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ModelFileError(
                        f"{key!r} in the config must be a number >= {least}, got {value!r}"
                    )
                return value
        if default is None:
            raise ModelFileError(f"the config lacks {keys[0]!r}")
        return default


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape of a model from its config.json.

    Args:
        config: The parsed file, of a language model or of one with a ``text_config``.

    Raises:
        ModelFileError: If a key is missing or its value makes no sense.
        UnsupportedModel: If the model keeps no plain keys and values, or its type is unknown.
    """
    inner = config.get("text_config")
    values: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    model_type = values.get("model_type") or config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError("the config lacks 'model_type'")
    if values.get("kv_lora_rank") is not None:
        raise UnsupportedModel(
            f"{model_type} keeps a compressed latent in place of keys and values "
            "(multi-head latent attention, kv_lora_rank): there is nothing to quantise"
        )
    if family_name(model_type) not in FAMILIES:
        raise UnsupportedModel(
            f"how {model_type} keeps its cache is not known here; "
            f"known model types: {', '.join(sorted(FAMILIES))}"
        )
    read = _Config(values, family_name(model_type), inside=values is inner)
    n_experts = read.number("num_experts_per_tok", "top_k_experts", default=1)
    dense = read.number("intermediate_size", "block_ff_dim", "moe_intermediate_size")
    expert = read.number("moe_intermediate_size", default=dense)
    return ModelShape(
        model_type=read.model_type,
        layers=_layers(read),
        n_heads=read.number("num_attention_heads"),
        hidden_size=read.number("hidden_size"),
        ffn_size=max(dense, expert * n_experts),
        vocab_size=read.number("vocab_size"),
        max_tokens=read.number("max_position_embeddings", default=0) or None,
        dtype_bytes=_dtype_bytes(read.values, config),
    )


def _layers(read: _Config) -> tuple[LayerShape, ...]:
    n_heads = read.number("num_attention_heads")
    kinds = _kinds(read)
    n_kv_heads = read.number("num_key_value_heads", default=n_heads)
    head_dim = read.number("head_dim", default=read.number("hidden_size") // n_heads)
    window = read.number("sliding_window") if "sliding" in kinds else 0
    of_kind = {
        "full": LayerShape("full", n_kv_heads, head_dim),
        "sliding": LayerShape("sliding", n_kv_heads, head_dim, window),
        "recurrent": LayerShape("recurrent"),
    }
    if read.model_type == "gemma4_text":
        if read.get("attention_k_eq_v"):
            n_kv_heads = read.number("num_global_key_value_heads", default=n_kv_heads)
        of_kind["full"] = LayerShape("full", n_kv_heads, read.number("global_head_dim"))
        # The last layers use the keys and values of earlier ones.
        kinds = kinds[: len(kinds) - read.number("num_kv_shared_layers", least=0)]
    return tuple(of_kind[kind] for kind in kinds)


def _kinds(read: _Config) -> list[Kind]:
    n_layers = read.number("num_hidden_layers")
    family = read.family
    indices = read.get("full_attn_idxs")  # an older spelling in lfm2, and the stronger one
    if family.others == "recurrent" and isinstance(indices, list):
        return ["full" if i in indices else "recurrent" for i in range(n_layers)]
    types = read.get("layer_types") if family.by_type else None
    if types is not None:
        known = isinstance(types, list) and all(str(name) in KINDS for name in types)
        if not known or len(types) != n_layers:
            raise ModelFileError(
                f"'layer_types' in the config must hold {n_layers} names, each one of "
                f"{', '.join(KINDS)}; got {str(types)[:200]}"
            )
        return [KINDS[name] for name in types]
    if not family.every:
        raise ModelFileError("the config lacks 'layer_types'")
    every = read.number(family.every_key, default=family.every)
    return ["full" if (i + 1) % every == 0 else family.others for i in range(n_layers)]


def _dtype_bytes(*configs: Mapping[str, Any]) -> int:
    names = [config.get(key) for config in configs for key in ("dtype", "torch_dtype")]
    name = next((name for name in names if name is not None), "bfloat16")
    if str(name) not in DTYPE_BYTES:
        raise ModelFileError(
            f"'dtype' in the config must be one of {', '.join(DTYPE_BYTES)}, got {name!r}"
        )
    return DTYPE_BYTES[str(name)]
