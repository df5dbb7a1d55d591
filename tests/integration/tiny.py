"""Tiny random models of mlx-lm's own classes, and the definition as one of its caches."""

from importlib import import_module

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from kvstow.codec import reference as codec

VOCAB = 97
COMMON = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 32,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}
# What the classes need beside COMMON; a name may stand for a variant of a class.
CONFIGS = {
    "cohere": {},
    "deepseek_v2": {
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1,
            "mscale_all_dim": 0,
            "original_max_position_embeddings": 2048,
        },
    },
    "gemma2": {},
    "gemma3_text": {"sliding_window_pattern": 2, "head_dim": 256},
    "gemma4_text": {
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 32,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 1,
        "sliding_window_pattern": 3,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gpt2": {
        "layer_norm_epsilon": 1e-5,
        "n_ctx": 256,
        "n_embd": 256,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 256,
    },
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
    },
    "llama": {},
    "llama-80": {"head_dim": 80},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-7": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "llama-sliding": {"layer_types": ["sliding_attention", "full_attention"]},
    "mamba": {
        "conv_kernel": 4,
        "state_size": 8,
        "time_step_rank": 8,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "mixtral": {"num_experts_per_tok": 1, "num_local_experts": 2},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {
        "decoder_sparse_step": 1,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 32,
    },
    "stablelm": {"partial_rotary_factor": 0.5, "qk_layernorm": False, "use_qkv_bias": True},
}


def build(name, seed=0, dtype=mx.float32, **more):
    """A model with random weights that nothing has computed yet."""
    model_type = name.partition("-")[0]
    module = import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(seed)
    config = COMMON | {"model_type": model_type} | CONFIGS[name] | more
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    return model


def tokens(n_tokens, seed=0, b=1):
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, (b, n_tokens)))


class Definition(KVCache):
    """Keeps exact tokens and hands out what `codec.reference` would decode of them."""

    def __init__(self, scheme):
        super().__init__()
        self.scheme = scheme
        self.packed = False

    def update_and_fetch(self, keys, values):
        was_packed = self.packed
        keys, values = super().update_and_fetch(keys, values)
        self.packed = was_packed or self.offset >= (self.scheme.start_tokens or 1)
        if not (was_packed or (self.packed and self.scheme.stored)):
            return keys, values
        bits = {"keys": self.scheme.key_bits, "values": self.scheme.value_bits}
        k, v = (np.array(x.astype(mx.float32)) for x in (keys, values))
        packed_k = codec.encode_keys(k, bits=bits["keys"], guard=True)
        packed_v = codec.encode_values(v, bits=bits["values"], guard=True)
        k = codec.decode_keys(packed_k, bits=bits["keys"])
        v = codec.decode_values(packed_v, bits=bits["values"], head_dim=v.shape[-1])
        return mx.array(k).astype(keys.dtype), mx.array(v).astype(values.dtype)

    def trim(self, n):
        trimmed = super().trim(n)
        self.packed = self.packed and self.offset > 0
        return trimmed
