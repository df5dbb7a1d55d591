"""An attachment goes as it came: replaced, undone, brought back, or freed with its model."""

import copy
import weakref

import numpy as np
import pytest

import kvstow

base = pytest.importorskip("mlx_lm.models.base")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
attachment = integration.attachment
DeferredKVCache = integration.DeferredKVCache
PackedKVCache = integration.PackedKVCache
build, tokens = tiny.build, tiny.tokens
ORIGINAL, OURS, SCHEDULE = attached.ORIGINAL, attached.OURS, attached.SCHEDULE
run, layer_types, own_make_cache = attached.run, attached.layer_types, attached.own_make_cache
is_ours = attached.is_ours


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


def test_a_plain_cache_made_before_attach_stays_plain():
    model = build("llama")
    off, cache = run(model), host.make_prompt_cache(model)
    kvstow.attach(model, "turbo")
    assert (run(model, cache) == off).all()


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
