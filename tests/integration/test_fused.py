"""Which steps of a model go to the kernels, with which arguments; a stand-in computes them."""

import copy
import json
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import kvstow
from kvstow import KvstowWarning, UnsupportedModel

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
fused = pytest.importorskip("kvstow.attention.fused")
attention = pytest.importorskip("kvstow.attention.mlx")
stand_in = pytest.importorskip("tests.kernels.stand_in")
tiny = pytest.importorskip("tests.integration.tiny")
scheduled = pytest.importorskip("tests.integration.scheduled")
batching = pytest.importorskip("tests.integration.batching")
saving = pytest.importorskip("tests.integration.saving")
speculating = pytest.importorskip("tests.integration.speculating")

pytestmark = pytest.mark.mlx
kernels, new_process, no_gpu = stand_in.kernels, stand_in.new_process, stand_in.no_gpu
build, tokens = tiny.build, tiny.tokens
SCHEDULE, run, logits_of = scheduled.SCHEDULE, scheduled.run, scheduled.logits_of
MASKED = "a mask that says more than where rows and windows begin"


@pytest.mark.parametrize("scheme", ["turbo", "turbo:k4v2", "turbo:k8v8+stored", "turbo+start15"])
@pytest.mark.parametrize("name", ["llama", "llama-7", "llama-mha", "qwen3", "gemma3_text"])
def test_logits_are_those_of_deferred_and_the_kernels_have_made_them(kernels, name, scheme):
    model = build(name)
    schedule = tuple(n for n in SCHEDULE if n > 0) if "gemma" in name else SCHEDULE
    wanted = logits_of(model, "deferred", scheme, schedule)
    assert not kernels.attended
    got = logits_of(model, "auto", scheme, schedule)
    np.testing.assert_array_equal(got, wanted)
    assert kernels.attended
    assert kernels.encoded


@pytest.mark.parametrize("fetch", ["auto", "fused"])
def test_steps_of_any_length_go_to_the_kernels(kernels, fetch):
    model = build("llama")
    with kvstow.attached(model, "turbo", fetch=fetch):
        kernels.forget()
        before = fused.counts()
        run(model, schedule=(12, 5, 1, 8, 9, 2))
    served = [(call.shape, call.longest) for call in kernels.attended if call.longest < 100]
    assert served == [
        ((1, 4, n, 64), longest)
        for n, longest in ((5, 17), (1, 18), (8, 26), (9, 35), (2, 37))
        for _layer in range(2)
    ]
    assert fused.counts() - before == Counter({"kernel": 10})
    assert {call.scale for call in kernels.attended} == {0.125}
    assert {call.window for call in kernels.attended if call.longest < 100} == {0}
    of = [kernels.encoded, kernels.appended, kernels.stored]
    encoded, appended, stored = ([s[2] for s, _ in done if s[:2] == (1, 2)] for done in of)
    assert (encoded, appended, stored) == ([12, 12], [5, 5, 8, 8, 9, 9, 2, 2], [1, 1])


def test_prompts_of_any_length_go_to_the_kernel(kernels):
    model, schedule = build("llama"), (12, 40, 1100, 1)
    with kvstow.attached(model, "turbo"):
        kernels.forget()
        before, cache, at = fused.counts(), host.make_prompt_cache(model), 0
        for n in schedule:
            mx.eval(model(tiny.tokens(4000)[:, at : at + n], cache=cache))
            at += n
    lengths = {call.shape[2] for call in kernels.attended if call.shape[:2] == (1, 4)}
    assert lengths == {40, 1100, 1}
    assert fused.counts() - before == Counter({"kernel": 6})


@pytest.mark.filterwarnings("error")
def test_layers_without_kernels_for_prompts_leave_them_to_deferred(kernels):
    wide = {"head_dim": 512, "max_position_embeddings": 4096}
    model, schedule = build("llama", **wide), (12, 5, 9, 1)
    wanted = logits_of(model, "deferred", schedule=schedule)
    with kvstow.attached(model, "turbo") as report:
        assert "fused: steps of up to 8 tokens; deferred: longer ones, and masks" in str(report)
        before = fused.counts()
        np.testing.assert_array_equal(run(model, schedule=schedule), wanted)
    assert fused.counts() - before == Counter({"kernel": 4, "more than 8 query tokens": 2})
    assert {call.shape[2] for call in kernels.attended if call.longest < 100} == {5, 1}


def test_the_report_names_the_layers_that_have_no_kernels_for_prompts(kernels, monkeypatch):
    device = kernels.device()

    def for_keys_of_8_bits(widths, head_dim, dtype):
        if widths[0] != 8:
            raise ValueError("does not fit")
        return device.prefill_kernel(widths, head_dim, dtype)

    one = SimpleNamespace(
        decode_kernel=device.decode_kernel,
        encode_kernel=device.encode_kernel,
        prefill_kernel=for_keys_of_8_bits,
    )
    monkeypatch.setattr(kernels, "device", lambda: one)
    rule = kvstow.policy.Rule(layers=(1,), scheme=kvstow.Scheme.parse("turbo:k4v4"))
    policy = kvstow.Policy(kvstow.Scheme.parse("turbo"), (rule,))
    with kvstow.attached(build("llama"), policy) as report:
        said = "steps of any length, up to 8 tokens in layers 1; deferred: longer ones there, "
        assert said in report.fetch_reason


def test_a_prompt_whose_kernel_fails_its_self_check_is_deferred(kernels, monkeypatch):
    model, schedule = build("llama"), (12, 9, 1)
    wanted = logits_of(model, "deferred", schedule=schedule)
    with kvstow.attached(model, "turbo"):
        monkeypatch.setattr(kernels, "attention_off", 0.5)
        before = fused.counts()
        with pytest.warns(KvstowWarning, match="kvstow_prefill_d64_k8v3_float32.* is off by"):
            logits = run(model, schedule=(12, 9))
    np.testing.assert_array_equal(logits, wanted[:, :21])
    (why,) = fused.counts() - before
    assert why.startswith("kvstow_prefill_d64")


@pytest.mark.parametrize("window_size", [None, 7])
def test_padded_rows_of_a_prompt_reach_the_kernel(kernels, window_size):
    rng = np.random.default_rng(0)
    caches = [integration.FusedKVCache(kvstow.Scheme.parse("turbo")) for _ in range(2)]
    for cache, n in zip(caches, (20, 13), strict=True):
        cache.update_and_fetch(*mx.array(rng.standard_normal((2, 1, 2, n, 64)).astype(np.float32)))
    batch = caches[0].merge(caches)
    x, y = mx.array(rng.standard_normal((2, 2, 2, 11, 64)).astype(np.float32))
    queries = mx.array(rng.standard_normal((2, 4, 11, 64)).astype(np.float32))
    mask = batch.make_mask(11, window_size=window_size)
    batch.update_and_fetch(x, y)
    kernels.forget()
    window = marked(batch.window())
    got = fused.attend(queries, window, scale=0.125, mask=mask)
    call = kernels.attended[-1]
    assert (call.starts, call.lengths, call.window) == ([0, 7], [31, 31], window_size or 0)
    assert mx.array_equal(got, attention.attend(queries, window, scale=0.125, mask=mask))


@pytest.mark.usefixtures("kernels")
def test_the_report_says_what_is_fused_and_what_falls_back():
    model = build("llama")
    report = kvstow.attach(model, "turbo")
    assert report.fetch == "fused"
    assert [(x.fetch, x.fetch_reason) for x in report.layers] == [("fused", "")] * 2
    assert "  fused: steps of any length; deferred: masks given as arrays" in str(report)
    assert report.as_dict()["paths"] == {"fused": [0, 1]}
    assert {type(c) for c in host.make_prompt_cache(model)} == {integration.FusedKVCache}
    kvstow.detach(model)


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_the_other_paths_use_no_kernel(kernels, fetch):
    model = build("llama")
    logits_of(model, fetch)
    assert not kernels.attended
    assert not kernels.encoded


def test_models_that_need_arrays_stay_eager_and_fused_is_refused(kernels):
    model = build("gemma2")
    assert kvstow.attach(model, "turbo").fetch == "eager"
    with pytest.raises(UnsupportedModel, match="cannot take packed windows"):
        kvstow.attach(model, "turbo", fetch="fused")
    assert not kernels.attended


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_fused_is_refused_and_auto_is_deferred():
    model = build("llama")
    with pytest.raises(
        UnsupportedModel, match="fused kernels need a GPU: mlx has no CUDA or Metal"
    ):
        kvstow.attach(model, "turbo", fetch="fused")
    report = kvstow.attach(model, "turbo")
    assert (report.fetch, report.fetch_reason) == ("deferred", "")
    kvstow.detach(model)


def test_a_device_that_goes_away_is_noticed_step_by_step(kernels, monkeypatch):
    model = build("llama")
    wanted = logits_of(model, "deferred")
    with kvstow.attached(model, "turbo"):
        monkeypatch.setattr(fused, "why_no_device", lambda: "mlx's default device is the CPU")
        kernels.forget()
        np.testing.assert_array_equal(run(model), wanted)
    assert not kernels.attended
    assert not kernels.encoded


# --- sliding windows, batches, speculation


@pytest.mark.parametrize("n_prompt", [12, 60])
def test_sliding_windows_go_to_the_kernel_before_and_after_they_are_full(kernels, n_prompt):
    model = build("gemma3_text")
    schedule = (n_prompt, *[1] * 30, 4, 1, 1)
    wanted = logits_of(model, "deferred", schedule=schedule)
    with kvstow.attached(model, "turbo"):
        kernels.forget()
        before = fused.counts()
        np.testing.assert_array_equal(run(model, schedule=schedule), wanted)
    assert fused.counts() - before == Counter({"kernel": 2 * 33})  # layers, steps but the first
    assert 32 in {call.longest for call in kernels.attended}


def test_a_window_smaller_than_what_is_stored_reaches_the_kernel(kernels):
    cache = integration.FusedKVCache(kvstow.Scheme.parse("turbo"))
    rng = np.random.default_rng(0)
    x, y = mx.array(rng.standard_normal((2, 1, 2, 24, 64)).astype(np.float32))
    queries = mx.array(rng.standard_normal((1, 4, 4, 64)).astype(np.float32))
    cache.update_and_fetch(x[:, :, :20], y[:, :, :20])
    mask = cache.make_mask(4, window_size=7)
    cache.update_and_fetch(x[:, :, 20:], y[:, :, 20:])
    kernels.forget()
    window = marked(cache.window())
    got = fused.attend(queries, window, scale=0.1, mask=mask)
    assert [(c.window, c.longest, c.scale) for c in kernels.attended[-1:]] == [(7, 24, 0.1)]
    assert mx.array_equal(got, attention.attend(queries, window, scale=0.1, mask=mask))


def marked(window):
    return attention.PackedWindow(
        window.keys, window.values, window.n_tokens, window.scheme, fused=True
    )


@pytest.mark.parametrize("scheme", ["turbo", "turbo:k8v8+stored", "turbo:k4v2+start15"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_replies_of_a_batch_are_those_of_deferred(kernels, name, scheme):
    model = build(name)
    requests, n_reply = batching.prompts(), batching.N_REPLY
    with kvstow.attached(model, scheme, fetch="deferred"):
        wanted = batching.together(model, requests, n_reply)
    with kvstow.attached(model, scheme, fetch="fused"):
        kernels.forget()
        got = batching.together(model, requests, n_reply)
    for a, b in zip(got, wanted, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert {type(c) for c in a.cache} <= {
            integration.FusedKVCache,
            integration.FusedRotatingKVCache,
        }
    assert any(call.starts and any(call.starts) for call in kernels.attended)
    refused = set(fused.counts()) - {"kernel"}
    # A window that is full is a ring, and says where rows begin only once all have filled it.
    assert refused <= ({MASKED} if name == "gemma3_text" else set())


def test_rows_of_a_batch_begin_where_their_padding_ends(kernels):
    model = build("llama")
    with kvstow.attached(model, "turbo", fetch="fused"):
        caches = []
        for n in (20, 7, 13):
            cache = host.make_prompt_cache(model)
            model(tokens(n), cache=cache)
            caches.append(cache)
        merged = [type(layer[0]).merge(layer) for layer in zip(*caches, strict=True)]
        kernels.forget()
        for n in (1, 3):
            mx.eval(model(tokens(n, b=3), cache=merged))
    served = [c for c in kernels.attended if c.longest < 100]
    assert [(c.starts, c.lengths) for c in served] == [
        ([0, 13, 7], [longest] * 3) for longest in (21, 24) for _layer in range(2)
    ]
    assert {c.capacity % 8 for c in served} == {0}


@pytest.mark.usefixtures("kernels")
def test_planes_of_a_batch_are_aligned_once_and_not_at_every_step():
    model = build("llama")
    with kvstow.attached(model, "turbo", fetch="fused"):
        caches = [host.make_prompt_cache(model) for _ in range(2)]
        for cache, n in zip(caches, (13, 6), strict=True):
            model(tokens(n), cache=cache)
        merged = [type(layer[0]).merge(layer) for layer in zip(*caches, strict=True)]
        for _ in range(3):
            model(tokens(1, b=2), cache=merged)
            assert {c.window().keys.scales.shape[2] % 8 for c in merged} == {0}


def test_a_draft_is_verified_by_the_kernel(kernels):
    model = speculating.talking()
    wanted = speculating.drafted(model, copy.deepcopy(model), "turbo:k8v8", 3, "deferred")
    kernels.forget()
    got = speculating.drafted(model, copy.deepcopy(model), "turbo:k8v8", 3, "fused")
    assert (got.tokens, got.from_draft) == (wanted.tokens, wanted.from_draft)
    assert {call.shape[2] for call in kernels.attended} >= {1, 4}


def test_drafts_are_stored_in_place_though_some_are_trimmed(kernels):
    model = speculating.talking()
    for _ in range(2):  # the first time with self-checks
        kernels.forget()
        got = speculating.drafted(model, copy.deepcopy(model), "turbo:k8v8", 3, "fused")
    assert sum(not drafted for drafted in got.from_draft) > 2  # else nothing was trimmed
    encoded = [shape[2] for shape, _ in kernels.encoded]
    # The prompt and the first step, of two layers of the draft and of the model.
    assert encoded == [speculating.PROMPT_TOKENS - 1] * 4 + [1] * 2 + [4] * 2
    assert len(kernels.appended) + len(kernels.stored) > 40


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_saved_cache_goes_on_by_the_kernels(kernels, tmp_path, name):
    model = build(name)
    with kvstow.attached(model, "turbo"):
        cache, text = saving.filled(model, 13)
        saving.save(tmp_path / "x", model, cache, text)
        loaded = saving.load(tmp_path / "x", model)
        assert list(map(type, loaded)) == list(map(type, cache))
        kernels.forget()
        saving.assert_same(model, cache, loaded)
    served = [call for call in kernels.attended if call.longest < 100]  # no self-checks
    assert len(served) == 2 * 2 * 4  # layers, caches, steps


# --- what the kernel does not take


def window_of(n_tokens=20):
    cache = integration.FusedKVCache(kvstow.Scheme.parse("turbo"))
    x, y = mx.random.normal((2, 1, 2, n_tokens, 64))
    cache.update_and_fetch(x, y)
    return marked(cache.window())


@pytest.mark.parametrize(
    ("n_queries", "mask", "why"),
    [
        (1, mx.ones((1, 20), mx.bool_), MASKED),
        (1, mx.zeros((1, 1, 1, 20)), MASKED),
        (2, None, MASKED),
        (9, mx.ones((9, 20), mx.bool_), MASKED),
    ],
    ids=["boolean", "additive", "none", "long"],
)
def test_what_the_kernel_does_not_take_is_deferred_and_counted(kernels, n_queries, mask, why):
    window = window_of()
    queries = mx.random.normal((1, 4, n_queries, 64))
    kernels.forget()
    got = fused.attend(queries, window, scale=0.125, mask=mask)
    assert mx.array_equal(got, attention.attend(queries, window, scale=0.125, mask=mask))
    assert not kernels.attended
    ((counted, n),) = fused.counts().items()
    assert counted.startswith(why)
    assert n == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scale", [mx.array(0.125), 0.125, 1])
def test_a_scale_is_a_number_for_the_kernel(scale):
    call = fused.plan_call(mx.random.normal((1, 4, 1, 64)), window_of(), scale, None)
    assert isinstance(call, fused.Call) == (not isinstance(scale, mx.array))


# --- kernels that fail


@pytest.mark.filterwarnings("ignore::kvstow.KvstowWarning")
def test_a_gpu_that_is_too_old_has_no_kernel(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "device", lambda: stand_in.Device.of(75))
    report = kvstow.attach(build("llama"), "turbo")
    assert report.fetch == "deferred"
    assert "no kernel does this: ValueError: no launch" in report.fetch_reason


def test_a_kernel_that_fails_its_check_is_not_used_and_said_once(kernels):
    kernels.attention_off = 0.5
    model = build("llama")
    wanted = logits_of(model, "deferred")
    with pytest.warns(KvstowWarning, match="a fused kernel is not used, slower operations"):
        report = kvstow.attach(model, "turbo")
    assert report.fetch == "deferred"
    assert "failed its self-check" in report.fetch_reason
    assert "failed its self-check" in str(report)
    assert report.as_dict()["paths"] == {"deferred": [0, 1]}
    assert json.dumps(report.as_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(run(model), wanted)
    kvstow.detach(model)
    with pytest.raises(UnsupportedModel, match=r"fused kernels cannot be used: .* self-check"):
        kvstow.attach(model, "turbo", fetch="fused")


def test_an_encoder_that_fails_its_check_keeps_the_layer_deferred(kernels):
    kernels.bytes_off = True
    model = build("llama")
    with pytest.warns(KvstowWarning, match="kvstow_encode"):
        report = kvstow.attach(model, "turbo")
    assert report.fetch == "deferred"
    kvstow.detach(model)


@pytest.mark.parametrize("as_error", [False, True])
def test_a_kernel_that_fails_later_is_deferred_without_an_exception(kernels, as_error):
    model = build("llama")
    wanted = logits_of(model, "deferred")
    kvstow.attach(model, "turbo")
    kernels.error = RuntimeError("out of memory")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error" if as_error else "always")
        np.testing.assert_array_equal(run(model), wanted)
        np.testing.assert_array_equal(run(model), wanted)
    messages = [str(w.message) for w in caught]
    assert sum("kernel could not be called" in m for m in messages) == (0 if as_error else 2)
    assert bool(messages) != as_error
    assert all(call.longest > 100 for call in kernels.attended)  # self-checks
    assert "kernel" not in fused.counts()
    kvstow.detach(model)


def test_one_layer_can_fail_and_the_others_be_fused(kernels, monkeypatch):
    policy = kvstow.Policy(
        kvstow.Scheme.parse("turbo"),
        (kvstow.policy.Rule(layers=(1,), scheme=kvstow.Scheme.parse("turbo:k4v4")),),
    )
    attend = kernels.attend

    def only_three_bits(queries, planes, tokens, scheme, scores):
        if scheme.value_bits == 4:
            raise RuntimeError("does not compile")
        return attend(queries, planes, tokens, scheme, scores)

    monkeypatch.setattr(kernels, "attend", only_three_bits)
    model = build("llama")
    wanted = logits_of(model, "deferred", policy)
    with pytest.warns(KvstowWarning, match="does not compile"):
        report = kvstow.attach(model, policy)
    assert [x.fetch for x in report.layers] == ["fused", "deferred"]
    assert report.as_dict()["paths"] == {"fused": [0], "deferred": [1]}
    assert "deferred 1 (1): kvstow_decode" in str(report)
    np.testing.assert_array_equal(run(model), wanted)
    kvstow.detach(model)


@pytest.mark.usefixtures("kernels")
def test_affine_and_fused_layers_share_a_model():
    policy = kvstow.Policy(
        kvstow.Scheme.parse("turbo"),
        (kvstow.policy.Rule(layers=(0,), scheme=kvstow.Scheme.parse("affine:8")),),
    )
    with kvstow.attached(build("llama"), policy) as report:
        assert [x.fetch for x in report.layers] == ["host", "fused"]
