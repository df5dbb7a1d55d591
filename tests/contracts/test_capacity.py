"""The capacity of a model is what mlx-lm allocates for it: tiny models of many families, built."""

from dataclasses import replace

import pytest

import kvstow
from kvstow import Scheme, UnsupportedModel, attached
from kvstow.capacity import PREFILL_TOKENS, LayerShape, ModelShape, budget, cost
from kvstow.capacity.budget import DECODE_BYTES, _tiled_bytes
from kvstow.models import skeleton
from kvstow.scheme import KEY_BITS, VALUE_BITS, Off, Turbo
from kvstow.store import STEP_TOKENS

mx = pytest.importorskip("mlx.core")
caches = pytest.importorskip("mlx_lm.models.cache")
utils = pytest.importorskip("mlx_lm.utils")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
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
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GPT2 = {
    "layer_norm_epsilon": 1e-5,
    "n_ctx": 1024,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 1024,
}
LLAMA4 = {
    "attention_bias": False,
    "model_type": "llama4_text",
    "attention_chunk_size": 300,
    "head_dim": 64,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "rope_scaling": None,
    "use_qk_norm": True,
}
MAMBA = {
    "conv_kernel": 4,
    "state_size": 8,
    "time_step_rank": 8,
    "use_bias": False,
    "use_conv_bias": True,
}
MAMBA2 = {
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "tie_word_embeddings": True,
}
TIED = {"tie_word_embeddings": True}
VISION = {"hidden_size": 1, "vision_config": {}}  # and what is outside of text_config counts not
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 3
# What the classes of mlx-lm need beside COMMON, and what its layers keep. A name may stand for
# a variant of a class.
CONFIGS = {
    "cohere2": ({"head_dim": 16}, "sssfss"),
    "deepseek_v3": (LATENT, "ffffff"),
    "falcon_h1": (MAMBA2, "rfrfrfrfrfrf"),
    "gemma": ({"head_dim": 64}, "ffffff"),
    "gemma2": ({"head_dim": 64}, "ffffff"),  # mlx-lm ignores its sliding_window
    "gemma3": (
        VISION | {"text_config": COMMON | {"model_type": "gemma3_text", "head_dim": 64}},
        "sssssf",
    ),
    "gemma3_text": ({"head_dim": 64}, "sssssf"),
    "gemma3_text-3": ({"head_dim": 64, "sliding_window_pattern": 3}, "ssfssf"),
    "gemma4_text": ({"head_dim": 64, "global_head_dim": 128, "num_kv_shared_layers": 1}, "ssssf"),
    "gemma4_text-2": (
        {"head_dim": 64, "num_kv_shared_layers": 2, "sliding_window_pattern": 3},
        "ssfs",
    ),
    "gpt2": (GPT2, "ff"),
    "gpt_oss": ({"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}, "sfsfsf"),
    "lfm2": (LFM2 | {"layer_types": ["conv", "full_attention"] * 3}, "rfrfrf"),
    "lfm2-1": (LFM2 | {"full_attn_idxs": [1]}, "rfrrrr"),
    "llama": ({}, "ffffff"),
    "llama-sliding": ({"head_dim": 64, "layer_types": SLIDING_AND_FULL}, "sfsfsf"),
    "llama4": ({"text_config": COMMON | LLAMA4}, "bbbfbb"),
    "mamba": (MAMBA, "rrrrrr"),
    "mistral": ({"head_dim": 64}, "ffffff"),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "ffffff"),
    "olmo2": ({}, "ffffff"),
    "olmo3": ({}, "sssfss"),
    "phi3": ({}, "ffffff"),
    "qwen2": ({"use_sliding_window": True}, "ffffff"),
    "qwen2_moe": (EXPERTS | {"head_dim": 16}, "ffffff"),
    "qwen3": ({"head_dim": 64} | TIED, "ffffff"),
    "qwen3_5": (LINEAR, "rrrfrr"),
    "qwen3_5_moe": (EXPERTS | LINEAR, "rrrfrr"),
    "qwen3_moe": (EXPERTS, "ffffff"),
    "qwen3_next": (EXPERTS | LINEAR, "rrrfrr"),
    "qwen3_next-2": (EXPERTS | LINEAR | {"full_attention_interval": 2}, "rfrfrf"),
    "qwen3_vl": (
        {"text_config": COMMON | {"model_type": "qwen3", "head_dim": 64} | TIED},
        "ffffff",
    ),
    "smollm3": ({}, "ffffff"),
    "starcoder2": ({}, "ffffff"),
}


def config_of(name):
    return COMMON | {"model_type": name.partition("-")[0]} | CONFIGS[name][0]


def build(config):
    model_class, args_class = utils._get_classes(config)
    return model_class(args_class.from_dict(config))


def flat(cache):
    return [part for c in cache for part in getattr(c, "caches", [c])]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_are_read_from_the_config_alone(name):
    shape = integration.read_shape(skeleton(config_of(name)))
    assert "".join(layer.kind[0] for layer in shape.layers) == CONFIGS[name][1]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_are_those_that_mlx_lm_allocates(name):
    shape = integration.read_shape(skeleton(config_of(name)))
    model = build(config_of(name))
    cache = caches.make_prompt_cache(model)
    tokens = 700
    model(mx.zeros((1, tokens), mx.int32), cache=cache)
    growing = sum(c.nbytes for c in flat(cache) if isinstance(c, caches.KVCache))
    expected = cost(shape, Off(), tokens)
    assert growing == expected.cache_bytes
    fixed = sum(c.nbytes for c in flat(cache)) - growing
    surplus = STEP_TOKENS * sum(
        layer.n_kv_heads * (layer.key_dim + layer.value_dim) * 4
        for layer in shape.of_kind("sliding", "bounded")
    )
    assert fixed <= expected.fixed_bytes <= fixed + surplus


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_model_has_the_shape_of_its_skeleton(name):
    config = config_of(name)
    model = build(config)
    assert integration.read_shape(model) == integration.read_shape(skeleton(config))


def test_an_attached_model_has_the_shape_that_it_had():
    model = skeleton(config_of("qwen3"))
    before = integration.read_shape(model)
    with attached(model, "turbo:k8v3"):
        assert integration.read_shape(model) == before


def test_full_layers_of_gemma4_have_their_own_heads():
    more = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    shape = integration.read_shape(skeleton(config_of("gemma4_text") | more))
    assert shape.of_kind("full") == [LayerShape("full", 1, 128, 128)]
    assert shape.of_kind("sliding")[0] == LayerShape("sliding", 2, 64, 64, window=300)


def test_chunks_of_llama4_are_windows_that_stay_as_they_are():
    shape = integration.read_shape(skeleton(config_of("llama4")))
    assert shape.of_kind("bounded")[0] == LayerShape("bounded", 2, 64, 64, window=300)


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k4v2", "turbo:k8v3+start900", "affine:8"])
@pytest.mark.parametrize("name", ["gemma3_text", "gemma3_text-3", "llama-sliding"])
def test_the_bytes_under_a_scheme_are_those_that_attach_allocates(name, text):
    """While the last chunk of a prompt is held, and after it."""
    scheme, config = Scheme.parse(text), config_of(name)
    shape, model = integration.read_shape(skeleton(config)), build(config)
    sliding = shape.of_kind("sliding")
    packed = scheme if text.startswith("turbo") else Off()
    windows = [
        300 * layer.n_kv_heads * packed.bytes_per_token(layer.key_dim, dtype_bytes=4)
        for layer in sliding
    ]
    with attached(model, text):
        cache = caches.make_prompt_cache(model)
        for tokens, n in ((700, 700), (1100, 400), (1101, 1)):
            model(mx.zeros((1, n), mx.int32), cache=cache)
            expected = cost(shape, scheme, tokens)
            held = sum(c.nbytes for c in cache)
            assert sum(windows) < held <= expected.cache_bytes + expected.fixed_bytes
    assert [c.nbytes for c in cache if hasattr(c, "max_size")] == windows


def test_latent_attention_is_read_as_it_is_stored():
    shape = integration.read_shape(skeleton(config_of("deepseek_v3")))
    assert shape.layers[0] == LayerShape("full", 1, 64, 8)


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("llama", {}, (4, 64, 96, 50)),
        ("llama", {"num_attention_heads": 8}, (8, 64, 96, 50)),
        ("gemma3", {}, (4, 64, 96, 50)),  # of the language model inside
        ("gpt2", {}, (4, 64, 4 * 64, 50)),  # its args have no feed-forward width
        ("mixtral", {}, (4, 64, 2 * 96, 50)),  # two experts for each token
        ("qwen3_moe", {"num_experts_per_tok": 4}, (4, 64, 4 * 32, 50)),
    ],
)
def test_widths_come_from_the_args_of_the_language_model(name, more, expected):
    shape = integration.read_shape(skeleton(config_of(name) | more))
    assert (shape.n_heads, shape.hidden_size, shape.ffn_size, shape.vocab_size) == expected


@pytest.mark.parametrize(("dtype", "n_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
@pytest.mark.parametrize("name", ["llama", "mamba", "gemma3_text"])
def test_the_width_of_an_element_is_that_of_the_dtype(name, dtype, n_bytes):
    shape = integration.read_shape(skeleton(config_of(name), dtype))
    assert shape.dtype_bytes == n_bytes


def test_the_longest_context_is_what_the_caller_knows():
    model = skeleton(config_of("llama"))
    assert integration.read_shape(model, 4096) == replace(
        integration.read_shape(model), max_tokens=4096
    )


def test_a_cache_that_grows_in_a_way_of_its_own_is_refused(monkeypatch):
    llama = pytest.importorskip("mlx_lm.models.llama")

    class Odd(caches.ConcatenateKVCache):
        make_mask = caches.KVCache.make_mask

    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [Odd() for _ in self.layers])
    with pytest.raises(UnsupportedModel, match="Odd grows in a way that is not known here"):
        integration.read_shape(skeleton(config_of("llama")))


def test_a_cache_that_the_model_leaves_empty_counts_nothing(monkeypatch):
    llama = pytest.importorskip("mlx_lm.models.llama")
    own = llama.Model.make_cache
    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [*own(self), caches.KVCache()])
    assert len(integration.read_shape(skeleton(config_of("llama"))).layers) == 6


@pytest.mark.parametrize("text", ["affine:4", "affine:8", "affine:8g32"])
def test_affine_bytes_are_those_of_mlx_lms_quantised_cache(text):
    scheme = Scheme.parse(text)
    config = config_of("llama") | {"head_dim": 64, "num_hidden_layers": 1}
    shape = integration.read_shape(skeleton(config))
    cache = caches.QuantizedKVCache(scheme.group_size, scheme.bits)
    cache.update_and_fetch(mx.ones((1, 2, 300, 64)), mx.ones((1, 2, 300, 64)))
    assert cache.nbytes == cost(shape, scheme, 300).cache_bytes


@pytest.mark.parametrize("text", ["off", "affine:8", "turbo:k8v3", "turbo:k4v2"])
def test_a_prompt_peaks_within_the_bytes_that_are_counted(text):
    generate = pytest.importorskip("mlx_lm.generate")
    scheme, tokens = Scheme.parse(text), PREFILL_TOKENS + 500
    config = config_of("llama") | {"hidden_size": 256, "num_hidden_layers": 3}
    model = build(config)
    mx.eval(model.parameters())
    kvstow.attach(model, scheme)
    cache = caches.make_prompt_cache(model)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    prompt = mx.zeros(tokens, mx.int32)
    list(generate.generate_step(prompt, model, prompt_cache=cache, max_tokens=2))
    peak = mx.get_peak_memory() - before
    integration.detach(model)

    counted = cost(integration.read_shape(skeleton(config)), scheme, tokens, on_gpu=False)
    assert sum(c.nbytes for c in cache) == counted.cache_bytes
    assert counted.total_bytes / 3 < peak <= counted.total_bytes


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 8, 128), (32, 2, 128)])
@pytest.mark.parametrize("bits", [(8, 3), (5, 5)])
def test_a_cpu_attends_to_stored_tokens_within_the_bytes_that_are_counted(heads, bits):
    codec = pytest.importorskip("kvstow.codec.mlx")
    attention = pytest.importorskip("kvstow.attention.mlx")
    hq, h, d = heads
    chunk, tokens = 128, 3 * attention.tiled.block_tokens(h, d)
    x = mx.random.normal((1, h, tokens, d))
    keys = codec.encode_keys(x, bits=bits[0], guard=True)
    values = codec.encode_values(x, bits=bits[1], guard=True)
    window = attention.PackedWindow(keys, values, tokens, Turbo(*bits))
    queries = mx.random.normal((1, hq, chunk, d))
    mx.eval(keys, values, queries)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attention.attend(queries, window, scale=0.1, mask="causal"))
    peak = mx.get_peak_memory() - before
    shape = ModelShape((), hq, 64, 64, 64, None, 4)
    counted = _tiled_bytes(shape, LayerShape("full", h, d, d), chunk)
    assert counted / 2 < peak <= counted


def test_blocks_and_tiles_are_counted_as_they_are_cut():
    tiled = pytest.importorskip("kvstow.attention.tiled")
    for name in ("BLOCK_ELEMENTS", "TILE_SCORES", "LEAST_BLOCK"):
        assert getattr(budget, name) == getattr(tiled, name)


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
