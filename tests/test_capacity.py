import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow import ModelFileError, Scheme, UnsupportedModel
from kvstow.capacity import (
    PREFILL_TOKENS,
    STEP_TOKENS,
    LayerShape,
    bytes_per_token,
    check_scheme,
    cost,
    max_tokens,
    read_shape,
)

OFF, TURBO = Scheme.parse("off"), Scheme.parse("turbo:k8v3")
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 50,
    "sliding_window": 300,
    "dtype": "float32",
}


def tiny(model_type, **more):
    return TINY | {"model_type": model_type} | more


def kinds(config):
    return "".join(layer.kind[0] for layer in read_shape(config).layers)


def test_a_llama_keeps_everything_in_every_layer():
    shape = read_shape(tiny("llama"))
    assert shape.layers == (LayerShape("full", 2, 64),) * 6
    assert (shape.max_tokens, shape.dtype_bytes, shape.vocab_size) == (4096, 4, 50)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny("mistral"), "ffffff"),  # mlx-lm ignores its sliding_window
        (tiny("gemma2"), "ffffff"),
        (tiny("llama", layer_types=["sliding_attention"] * 5 + ["full_attention"]), "sssssf"),
        (tiny("gemma3_text"), "sssssf"),
        (tiny("gemma3_text", sliding_window_pattern=3), "ssfssf"),
        (tiny("cohere2"), "sssfss"),
        (tiny("gpt_oss"), "sfsfsf"),
        (tiny("qwen3_next"), "rrrfrr"),
        (tiny("qwen3_next", full_attention_interval=2), "rfrfrf"),
        (tiny("lfm2", layer_types=["conv", "conv", "full_attention"] * 2), "rrfrrf"),
        (tiny("lfm2", full_attn_idxs=[1]), "rfrrrr"),
        (tiny("gemma4_text", num_kv_shared_layers=0), "ssssfs"),
        (tiny("gemma4_text", num_kv_shared_layers=3), "sss"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_only_layers_that_keep_everything_count_as_full(config, expected):
    assert kinds(config) == expected


def test_full_layers_of_gemma4_have_their_own_heads():
    config = tiny(
        "gemma4_text",
        num_kv_shared_layers=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        global_head_dim=512,
    )
    assert read_shape(config).of_kind("full") == [LayerShape("full", 1, 512)]
    assert read_shape(config).of_kind("sliding")[0] == LayerShape("sliding", 2, 64, 300)


def test_a_model_that_also_sees_is_read_from_its_text_config():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    shape = read_shape(
        {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text, "hidden_size": 1}
    )
    assert shape.of_kind("full") == [LayerShape("full", 4, 256)] * 5
    assert len(shape.of_kind("sliding")) == 29
    assert kinds({"model_type": "qwen3_vl", "text_config": tiny("qwen3_vl_text")}) == "ffffff"
    assert kinds({"model_type": "mistral3", "text_config": TINY}) == "ffffff"


def test_heads_default_as_in_mlx_lm():
    config = tiny("llama")
    del config["head_dim"], config["num_key_value_heads"]
    assert read_shape(config).layers[0] == LayerShape("full", 4, 16)
    assert read_shape(config | {"head_dim": None}).layers[0] == LayerShape("full", 4, 16)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "8", 8.0, True, [8]])
def test_a_key_that_is_missing_or_no_number_is_named(key, value):
    with pytest.raises(ModelFileError, match=f"'{key}'"):
        read_shape(tiny("llama", **{key: value}))


@pytest.mark.parametrize("types", [["full_attention"], ["other"] * 6, [["conv"]] * 6, 6])
def test_layer_types_that_do_not_match_the_layers_are_refused(types):
    with pytest.raises(ModelFileError, match="'layer_types' in the config must hold 6 names"):
        read_shape(tiny("llama", layer_types=types))


def test_a_hybrid_that_does_not_say_which_layers_attend_is_refused():
    with pytest.raises(ModelFileError, match="lacks 'layer_types'"):
        read_shape(tiny("lfm2"))


def test_a_config_without_a_model_type_is_refused():
    with pytest.raises(ModelFileError, match="lacks 'model_type'"):
        read_shape(TINY)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ModelFileError, match="'dtype' in the config must be one of bfloat16"):
        read_shape(tiny("llama", dtype="int7"))


def test_latent_attention_is_refused_with_the_reason():
    with pytest.raises(UnsupportedModel, match="kv_lora_rank"):
        read_shape(tiny("deepseek_v3", kv_lora_rank=512))


def test_a_model_type_that_is_not_known_is_refused_rather_than_guessed():
    with pytest.raises(UnsupportedModel, match="how rwkv9 keeps its cache is not known"):
        read_shape(tiny("rwkv9"))


def test_a_head_dim_of_80_is_refused_by_turbo_and_taken_by_off():
    shape = read_shape(tiny("llama", head_dim=80))
    check_scheme(shape, OFF)
    with pytest.raises(UnsupportedModel, match="the model has 80"):
        check_scheme(shape, TURBO)


def test_a_scheme_that_would_change_nothing_is_refused():
    shape = read_shape(tiny("gemma3_text", num_hidden_layers=5))
    check_scheme(shape, OFF)
    with pytest.raises(UnsupportedModel, match="would apply to no layer"):
        check_scheme(shape, TURBO)


def test_qwen25_7b_keeps_56_kib_per_token_and_turbo_22400_bytes():
    shape = read_shape(QWEN25_7B)
    assert bytes_per_token(shape, OFF) == 28 * 4 * 512 == 56 * 1024
    assert bytes_per_token(shape, TURBO) == 28 * 4 * 200


def test_a_cache_grows_in_steps():
    shape = read_shape(tiny("llama"))
    one, step = (cost(shape, TURBO, tokens).cache_bytes for tokens in (1, STEP_TOKENS))
    assert one == step == STEP_TOKENS * bytes_per_token(shape, TURBO)
    assert cost(shape, TURBO, STEP_TOKENS + 1).cache_bytes == 2 * step


def test_sliding_layers_stop_growing_and_do_not_depend_on_the_scheme():
    shape = read_shape(tiny("gemma3_text"))
    bound = 5 * 2 * 2 * 64 * 4 * (300 - 1 + PREFILL_TOKENS)
    assert cost(shape, OFF, 10**6).fixed_bytes == cost(shape, TURBO, 10**7).fixed_bytes == bound
    assert cost(shape, OFF, 100).fixed_bytes == 5 * 2 * 2 * 64 * 4 * 100


def test_a_row_that_stays_plain_for_a_while_costs_what_it_was():
    shape = read_shape(tiny("llama"))
    late = Scheme.parse("turbo:k8v3+start1025")
    plain = cost(shape, OFF, 1024).cache_bytes
    assert cost(shape, late, 1024).cache_bytes == plain
    assert cost(shape, late, 1025).cache_bytes == plain
    assert cost(shape, late, 10**6).cache_bytes == cost(shape, TURBO, 10**6).cache_bytes


def test_working_memory_is_the_formula_of_the_docstring():
    shape = read_shape(tiny("llama"))
    tokens, chunk = 10_000, PREFILL_TOKENS
    allocated = 40 * STEP_TOKENS
    common = 8 * 50 + chunk * (6 * 64 + 2 * (4 + 2 * 2) * 64 + 4 * 96) * 4
    off_layer = 2 * 2 * 64 * 4 * allocated
    assert cost(shape, OFF, tokens).working_bytes == common + off_layer
    turbo_layer = 2 * TURBO.bytes_per_token(64) * allocated
    codec = 2 * 64 * (2 * 96 * chunk + (7 + 9) * allocated)
    assert cost(shape, TURBO, tokens).working_bytes == common + turbo_layer + codec
    affine = Scheme.parse("affine:8")
    affine_layer = 2 * affine.bytes_per_token(64, dtype_bytes=4) * allocated
    scores = 4 * chunk * tokens * 4
    assert cost(shape, affine, tokens).working_bytes == common + affine_layer + scores


schemes = st.sampled_from(["off", "affine:8", "turbo:k8v3", "turbo:k4v2", "turbo:k8v3+start3000"])
shapes = st.sampled_from(["llama", "gemma3_text", "qwen3_next", "gpt_oss"])


@given(schemes, shapes, st.integers(0, 10**9))
def test_the_context_that_fits_is_the_longest(scheme, model_type, memory_bytes):
    shape, scheme = read_shape(tiny(model_type)), Scheme.parse(scheme)
    fit = max_tokens(shape, scheme, memory_bytes)
    if fit.tokens:
        assert cost(shape, scheme, fit.tokens).total_bytes <= memory_bytes
    if fit.bound == "memory":
        assert cost(shape, scheme, fit.tokens + 1).total_bytes > memory_bytes
    else:
        assert (fit.bound, fit.tokens) == ("model", 4096)


@given(schemes, shapes, st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_tokens_never_cost_less(scheme, model_type, a, b):
    shape, scheme = read_shape(tiny(model_type)), Scheme.parse(scheme)
    fewer, more = sorted((a, b))
    assert cost(shape, scheme, fewer).total_bytes <= cost(shape, scheme, more).total_bytes


def test_nothing_bounds_a_model_without_a_growing_cache_or_a_limit():
    config = tiny("gemma3_text", num_hidden_layers=5)
    del config["max_position_embeddings"]
    assert max_tokens(read_shape(config), OFF, 10**9).tokens is None
