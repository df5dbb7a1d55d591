"""Tiny random models of mlx-lm's own classes, and the definition as one of its caches."""

from importlib import import_module

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

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
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
# What the classes need beside COMMON; a name may stand for a variant of a class.
CONFIGS = {
    "cohere": {},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0},
        "d_model": 256,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1},
        "n_heads": 4,
        "n_layers": 2,
    },
    "deepseek_v2": LATENT
    | {
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1,
            "mscale_all_dim": 0,
            "original_max_position_embeddings": 2048,
        },
    },
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "gemma2": {},
    "gemma3": {
        "text_config": COMMON | {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    },
    "gemma3_text": {"sliding_window_pattern": 2, "head_dim": 256},
    "gemma3n": {
        "text_config": COMMON
        | {
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 16,
            "intermediate_size": [64] * 6,
            "laurel_rank": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "query_pre_attn_scalar": 1.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "vocab_size_per_layer_input": VOCAB,
        }
    },
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
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    "kimi_vl": {
        "text_config": COMMON
        | LATENT
        | {
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 32,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_key_value_heads": 4,
            "rope_scaling": None,
        }
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


class _Defined:
    """Keeps exact tokens and hands out what `codec.reference` would decode of them."""

    def __init__(self, scheme, *args):
        super().__init__(*args)
        self.scheme = scheme
        self.packed = False

    def update_and_fetch(self, keys, values):
        was_packed, self.packed = self.packed, False
        keys, values = super().update_and_fetch(keys, values)
        self.packed = was_packed or self.offset >= (self.scheme.start_tokens or 1)
        if was_packed or (self.packed and self.scheme.stored):
            return self.stored(keys, values)
        return keys, values

    def stored(self, keys, values):
        """What is left of exact keys and values."""
        k, v = (np.array(x.astype(mx.float32)) for x in (keys, values))
        packed_k = codec.encode_keys(k, bits=self.scheme.key_bits, guard=True)
        packed_v = codec.encode_values(v, bits=self.scheme.value_bits, guard=True)
        k = codec.decode_keys(packed_k, bits=self.scheme.key_bits)
        v = codec.decode_values(packed_v, bits=self.scheme.value_bits, head_dim=v.shape[-1])
        return mx.array(k).astype(keys.dtype), mx.array(v).astype(values.dtype)

    def keys_and_values(self):
        """Asked by layers that borrow another's cache; a packed row has only what it stores."""
        keys, values = super().keys_and_values()
        return self.stored(keys, values) if self.packed else (keys, values)

    def trim(self, n):
        trimmed = super().trim(n)
        self.packed = self.packed and self.offset > 0
        return trimmed


class Definition(_Defined, KVCache):
    """Of a layer that sees all tokens."""


class SlidingDefinition(_Defined, RotatingKVCache):
    """Of a layer with a sliding window."""


def definition(scheme, plain):
    """The definition in the place of one of mlx-lm's own caches."""
    if isinstance(plain, RotatingKVCache):
        return SlidingDefinition(scheme, plain.max_size, plain.keep)
    return Definition(scheme)
