"""Every architecture of mlx-lm, tiny and random: the table behind `docs/architectures.md`.

A config is made of the sizes that a class's args have names for, of a guess for what else
they require, and of `OVERRIDES` where that makes no model that runs.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

from tests.integration.tiny import COMMON, CONFIGS, LATENT, VOCAB

# Modules that are no architecture but parts of some.
PARTS = frozenset(
    {"activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"}
    | {"rope_utils", "ssm", "switch_layers"}
)
# Why a model is not made here.
NOT_TINY = {
    "bitnet": "its matrix product is a Metal kernel",
    "muse_spark": "its attention is a Metal kernel",
    "olmo": "needs the package ai2-olmo",
    "prism_hadamard_qwen35": "needs the tables that come with its weights",
}

# Names of the same few sizes.
SIZES = COMMON | {
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("n_embd", "d_model", "model_dim", "hidden_dim"), 256),
    **dict.fromkeys(("n_positions", "n_ctx", "block_size"), 256),
    **dict.fromkeys(("layer_norm_epsilon", "norm_eps", "layernorm_epsilon"), 1e-5),
    # As many as there are: a router that drops one turns a small error into another expert.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
TYPES = {"bool": False, "int": 2, "float": 1.0, "str": ""}  # of a required field without a size

MIXED = ["sliding_attention", "full_attention"]
ROPE = {"rope_theta": 10000.0, "rope_type": "default", "type": "default"}
SCALED_ROPE = ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4096}
LLAMA4 = {
    "attention_chunk_size": 32,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 128,
    "no_rope_layers": [1, 1, 1, 0],
    "num_hidden_layers": 4,
    "use_qk_norm": True,
}
LFM2 = {
    "block_auto_adjust_ff_dim": False,
    "block_dim": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": ["conv", "full_attention"],
}
LINEAR = LATENT | {
    "linear_attn_config": {
        "full_attn_layers": [2],
        "head_dim": 64,
        "kda_layers": [1],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "num_experts_per_token": 2,
}
LONGCAT = LATENT | {
    "attention_method": "MLA",
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "zero_expert_type": "identity",
}
OVERRIDES = {
    "afm7": {"num_kv_reuse_layers": 1, "num_layers": 3},
    "afmoe": {"layer_types": MIXED},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [0]},
    "bailing_hybrid": LATENT,
    "bailing_moe_v3": LATENT,
    "dbrx": {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 2}},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "exaone_moe": {"is_moe_layer": [False, True], "layer_types": MIXED},
    "gear": {"layer_types": ["conv_mixer", *MIXED], "num_hidden_layers": 3},
    "gemma4": {"text_config": CONFIGS["gemma4_text"]},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT
    | {
        "index_head_dim": 64,
        "index_topk": 8,
        "rope_parameters": ROPE,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "mamba_proj_bias": False,
        "shared_intermediate_size": 64,
    },
    "hunyuan": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_k25": {"text_config": LATENT},
    "kimi_k3": {"text_config": LINEAR},
    "kimi_linear": LINEAR,
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": LFM2},
    "lfm2_moe": LFM2 | {"num_dense_layers": 1},
    "llama4": {"text_config": LLAMA4 | {"num_experts_per_tok": 1, "num_local_experts": 1}},
    "llama4_text": LLAMA4,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba2": {
        "conv_kernel": 4,
        "head_dim": 64,
        "num_heads": 8,
        "state_size": 16,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "mellum": {"layer_types": MIXED, "rope_parameters": dict.fromkeys(MIXED, ROPE)},
    "mimo_v2_flash": {
        "add_full_attention_sink_bias": True,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "scoring_func": "sigmoid",
        "sliding_window_size": 32,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_rope_theta": 10000.0,
        "swa_v_head_dim": 64,
        "topk_method": "noaux_tc",
        "v_head_dim": 64,
    },
    "minicpm": {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12},
    "minicpm3": LATENT
    | {
        "rope_scaling": {
            "long_factor": [1.0] * 32,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 32,
            "type": "longrope",
        },
    },
    "minimax_m3_vl": {
        "text_config": {
            "index_block_size": 4,
            "index_head_dim": 64,
            "index_n_heads": 2,
            "index_topk_blocks": 4,
            "sparse_attention_freq": [0, 1],
        }
    },
    "ministral3": {"rope_parameters": SCALED_ROPE},
    "mistral4": LATENT | {"rope_parameters": SCALED_ROPE},
    "muse_glimmer": {"layer_types": MIXED},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 0.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}},
        ]
    },
    "nemotron_h": {
        "conv_kernel": 4,
        "hybrid_override_pattern": ["M", "*", "-"],
        "mamba_head_dim": 64,
        "mamba_num_heads": 8,
        "ssm_state_size": 16,
    },
    "olmo3": {"layer_types": MIXED},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "openelm": {
        "ffn_dim_divisor": 64,
        "ffn_multipliers": [1.0, 1.0],
        "num_kv_heads": [2, 2],
        "num_query_heads": [4, 4],
    },
    "phi3small": {"vocab_size": 100352},  # it writes to logits of fixed ids, whatever its size
    "phixtral": {"num_vocab": VOCAB},
    "plamo": {"n_shared_head": 2},
    "plamo3": {"sliding_window_pattern": 2, "window_size": 32},
    "qwen": {"kv_channels": 64},
    "qwen3_5": {"text_config": {"num_hidden_layers": 4}},
    "qwen3_5_moe": {"text_config": {"num_hidden_layers": 4}},
    "recurrent_gemma": {
        "attention_window_size": 32,
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    "spark2_5": {"layer_types": MIXED, "rope_parameters": dict.fromkeys(MIXED, ROPE)},
    "youtu_llm": LATENT,
}


def names():
    """Every module of mlx-lm that is an architecture."""
    modules = (module.name for module in iter_modules(mlx_lm.models.__path__))
    return sorted(set(modules) - PARTS)


def build(name, **more):
    """The tiny model, in which nothing is zero that training would change, and no graph is left."""
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(_config(name, module.ModelArgs, more)))
    model.set_dtype(mx.float32)
    model.update(tree_map(_without_zeros, model.parameters()))
    return model.eval()


def _config(name, args, more):
    fields = inspect.signature(args).parameters
    required = {n: _guess(p) for n, p in fields.items() if p.default is inspect.Parameter.empty}
    own = CONFIGS.get(name, {}) | OVERRIDES.get(name, {})
    sizes = SIZES | {"model_type": name} | more
    config = required | sizes | own
    if "text_config" in fields:
        config["text_config"] = sizes | own.get("text_config", {})
    return config


def _guess(field):
    """A value of the field's type; a list or a mapping has no value that could be guessed."""
    annotation = getattr(field.annotation, "__name__", str(field.annotation))
    return next((v for kind, v in TYPES.items() if kind in annotation), None)


def _without_zeros(x):
    """Parameters start at zero where a fresh model should ignore them: sinks, gates, biases."""
    if not mx.issubdtype(x.dtype, mx.floating) or not x.size or mx.any(x):
        return x
    return 0.1 * mx.random.normal(x.shape)
