from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow import Scheme, UnsupportedModel
from kvstow.capacity import (
    PREFILL_TOKENS,
    LayerShape,
    ModelShape,
    bytes_per_token,
    check_layer,
    cost,
    max_tokens,
)
from kvstow.policy import Policy
from kvstow.store import STEP_TOKENS

OFF, AFFINE, TURBO = (Scheme.parse(text) for text in ("off", "affine:8", "turbo:k8v3"))
FULL = LayerShape("full", 2, 64, 64)
SLIDING = LayerShape("sliding", 2, 64, 64, window=300)
RECURRENT = LayerShape("recurrent", state_bytes=1000)
LATENT = LayerShape("full", 1, 512, 64)
PLAIN = LayerShape("plain", 2, 96, 32)


def model(*layers, max_tokens=4096):
    return ModelShape(
        layers=layers,
        n_heads=4,
        hidden_size=64,
        ffn_size=96,
        vocab_size=50,
        max_tokens=max_tokens,
        dtype_bytes=4,
    )


LLAMA = model(*[FULL] * 6)
GEMMA = model(*[SLIDING] * 5, FULL)
HYBRID = model(*[RECURRENT] * 3, FULL)
MIXED = model(FULL, PLAIN)
QWEN25_7B = ModelShape((LayerShape("full", 4, 128, 128),) * 28, 28, 3584, 18944, 152064, 32768, 2)


@pytest.mark.parametrize("scheme", [TURBO, AFFINE])
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (LayerShape("full", 2, 80, 80), "the model has 80"),
        (LATENT, "keys and values of one head_dim, the model has 512 and 64"),
    ],
)
def test_widths_that_do_not_suit_are_refused_by_every_scheme_but_off(scheme, layer, reason):
    check_layer(OFF, layer)
    for refused in (lambda: check_layer(scheme, layer), lambda: cost(model(layer), scheme, 10)):
        with pytest.raises(UnsupportedModel, match=reason):
            refused()


def test_without_a_scheme_keys_and_values_may_have_different_widths():
    assert bytes_per_token(model(LATENT), OFF) == (512 + 64) * 4


def test_qwen25_7b_keeps_56_kib_per_token_and_turbo_22400_bytes():
    assert bytes_per_token(QWEN25_7B, OFF) == 28 * 4 * 512 == 56 * 1024
    assert bytes_per_token(QWEN25_7B, TURBO) == 28 * 4 * 200


def test_a_layer_that_stays_plain_costs_the_same_under_every_scheme():
    plain = 2 * (96 + 32) * 4
    assert bytes_per_token(MIXED, OFF) == 2 * (64 + 64) * 4 + plain
    assert bytes_per_token(MIXED, TURBO) == 2 * 100 + plain
    assert bytes_per_token(MIXED, AFFINE) == 2 * AFFINE.bytes_per_token(64, dtype_bytes=4) + plain


def test_a_cache_grows_in_steps():
    one, step = (cost(LLAMA, TURBO, tokens).cache_bytes for tokens in (1, STEP_TOKENS))
    assert one == step == STEP_TOKENS * bytes_per_token(LLAMA, TURBO)
    assert cost(LLAMA, TURBO, STEP_TOKENS + 1).cache_bytes == 2 * step


def test_sliding_layers_stop_growing_at_the_bytes_of_a_turbo_scheme():
    room = 300 + PREFILL_TOKENS
    plain, packed = 5 * 2 * 2 * 64 * 4, 5 * 2 * TURBO.bytes_per_token(64)
    assert cost(GEMMA, OFF, 10**6).fixed_bytes == plain * room
    assert cost(GEMMA, TURBO, 10**6).fixed_bytes == packed * room
    assert cost(GEMMA, AFFINE, 10**6).fixed_bytes == plain * room  # mlx-lm cannot convert them
    assert cost(GEMMA, OFF, 100).fixed_bytes == plain * STEP_TOKENS
    assert cost(GEMMA, TURBO, 100).fixed_bytes == packed * STEP_TOKENS


def test_a_sliding_layer_that_stays_plain_for_a_while_costs_what_it_was():
    room = 300 + PREFILL_TOKENS
    late = Scheme.parse("turbo:k8v3+start2000")
    assert cost(GEMMA, late, 10**6).fixed_bytes == 5 * 2 * 2 * 64 * 4 * 2048
    assert cost(GEMMA, Scheme.parse("turbo:k8v3+start9999999"), 10**6).fixed_bytes == (
        5 * 2 * 2 * 64 * 4 * room
    )


def test_a_bounded_layer_that_stays_as_it_is_does_not_depend_on_the_scheme():
    bounded = model(FULL, LayerShape("bounded", 2, 64, 64, window=300))
    bound = 2 * 2 * 64 * 4 * (300 + PREFILL_TOKENS)
    assert {cost(bounded, s, 10**6).fixed_bytes for s in (OFF, TURBO, AFFINE)} == {bound}


def test_states_are_counted_once_whatever_the_context_and_the_scheme():
    assert cost(HYBRID, OFF, 1).fixed_bytes == cost(HYBRID, TURBO, 10**6).fixed_bytes == 3000
    assert bytes_per_token(HYBRID, TURBO) == bytes_per_token(model(FULL), TURBO)


def test_a_row_that_stays_plain_for_a_while_costs_what_it_was():
    late = Scheme.parse("turbo:k8v3+start1025")
    plain = cost(LLAMA, OFF, 1024).cache_bytes
    assert cost(LLAMA, late, 1024).cache_bytes == plain
    assert cost(LLAMA, late, 1025).cache_bytes == plain
    assert cost(LLAMA, late, 10**6).cache_bytes == cost(LLAMA, TURBO, 10**6).cache_bytes


def test_working_memory_is_the_formula_of_the_docstring():
    tokens, chunk = 10_000, PREFILL_TOKENS
    allocated = 40 * STEP_TOKENS
    common = 8 * 50 + chunk * (6 * 64 + 2 * (4 + 2 * 2) * 64 + 4 * 96) * 4
    off_layer = 2 * 2 * 64 * 4 * allocated
    assert cost(LLAMA, OFF, tokens).working_bytes == common + off_layer
    turbo_layer = 2 * TURBO.bytes_per_token(64) * allocated
    codec = 2 * 64 * (2 * 96 * chunk + (7 + 9) * allocated)
    assert cost(LLAMA, TURBO, tokens).working_bytes == common + turbo_layer + codec
    affine_layer = 2 * AFFINE.bytes_per_token(64, dtype_bytes=4) * allocated
    scores = 4 * chunk * tokens * 4
    assert cost(LLAMA, AFFINE, tokens).working_bytes == common + affine_layer + scores


def test_on_a_cpu_all_scores_are_held_but_those_of_stored_tokens():
    tokens, chunk = 1_000_000, PREFILL_TOKENS

    def more(scheme, shape=LLAMA):
        on_cpu, on_gpu = (cost(shape, scheme, tokens, on_gpu=gpu) for gpu in (False, True))
        assert (on_cpu.cache_bytes, on_cpu.fixed_bytes) == (on_gpu.cache_bytes, on_gpu.fixed_bytes)
        return on_cpu.working_bytes - on_gpu.working_bytes

    scores = 4 * chunk * 4  # of one token: heads, queries, float32
    assert more(AFFINE) == 0
    assert more(OFF) == scores * 3907 * STEP_TOKENS
    assert more(OFF, model(SLIDING)) == scores * (300 + chunk)
    tiles = (32 + 24) * 2**20 + 3 * 4 * chunk * 64 * 4
    decoded = (7 + 9) * 2 * 64 * 3907 * STEP_TOKENS
    assert more(TURBO) == max(tiles, scores * chunk) - decoded
    late = Scheme.parse("turbo:k8v3+start500001")
    assert more(late) == scores * (500_000 + chunk) - decoded


schemes = st.sampled_from(["off", "affine:8", "turbo:k8v3", "turbo:k4v2", "turbo:k8v3+start3000"])
shapes = st.sampled_from([LLAMA, GEMMA, HYBRID, MIXED, model(SLIDING, RECURRENT)])


@given(schemes, shapes, st.integers(0, 10**9), st.booleans())
def test_the_context_that_fits_is_the_longest(text, shape, memory_bytes, on_gpu):
    scheme = Scheme.parse(text)
    fit = max_tokens(shape, scheme, memory_bytes, on_gpu=on_gpu)
    if fit.tokens:
        assert cost(shape, scheme, fit.tokens, on_gpu=on_gpu).total_bytes <= memory_bytes
    if fit.bound == "memory":
        needed = cost(shape, scheme, fit.tokens + 1, on_gpu=on_gpu)
        assert needed.total_bytes > memory_bytes
    else:
        assert (fit.bound, fit.tokens) == ("model", 4096)


@given(schemes, shapes, st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())
def test_more_tokens_never_cost_less(text, shape, a, b, on_gpu):
    scheme = Scheme.parse(text)
    fewer, more = (cost(shape, scheme, n, on_gpu=on_gpu) for n in sorted((a, b)))
    assert fewer.total_bytes <= more.total_bytes


def test_nothing_bounds_a_model_without_a_growing_cache_or_a_limit():
    shape = replace(model(SLIDING), max_tokens=None)
    assert max_tokens(shape, OFF, 10**9).tokens is None


def test_a_policy_costs_what_its_layers_do():
    layers = [replace(FULL, index=0), replace(SLIDING, index=1), replace(FULL, index=2)]
    shape = model(*layers)
    rules = [{"layers": 2, "scheme": "turbo:k8v8"}, {"kind": "sliding", "scheme": "off"}]
    policy = Policy.from_dict({"default": "turbo:k4v2", "rules": rules})
    one = {s: bytes_per_token(model(FULL), Scheme.parse(s)) for s in ("turbo:k4v2", "turbo:k8v8")}
    assert bytes_per_token(shape, policy) == sum(one.values())
    plain = cost(model(SLIDING), OFF, 5000).fixed_bytes
    assert cost(shape, policy, 5000).fixed_bytes == plain
    assert cost(shape, policy, 5000).cache_bytes == sum(one.values()) * 5120


@pytest.mark.parametrize("text", ["off", "affine:8", "turbo:k8v3", "turbo:k8v3+start700"])
def test_a_policy_of_one_scheme_costs_what_the_scheme_does(text):
    shape, scheme = model(FULL, SLIDING, FULL, RECURRENT), Scheme.parse(text)
    assert cost(shape, Policy.of(text), 900) == cost(shape, scheme, 900)
