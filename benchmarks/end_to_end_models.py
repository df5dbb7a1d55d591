"""Models of known shapes with random weights: what they answer is noise, and their speed is not."""

from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.1 8B.
    "llama8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    # The text part of Gemma 3 4B: five layers of six see 1024 tokens.
    "gemma4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}


def random_model(name: str, dtype: mx.Dtype) -> Any:
    """A model of one of `SHAPES`."""
    mx.random.seed(0)
    config = SHAPES[name]
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    parameters: Any = tree_flatten(model.parameters())
    for _, weights in parameters:
        mx.eval(weights)  # one by one: they are drawn in float32
    return model
