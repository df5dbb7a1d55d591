"""The capacity of a model is what mlx-lm allocates for it: tiny models of every family, built."""

from importlib.util import find_spec

import pytest

from kvstow import Scheme
from kvstow.capacity import FAMILIES, PREFILL_TOKENS, cost, read_shape
from kvstow.capacity.budget import DECODE_BYTES
from kvstow.scheme import KEY_BITS, VALUE_BITS, Off

mx = pytest.importorskip("mlx.core")
caches = pytest.importorskip("mlx_lm.models.cache")
utils = pytest.importorskip("mlx_lm.utils")
pytestmark = pytest.mark.mlx

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "sliding_window": 300,
    "dtype": "float32",
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "head_dim": 64,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
LFM2 = {
    "layer_types": ["conv", "full_attention"] * 3,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
# What the classes of mlx-lm need beside COMMON.
CONFIGS = {
    "cohere2": {"head_dim": 16},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "gemma4_text": {"head_dim": 64, "global_head_dim": 128, "num_kv_shared_layers": 1},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": LFM2,
    "llama": {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "mistral": {"head_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | LINEAR,
    "qwen3_5": LINEAR,
    "qwen3_5_moe": EXPERTS | LINEAR,
    "qwen2_moe": EXPERTS | {"head_dim": 16},
    "starcoder2": {},
    "smollm3": {},
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_bytes_are_those_that_mlx_lm_allocates(model_type):
    config = COMMON | {"model_type": model_type} | CONFIGS[model_type]
    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    shape = read_shape(config)
    cache = caches.make_prompt_cache(model)
    kind_of = {caches.KVCache: "full", caches.RotatingKVCache: "sliding"}
    assert [kind_of.get(type(c), "recurrent") for c in cache] == [x.kind for x in shape.layers]

    tokens = 700
    model(mx.zeros((1, tokens), mx.int32), cache=cache)
    full = sum(c.nbytes for c in cache if type(c) is caches.KVCache)
    sliding = sum(c.nbytes for c in cache if type(c) is caches.RotatingKVCache)
    expected = cost(shape, Off(), tokens)
    assert (full, sliding) == (expected.cache_bytes, expected.fixed_bytes)


@pytest.mark.parametrize("text", ["affine:4", "affine:8", "affine:8g32"])
def test_affine_bytes_are_those_of_mlx_lms_quantised_cache(text):
    scheme = Scheme.parse(text)
    shape = read_shape(COMMON | {"model_type": "llama", "head_dim": 64, "num_hidden_layers": 1})
    cache = caches.QuantizedKVCache(scheme.group_size, scheme.bits)
    cache.update_and_fetch(mx.ones((1, 2, 300, 64)), mx.ones((1, 2, 300, 64)))
    assert cache.nbytes == cost(shape, scheme, 300).cache_bytes


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_one_that_mlx_lm_has(model_type):
    assert find_spec(f"mlx_lm.models.{model_type}")


@pytest.mark.parametrize("text", ["off", "affine:8", "turbo:k8v3", "turbo:k4v2"])
def test_a_prompt_peaks_within_the_bytes_that_are_counted(text):
    integration = pytest.importorskip("kvstow.integrations.mlx_lm")
    generate = pytest.importorskip("mlx_lm.generate")
    scheme, tokens = Scheme.parse(text), PREFILL_TOKENS + 500
    config = COMMON | {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3}
    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.eval(model.parameters())
    integration.attach(model, scheme, "auto")
    cache = caches.make_prompt_cache(model)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    prompt = mx.zeros(tokens, mx.int32)
    list(generate.generate_step(prompt, model, prompt_cache=cache, max_tokens=2))
    peak = mx.get_peak_memory() - before
    integration.detach(model)

    counted = cost(read_shape(config), scheme, tokens)
    assert sum(c.nbytes for c in cache) == counted.cache_bytes
    # mlx's CPU attention holds the scores under every scheme.
    scores = 4 * PREFILL_TOKENS * tokens * 4
    bound = counted.total_bytes + (0 if text == "affine:8" else scores)
    assert bound / 3 < peak <= bound


def bytes_per_element(decode, n_elements):
    mx.eval(decode())  # tables are made once
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decoded = decode()
    mx.eval(decoded)
    return (mx.get_peak_memory() - before) / n_elements


@pytest.mark.parametrize("bits", sorted({*KEY_BITS, *VALUE_BITS}))
def test_decoding_peaks_within_the_bytes_that_are_counted(bits):
    codec = pytest.importorskip("kvstow.codec.mlx")
    x = mx.random.normal((1, 2, 2048, 128)).astype(mx.bfloat16)
    peaks = []
    if bits in KEY_BITS:
        keys = codec.encode_keys(x, bits=bits, guard=True)
        mx.eval(keys)
        decode = lambda: codec.decode_keys(keys, bits=bits, dtype=mx.bfloat16)  # noqa: E731
        peaks.append(bytes_per_element(decode, x.size))
    if bits in VALUE_BITS:
        values = codec.encode_values(x, bits=bits, guard=True)
        mx.eval(values)
        decode = lambda: codec.decode_values(  # noqa: E731
            values, bits=bits, head_dim=128, dtype=mx.bfloat16
        )
        peaks.append(bytes_per_element(decode, x.size))
    assert DECODE_BYTES[bits] / 2 < max(peaks) <= DECODE_BYTES[bits]
