"""Which layers of which model type keep what, as mlx-lm's classes decide it.

Not every key of a config counts there: mlx-lm's qwen2, gemma2 and phi3 ignore
``sliding_window`` and keep everything. A model type that is not listed here is
refused, since a guess would be a wrong answer about memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["full", "sliding", "recurrent"]

# Names in layer_types -> what the layer keeps.
KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "mamba": "recurrent",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Which layers of a model type keep what.

    Args:
        others: The kind of the layers that are not full attention.
        every: Each layer with this number is full attention, counting from 1;
            0 if only the config can tell.
        every_key: The key of the config that overrides `every`.
        by_type: Whether ``layer_types`` in the config goes before `every`.
        defaults: What mlx-lm takes for keys that the config lacks.
    """

    others: Kind = "full"
    every: int = 1
    every_key: str = ""
    by_type: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


_GEMMA3 = {
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
}
_GEMMA4 = {
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size": 262144,
    "sliding_window": 512,
}
# mlx-lm's gemma3, which also sees, has other defaults for the model inside.
GEMMA3_INSIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}

_ALL_FULL = (
    *("ernie4_5", "gemma", "gemma2", "glm4", "glm4_moe", "granite", "hunyuan_v1_dense"),
    *("internlm3", "mimo", "minicpm", "mixtral", "olmo2", "olmoe", "phi3", "phimoe", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
_TYPED = Family(by_type=True)
_HYBRID = Family("recurrent", 0, by_type=True)
_INTERVAL = Family("recurrent", 4, "full_attention_interval")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_ALL_FULL, Family()),
    **dict.fromkeys(("llama", "ministral3"), _TYPED),
    **dict.fromkeys(("lfm2", "lfm2_moe", "granitemoehybrid"), _HYBRID),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _INTERVAL),
    "cohere2": Family("sliding", 4, "sliding_window_pattern"),
    "gemma3_text": Family("sliding", 6, "sliding_window_pattern", defaults=_GEMMA3),
    "gemma4_text": Family("sliding", 5, "sliding_window_pattern", True, _GEMMA4),
    "gpt_oss": Family("sliding", 2, by_type=True, defaults={"head_dim": 64}),
    "olmo3": Family("sliding", 4, by_type=True),
}

_ALIASES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llava": "llama",
    "mistral": "llama",
    "mistral3": "llama",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def family_name(model_type: str) -> str:
    """The key in `FAMILIES` for a model type, or the type itself.

    >>> family_name("mistral"), family_name("qwen3_vl_text"), family_name("mamba2")
    ('llama', 'qwen3', 'mamba2')
    """
    if model_type in FAMILIES:
        return model_type
    return _ALIASES.get(model_type) or _ALIASES.get(model_type.removesuffix("_text"), model_type)
