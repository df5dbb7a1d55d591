"""`attach` on models of mlx-lm's own classes, tiny and random."""

import copy
import gc
import importlib
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

import kvstow
from kvstow import Scheme, SchemeError, UnsupportedModel

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
base = pytest.importorskip("mlx_lm.models.base")
host = pytest.importorskip("mlx_lm.models.cache")
generation = pytest.importorskip("mlx_lm.generate")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
tiny = pytest.importorskip("tests.integration.tiny")

pytestmark = pytest.mark.mlx
ORIGINAL = base.quantized_scaled_dot_product_attention
ORIGINAL_WITH_SINKS = base.scaled_dot_product_attention
DeferredKVCache, PackedKVCache = integration.DeferredKVCache, integration.PackedKVCache
attachment = integration.attachment
OURS = {
    "eager": {
        host.KVCache: PackedKVCache,
        host.RotatingKVCache: integration.PackedRotatingKVCache,
    },
    "deferred": {
        host.KVCache: DeferredKVCache,
        host.RotatingKVCache: integration.DeferredRotatingKVCache,
    },
}
build, tokens = tiny.build, tiny.tokens

RECURRENT = "recurrent layer has a state, not keys and values"
# Name: fetch, quantised layers, reasons of the others.
EXPECTED = {
    "cohere": ("deferred", [0, 1], {}),
    "cohere2": ("deferred", [0, 1], {}),
    "dbrx": ("deferred", [0, 1], {}),
    "exaone4": ("deferred", [0, 1], {}),
    "gemma2": ("eager", [0, 1], {}),
    "gemma3": ("deferred", [0, 1], {}),
    "gemma3n": ("deferred", [0, 1, 2, 3], {}),
    "gemma3_text": ("deferred", [0, 1], {}),
    "gemma4_text": ("eager", [0, 1, 2, 3, 4], {}),
    "gpt2": ("deferred", [0, 1], {}),
    "gpt_oss": ("deferred", [0, 1], {}),  # attention sinks
    "jamba": ("deferred", [1], {RECURRENT: [0]}),
    "llama": ("deferred", [0, 1], {}),
    "llama-7": ("deferred", [0, 1], {}),
    "llama-mha": ("deferred", [0, 1], {}),
    "llama-sliding": ("deferred", [0, 1], {}),
    "mixtral": ("deferred", [0, 1], {}),
    "olmo2": ("deferred", [0, 1], {}),
    "phi3": ("deferred", [0, 1], {}),
    "qwen2": ("deferred", [0, 1], {}),
    "qwen3": ("deferred", [0, 1], {}),
    "qwen3_next": ("deferred", [3], {RECURRENT: [0, 1, 2]}),
    "stablelm": ("eager", [0, 1], {}),
}


@pytest.fixture(autouse=True)
def _the_global_is_mlx_lms_own_before_and_after():
    deferred.remove(deferred.Owner())  # what owners left that just went, in other tests
    assert base.quantized_scaled_dot_product_attention is ORIGINAL
    yield
    gc.collect()  # a test may drop an attached model
    assert not deferred._owners
    deferred.remove(deferred.Owner())


SCHEDULE = (12, 5, 1, 1, -3, 2, 1, 40, 1, 1)  # a negative number trims


def run(model, cache=None, schedule=SCHEDULE, b=1):
    """Logits of every append of the schedule, joined: ``(b, tokens, vocab)``."""
    cache = host.make_prompt_cache(model) if cache is None else cache
    text, at, logits = tokens(200, b=b), 0, []
    for n in schedule:
        if n < 0:
            assert host.trim_prompt_cache(cache, -n) == -n
            at += n
        else:
            out = model(text[:, at : at + n], cache=cache)
            logits.append(np.array(out.astype(mx.float32)))
            at += n
    return np.concatenate(logits, axis=1)


def schedule_of(name):
    """Recurrent layers cannot be trimmed."""
    recurrent = RECURRENT in EXPECTED[name][2]
    return tuple(n for n in SCHEDULE if n > 0) if recurrent else SCHEDULE


def defined(model, report):
    """A prompt cache whose quantised layers follow the definition in numpy."""
    return [
        tiny.definition(report.scheme, c) if layer.quantised else c
        for layer, c in zip(report.layers, host.make_prompt_cache(model), strict=True)
    ]


def layer_types(model):
    return [type(c) for c in host.make_prompt_cache(model)]


# --- the report


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_says_what_is_quantised_how_and_why_the_rest_is_not(name):
    fetch, quantised, kept = EXPECTED[name]
    model = build(name)
    before = layer_types(model)
    report = kvstow.attach(model, "turbo")
    assert report.scheme == Scheme.parse("turbo:k8v3")
    assert (report.fetch, report.kept) == (fetch, kept)
    assert [x.index for x in report.layers if x.quantised] == quantised
    assert report.n_quantised == len(quantised)
    assert bool(report.fetch_reason) == (fetch == "eager")
    assert report.as_dict() == {
        "quantised": len(quantised),
        "kept": len(before) - len(quantised),
        "reasons": kept,
    }
    assert str(report).startswith(f"turbo:k8v3: {len(quantised)} of {len(before)} layers, {fetch}")
    for layer, now, then in zip(report.layers, layer_types(model), before, strict=True):
        assert now is (OURS[fetch][then] if layer.quantised else then)
        assert layer.fetch == (fetch if layer.quantised else "host")
        kind = {host.KVCache: "full", host.RotatingKVCache: "sliding"}.get(then)
        assert layer.kind == (kind if layer.quantised else None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2", "expand_dims"),
        ("gemma4_text", "scaled_dot_product_attention"),
        ("stablelm", "has no attribute 'astype'"),
    ],
)
def test_deferred_is_refused_with_the_reason_where_the_model_needs_arrays(name, why):
    model = build(name)
    with pytest.raises(UnsupportedModel, match=rf"cannot take packed windows: .*{why}"):
        kvstow.attach(model, "turbo", fetch="deferred")
    assert "make_cache" not in vars(model)
    assert why in kvstow.attach(model, "turbo").fetch_reason
    assert kvstow.attach(model, "turbo", fetch="eager").fetch_reason == ""


class Subclass(host.KVCache):
    """Somebody's own cache, which may store in any way."""


def test_only_mlx_lms_own_plain_cache_is_replaced_and_only_where_it_is_used():
    model = build("llama")
    model.make_cache = lambda: [host.KVCache(), Subclass(), host.KVCache()]
    report = kvstow.attach(model, "turbo")
    reasons = [layer.reason for layer in report.layers]
    assert reasons[0] == ""
    assert "Subclass" in reasons[1]
    assert reasons[2] == "the model stores nothing in this cache"
    assert [type(c) for c in model.make_cache()] == [DeferredKVCache, Subclass, host.KVCache]


class DecodesItself(nn.Module):
    """A layer's attention that asks its cache for arrays, whatever the cache returned."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x, mask=None, cache=None):
        b, n, _ = x.shape
        q, k, v = (
            project(x).reshape(b, n, -1, 64).transpose(0, 2, 1, 3)
            for project in (self.inner.q_proj, self.inner.k_proj, self.inner.v_proj)
        )
        cache.update_and_fetch(k, v)
        k, v = cache.keys_and_values()
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        return self.inner.o_proj(out.transpose(0, 2, 1, 3).reshape(b, n, -1))


def test_a_model_whose_packed_windows_go_unused_is_fetched_eagerly():
    model = build("llama")
    model.layers[1].self_attn = DecodesItself(model.layers[1].self_attn)
    report = kvstow.attach(model, "turbo")
    assert report.fetch == "eager"
    assert report.fetch_reason == "2 of 4 packed windows reached mlx-lm's own attention"


# --- the results


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2+start15+stored"])
def test_logits_are_those_of_the_definition_over_a_whole_schedule(name, scheme):
    model, schedule = build(name), schedule_of(name)
    off = run(model, schedule=schedule)
    report = kvstow.attach(model, scheme, fetch="eager")
    eager = run(model, schedule=schedule)
    automatic = kvstow.attach(model, scheme)
    auto = run(model, schedule=schedule)
    kvstow.detach(model)
    wanted = run(model, defined(model, report), schedule)
    assert (eager == wanted).all()
    # An element between two codes may take the other one, as the order of sums differs.
    tolerance = 1e-2 if automatic.fetch == "deferred" else 0
    np.testing.assert_allclose(auto, wanted, rtol=0, atol=tolerance)
    assert np.abs(off - wanted).max() > 0.1 * off.std()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text"])
def test_the_first_append_is_exact_and_the_second_is_not(name):
    model = build(name)
    off = run(model)
    kvstow.attach(model, "turbo")
    on = run(model)
    np.testing.assert_allclose(on[:, :12], off[:, :12], rtol=0, atol=1e-5)
    assert np.abs(on[:, 12:17] - off[:, 12:17]).max() > 1e-2


def test_a_layer_that_borrows_anothers_cache_attends_to_what_is_stored_from_the_first_append():
    model = build("gemma3n")
    off = run(model, schedule=(12,))
    kvstow.attach(model, "turbo:k8v3")
    assert np.abs(run(model, schedule=(12,)) - off).max() > 1e-3


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_start_leaves_every_logit_as_it_was_until_n_tokens_are_held(fetch):
    model = build("llama")
    off = run(model, schedule=(12, 5, 1, 1, 1))
    kvstow.attach(model, "turbo:k8v3+start18", fetch=fetch)
    on = run(model, schedule=(12, 5, 1, 1, 1))
    assert np.abs(on - off)[:, :18].max() < 1e-5
    assert np.abs(on - off)[:, 18:].max() > 1e-2


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_under_stored_logits_do_not_depend_on_how_the_prompt_was_cut(fetch):
    model = build("llama")
    schedules = [(30,), (12, 18), (1,) * 30, (29, 1)]
    kvstow.attach(model, "turbo:k8v3+stored", fetch=fetch)
    at_once, *cut = (run(model, schedule=s) for s in schedules)
    for logits in cut:
        np.testing.assert_allclose(logits, at_once, rtol=0, atol=1e-3)
    kvstow.attach(model, "turbo:k8v3", fetch=fetch)
    at_once, *cut = (run(model, schedule=s) for s in schedules)
    assert min(np.abs(logits - at_once).max() for logits in cut[:2]) > 1e-2


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_rows_of_a_batch_equal_the_same_rows_alone(fetch):
    model = build("llama")
    kvstow.attach(model, "turbo", fetch=fetch)
    together, text, at = run(model, b=3), tokens(200, b=3), 0
    cache = host.make_prompt_cache(model)
    alone = []
    for n in SCHEDULE:
        if n < 0:
            host.trim_prompt_cache(cache, -n)
        else:
            alone.append(np.array(model(text[1:2, at : at + n], cache=cache)))
        at += n
    np.testing.assert_allclose(together[1:2], np.concatenate(alone, axis=1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_a_half_precision_model_stays_in_half_precision(fetch, dtype):
    model = build("llama", dtype=getattr(mx, dtype))
    off = run(model, schedule=(9, 4, 1))
    kvstow.attach(model, "turbo:k8v8", fetch=fetch)
    cache = host.make_prompt_cache(model)
    on = run(model, cache, schedule=(9, 4, 1))
    assert model(tokens(1), cache=cache).dtype == getattr(mx, dtype)
    # 8 bits, and bfloat16's own noise of 2**-8 on logits of order 1.
    np.testing.assert_allclose(on, off, rtol=0, atol=0.2)


@pytest.mark.parametrize(
    ("scheme", "ratio"), [("turbo:k8v3", 2.56), ("turbo:k8v4", 256 / 108), ("turbo:k4v2", 256 / 60)]
)
def test_the_bytes_allocated_shrink_by_what_the_scheme_says(scheme, ratio):
    model = build("llama")
    plain = host.make_prompt_cache(model)
    run(model, plain)
    kvstow.attach(model, scheme)
    packed = host.make_prompt_cache(model)
    run(model, packed)
    before, after = kvstow.usage(plain), kvstow.usage(packed)
    assert before.kv_bytes == 2 * 2 * 2 * 64 * 256 * 4  # layers, K and V, heads, head_dim, float32
    assert before.compression_ratio == 0.5  # float32 against bf16
    assert after.kv_bytes == sum(c.nbytes for c in packed)
    assert after.compression_ratio == pytest.approx(ratio)
    assert before.kv_bytes / after.kv_bytes == pytest.approx(2 * ratio)
    assert after.kv_bytes_bf16 == before.kv_bytes_bf16
    assert (after.tokens, after.capacity_tokens) == (61, 256)


def test_memory_really_allocated_shrinks():
    model = build("llama", head_dim=256)
    mx.eval(model.parameters())

    def held():
        cache = host.make_prompt_cache(model)
        before = mx.get_active_memory()
        for at in range(0, 1024, 256):
            model(tokens(256, seed=at), cache=cache)
            mx.eval([c.state for c in cache])
        return mx.get_active_memory() - before, cache

    plain_bytes, _ = held()
    kvstow.attach(model, "turbo:k8v3")
    packed_bytes, cache = held()
    # float32 against 6.25 bits: 5.12, less what rounds allocations up.
    assert plain_bytes / packed_bytes > 5
    assert packed_bytes >= kvstow.usage(cache).kv_bytes


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_a_decode_step_holds_the_decoded_tokens_of_one_layer_at_a_time(fetch):
    model = build("llama", num_hidden_layers=8)
    mx.eval(model.parameters())
    kvstow.attach(model, "turbo", fetch=fetch)
    cache = host.make_prompt_cache(model)
    for at in range(0, 2048, 512):
        model(tokens(512, seed=at), cache=cache)
        mx.eval([c.state for c in cache])
    model(tokens(1), cache=cache)  # the planes grow here, and not in what is measured
    mx.eval([c.state for c in cache])
    one_layer = 2 * 2 * 64 * 2304 * 4  # K and V, heads, head_dim, capacity, float32
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(tokens(1), cache=cache), [c.state for c in cache])
    assert mx.get_peak_memory() - before < 2.5 * one_layer


# --- attaching and detaching


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_detach_gives_the_model_its_own_caches_back(name):
    model = build(name)
    before, logits = layer_types(model), run(model)
    kvstow.attach(model, "turbo")
    assert layer_types(model) != before
    kvstow.detach(model)
    assert layer_types(model) == before
    assert "make_cache" not in vars(model)
    assert (run(model) == logits).all()
    kvstow.detach(model)  # once more does nothing
    assert layer_types(model) == before


def test_attaching_again_replaces_the_scheme():
    model = build("gemma3_text")
    kvstow.attach(model, "turbo:k8v3")
    kvstow.attach(model, "turbo:k2v2", fetch="eager")
    sliding, cache = host.make_prompt_cache(model)
    assert (type(sliding), sliding.max_size) == (integration.PackedRotatingKVCache, 32)
    assert type(cache) is PackedKVCache
    assert str(sliding.scheme) == str(cache.scheme) == "turbo:k2v2"
    report = kvstow.attach(model, "affine:8")
    assert layer_types(model) == [host.RotatingKVCache, host.QuantizedKVCache]
    why = "mlx-lm's affine cache has no sliding window, as of 32 tokens here"
    assert report.kept == {why: [0]}
    assert [layer.kind for layer in report.layers] == ["sliding", "full"]
    kvstow.detach(model)
    assert layer_types(model) == [host.RotatingKVCache, host.KVCache]


@pytest.mark.parametrize("scheme", [None, "off"])
def test_off_detaches_and_reports_that_it_is_off(scheme):
    model = build("llama")
    kvstow.attach(model, "turbo")
    report = kvstow.attach(model, scheme)
    assert "make_cache" not in vars(model)
    assert (report.n_quantised, report.kept) == (0, {"the scheme is off": [0, 1]})
    assert str(report).startswith("off: 0 of 2 layers, host")


def own_make_cache(model):
    """The model with a ``make_cache`` of its own on the instance."""

    def make_cache():
        return [host.KVCache(), host.RotatingKVCache(max_size=32)]

    model.make_cache = make_cache
    return make_cache


def test_an_instances_own_make_cache_is_asked_and_comes_back():
    model = build("llama")
    own = own_make_cache(model)
    report = kvstow.attach(model, "turbo")
    assert [layer.kind for layer in report.layers] == ["full", "sliding"]
    kvstow.attach(model, "turbo:k8v8")
    assert [type(c) for c in model.make_cache()] == [*OURS["deferred"].values()]
    kvstow.detach(model)
    assert model.make_cache is own


def test_attached_lasts_as_long_as_the_block():
    model = build("llama")
    before = layer_types(model)
    with kvstow.attached(model, "turbo") as report:
        assert report.n_quantised == 2
        assert layer_types(model) == [DeferredKVCache] * 2
    assert layer_types(model) == before
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize("inner", ["turbo:k2v2", "affine:8", "off"])
def test_attached_brings_the_earlier_attachment_back_even_after_an_exception(inner):
    model = build("llama")
    own = own_make_cache(model)
    kvstow.attach(model, "turbo:k8v4", fetch="eager")
    earlier = attachment(model)

    def fail():
        with kvstow.attached(model, inner):
            assert attachment(model) is not earlier
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert attachment(model) is earlier
    assert str(model.make_cache()[0].scheme) == "turbo:k8v4"
    kvstow.detach(model)
    assert model.make_cache is own


def test_attached_comes_back_when_the_block_itself_detached():
    model = build("llama")
    kvstow.attach(model, "turbo:k8v4")
    with kvstow.attached(model, "turbo:k2v2"):
        kvstow.detach(model)
    assert {str(c.scheme) for c in host.make_prompt_cache(model)} == {"turbo:k8v4"}
    kvstow.detach(model)
    assert base.quantized_scaled_dot_product_attention is ORIGINAL


def test_attach_computes_nothing_and_leaves_nothing_behind():
    model = build("llama")  # its weights are a graph that nothing has computed
    kvstow.attach(build("llama"), "turbo")  # constants are made once
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kvstow.attach(model, "turbo")
    assert mx.get_peak_memory() - before < 16384
    assert mx.get_active_memory() - before < 1024


# --- the one global of mlx-lm


def is_ours():
    """Whether mlx-lm's functions are replaced: both, or neither."""
    ours = base.quantized_scaled_dot_product_attention is not ORIGINAL
    for module in (base, importlib.import_module("mlx_lm.models.gpt_oss")):
        assert (module.scaled_dot_product_attention is not ORIGINAL_WITH_SINKS) == ours
    return ours


def test_the_global_is_replaced_by_the_first_attach_and_restored_by_the_last_detach():
    one, two = build("llama"), build("qwen2")
    kvstow.attach(one, "turbo")
    assert is_ours()
    kvstow.attach(one, "turbo:k8v8")
    kvstow.attach(two, "turbo")
    kvstow.detach(one)
    assert is_ours()
    kvstow.detach(one)
    assert is_ours()
    kvstow.detach(two)
    assert not is_ours()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"scheme": "turbo", "fetch": "eager"}),
        ("llama", {"scheme": "affine:8"}),
        ("llama", {"scheme": "off"}),
        ("stablelm", {"scheme": "turbo"}),
    ],
)
def test_the_global_stays_where_nothing_is_deferred(name, options):
    model = build(name)
    kvstow.attach(model, **options)
    assert not is_ours()
    kvstow.detach(model)
    assert not is_ours()


@pytest.mark.parametrize("after", ["turbo:k8v3 eager", "affine:8 auto", "off auto"])
def test_leaving_deferred_for_another_path_restores_the_global(after):
    model = build("llama")
    kvstow.attach(model, "turbo")
    scheme, fetch = after.split()
    kvstow.attach(model, scheme, fetch=fetch)
    assert not is_ours()


def test_two_models_under_two_schemes_run_in_turns():
    one, two = build("llama"), build("qwen3", seed=1)
    with kvstow.attached(one, "turbo:k8v8"):
        alone_one = run(one)
    with kvstow.attached(two, "turbo:k4v2"):
        alone_two = run(two)
    kvstow.attach(one, "turbo:k8v8")
    kvstow.attach(two, "turbo:k4v2")
    assert (run(two) == alone_two).all()
    assert (run(one) == alone_one).all()
    kvstow.detach(two)
    assert (run(one) == alone_one).all()


def affine_by_hand(model, scheme):
    return [host.QuantizedKVCache(scheme.group_size, scheme.bits) for _ in model.layers]


@pytest.mark.parametrize("text", ["affine:8", "affine:4", "affine:8g32"])
def test_affine_is_mlx_lms_own_quantised_cache_from_the_first_token(text):
    model, scheme = build("llama"), Scheme.parse(text)
    off, wanted = run(model), run(model, affine_by_hand(model, scheme))
    report = kvstow.attach(model, text)
    assert (report.fetch, report.n_quantised) == ("host", 2)
    assert (run(model) == wanted).all()
    assert np.abs(wanted - off).max() > 1e-3


def test_affine_passes_through_while_another_model_is_deferred():
    model, other = build("llama"), build("qwen2")
    wanted = run(model, affine_by_hand(model, Scheme.parse("affine:8")))
    kvstow.attach(other, "turbo")
    assert is_ours()
    assert (run(model, affine_by_hand(model, Scheme.parse("affine:8"))) == wanted).all()
    kvstow.attach(model, "affine:8")
    assert (run(model) == wanted).all()


def test_one_model_can_mix_affine_and_packed_layers():
    model = build("llama")
    kvstow.attach(model, "turbo:k8v8")
    cache = host.make_prompt_cache(model)
    cache[0] = host.QuantizedKVCache(64, 8)
    mixed = run(model, cache)
    kvstow.detach(model)
    # Both are 8 bits: logits of order 1 move by a few hundredths.
    np.testing.assert_allclose(mixed, run(model), rtol=0, atol=0.2)


# --- refusals


MLA = r"multi-head latent attention \(kv_lora_rank 64\)"
REFUSED = [
    ("deepseek_v2", "turbo", "auto", MLA),
    ("deepseek_v2", "affine:8", "auto", MLA),
    ("kimi_vl", "turbo", "auto", MLA),
    ("mamba", "turbo", "auto", f"would apply to no layer of this model: {RECURRENT}"),
    ("mamba", "affine:8", "auto", f"would apply to no layer of this model: {RECURRENT}"),
    ("llama-80", "turbo", "auto", r"turbo:k8v3 needs head_dim in \(64, 128, 256, 512\), .* 80"),
    ("llama-80", "turbo:k4v2+start9", "eager", r"needs head_dim in .* the model has 80"),
    ("llama-80", "affine:8", "auto", "affine:8 needs a head_dim .* multiple of 64, .* 80"),
    ("llama-80", "affine:4g32", "auto", "affine:4g32 needs a head_dim .* multiple of 32, .* 80"),
    ("gpt_oss", "affine:8", "auto", "does not support attention sinks"),
    ("gemma2", "affine:8", "auto", "does not run on affine:8 caches"),
    ("llama", "affine:8", "eager", "fetch 'eager' is an option of turbo, the scheme is affine:8"),
    ("llama", "affine:8", "deferred", "fetch 'deferred' is an option of turbo"),
    ("gemma2", "turbo", "deferred", "expand_dims"),
]


@pytest.mark.parametrize(("name", "scheme", "fetch", "why"), REFUSED)
def test_a_refusal_says_why_and_leaves_the_model_as_it_was(name, scheme, fetch, why):
    model = build(name)
    before = layer_types(model)
    with pytest.raises(UnsupportedModel, match=why):
        kvstow.attach(model, scheme, fetch=fetch)
    assert "make_cache" not in vars(model)
    assert layer_types(model) == before
    assert not is_ours()


@pytest.mark.parametrize(
    ("scheme", "fetch", "error"),
    [
        ("turbo:k8", "auto", SchemeError),
        ("turbo:k3v3", "auto", SchemeError),
        ("affine:5", "auto", SchemeError),
        ("TURBO", "auto", SchemeError),
        ("turbo", "fast", ValueError),
        ("turbo", "fused", UnsupportedModel),
        ("affine:8", "eager", UnsupportedModel),
    ],
)
def test_a_failed_attach_leaves_the_earlier_attachment(scheme, fetch, error):
    model = build("llama")
    kvstow.attach(model, "turbo:k8v4")
    earlier = attachment(model)
    with pytest.raises(error):
        kvstow.attach(model, scheme, fetch=fetch)
    with pytest.raises(error), kvstow.attached(model, scheme, fetch=fetch):
        pass
    assert attachment(model) is earlier
    assert is_ours()
    kvstow.detach(model)
    assert not is_ours()


def test_a_wrong_scheme_is_reported_before_the_model_is_looked_at():
    with pytest.raises(SchemeError, match="key bits must be one of"):
        kvstow.attach(object(), "turbo:k9v3")


@pytest.mark.parametrize("thing", [object(), None, ("model", "tokenizer"), "smollm2"])
def test_what_is_not_an_mlx_model_is_refused(thing):
    with pytest.raises(
        UnsupportedModel, match=f"expected an mlx-lm model, got {type(thing).__name__}"
    ):
        kvstow.attach(thing, "turbo")
    with pytest.raises(UnsupportedModel, match="expected an mlx-lm model"):
        kvstow.detach(thing)


def test_an_mlx_module_that_is_no_language_model_is_refused():
    with pytest.raises(UnsupportedModel):
        kvstow.attach(nn.Linear(4, 4), "turbo")


def test_an_mlx_array_is_refused():
    with pytest.raises(UnsupportedModel):
        kvstow.attach(mx.zeros(3), "turbo")


# --- as mlx-lm uses it


@contextmanager
def replies(model, scheme, fetch="auto"):
    with kvstow.attached(model, scheme, fetch=fetch):
        yield lambda **options: [
            int(token) for token, *_ in generation.generate_step(tokens(20)[0], model, **options)
        ]


def test_generation_makes_its_own_cache_under_the_scheme():
    model = build("llama")
    seen = []
    with kvstow.attached(model, "turbo"):
        factory = model.make_cache
        model.make_cache = lambda: seen.append(factory()) or seen[-1]
        list(generation.generate_step(tokens(20)[0], model, max_tokens=5))
        model.make_cache = factory
    (cache,) = seen
    assert {type(c) for c in cache} == {DeferredKVCache}
    assert kvstow.usage(cache).tokens >= 24
    assert kvstow.usage(cache).compression_ratio == pytest.approx(2.56)


def test_kv_bits_of_mlx_lm_leaves_packed_caches_alone():
    model = build("llama")
    kvstow.attach(model, "turbo")
    cache = host.make_prompt_cache(model)
    list(
        generation.generate_step(
            tokens(20)[0], model, prompt_cache=cache, max_tokens=5, kv_bits=8, quantized_kv_start=0
        )
    )
    assert {type(c) for c in cache} == {DeferredKVCache}


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_a_prompt_cache_that_was_trimmed_back_continues_as_it_did(fetch):
    model = build("llama")
    kvstow.attach(model, "turbo", fetch=fetch)
    cache, text = host.make_prompt_cache(model), tokens(60)
    model(text[:, :30], cache=cache)
    first = np.array(model(text[:, 30:40], cache=cache))
    host.trim_prompt_cache(cache, 10)
    again = np.array(model(text[:, 30:40], cache=cache))
    assert (first == again).all()


@pytest.mark.parametrize("scheme", ["turbo", "affine:8"])
def test_a_cache_made_while_attached_can_be_used_after_detach(scheme):
    model = build("llama")
    with kvstow.attached(model, scheme):
        wanted = run(model)
        cache, fresh = host.make_prompt_cache(model), host.make_prompt_cache(model)
        run(model, cache, SCHEDULE[:3])
        ahead = [type(c).from_state(c.state) for c in cache]
        following = np.array(model(tokens(4, seed=3), cache=ahead))
    np.testing.assert_allclose(
        np.array(model(tokens(4, seed=3), cache=cache)), following, rtol=0, atol=1e-3
    )
    np.testing.assert_allclose(run(model, fresh), wanted, rtol=0, atol=1e-3)


def test_detaching_a_copy_of_a_model_leaves_the_model_working():
    model = build("llama")
    kvstow.attach(model, "turbo")
    wanted, twin = run(model), copy.deepcopy(model)
    np.testing.assert_allclose(run(twin), wanted, rtol=0, atol=1e-3)
    kvstow.detach(twin)
    assert layer_types(twin) == [host.KVCache] * 2
    np.testing.assert_allclose(run(model), wanted, rtol=0, atol=1e-3)
    kvstow.detach(model)
    assert not is_ours()


def test_detaching_a_copy_first_leaves_no_trace_on_later_attachments():
    model = build("llama")
    kvstow.attach(model, "turbo")
    twin = copy.deepcopy(model)
    kvstow.detach(twin)
    kvstow.detach(model)
    assert not is_ours()
    assert kvstow.attach(model, "turbo").fetch == "deferred"
    assert deferred.is_installed()
    kvstow.detach(model)
    assert not is_ours()


def test_the_copy_of_an_attached_model_outlives_it():
    model = build("llama")
    kvstow.attach(model, "turbo")
    wanted, twin = run(model), copy.deepcopy(model)
    del model
    np.testing.assert_allclose(run(twin), wanted, rtol=0, atol=1e-3)
    kvstow.detach(twin)


def test_an_attached_model_is_freed_with_its_last_reference():
    model = build("llama")
    kvstow.attach(model, "turbo")
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert not deferred.is_installed()


def test_attaching_while_another_thread_decodes_takes_the_deferred_path():
    busy, stop = build("llama"), threading.Event()
    mx.eval(busy.parameters())  # a graph belongs to the thread that built it
    kvstow.attach(busy, "turbo")

    def decode():
        while not stop.is_set():
            run(busy)

    thread = threading.Thread(target=decode)
    thread.start()
    model = build("llama")
    paths = {kvstow.attach(model, "turbo").fetch for _ in range(20)}
    stop.set()
    thread.join()
    kvstow.detach(model)
    kvstow.detach(busy)
    assert paths == {"deferred"}


def test_a_plain_cache_made_before_attach_stays_plain():
    model = build("llama")
    off, cache = run(model), host.make_prompt_cache(model)
    kvstow.attach(model, "turbo")
    assert (run(model, cache) == off).all()


def test_another_thread_can_run_the_model():
    model, results = build("llama"), []
    mx.eval(model.parameters())
    kvstow.attach(model, "turbo")
    wanted = run(model)

    def work():
        with mx.stream(mx.new_stream(mx.default_device())):
            results.append(run(model))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (results[0] == wanted).all()


# --- converting a prompt cache


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+start50", "affine:8"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_converted_cache_continues_like_one_filled_at_once(name, scheme):
    model, text = build(name), tokens(40)
    plain = host.make_prompt_cache(model)
    for at in (0, 10):
        model(text[:, at : at + 10], cache=plain)
    kvstow.attach(model, scheme)
    at_once = host.make_prompt_cache(model)
    model(text[:, :20], cache=at_once)
    converted = attachment(model).convert(plain)
    assert [type(c) for c in converted] == [type(c) for c in at_once]
    got, wanted = (np.array(model(text[:, 20:25], cache=c)) for c in (converted, at_once))
    # affine's first append is quantised already, so its tokens were made otherwise.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.1 if scheme == "affine:8" else 1e-3)


def test_every_configuration_is_tested():
    assert set(EXPECTED) | {name for name, *_ in REFUSED} == set(tiny.CONFIGS)
