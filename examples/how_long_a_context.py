"""How long a context fits beside the weights, for a model that is not even here.

Run: python examples/how_long_a_context.py
"""

from kvstow import Scheme
from kvstow.capacity import bytes_per_token, max_tokens
from kvstow.integrations.mlx_lm import read_shape
from kvstow.models import context_length, skeleton

config = {  # from the config.json of Llama-3.1-8B
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
shape = read_shape(skeleton(config), context_length(config))
memory_bytes, weight_bytes = 24 * 10**9, 16 * 10**9

for text in ("off", "affine:8", "turbo:k8v3", "turbo:k4v3"):
    scheme = Scheme.parse(text)
    fit = max_tokens(shape, scheme, memory_bytes - weight_bytes)
    per_token = bytes_per_token(shape, scheme)
    print(f"{text:12} {per_token:8,} bytes per token, {fit.tokens:8,} tokens ({fit.bound})")
