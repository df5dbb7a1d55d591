"""mlx-lm's own generation on an attached model, and threads."""

import threading

import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
generation = pytest.importorskip("mlx_lm.generate")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
DeferredKVCache = integration.DeferredKVCache
build, tokens = tiny.build, tiny.tokens
run = attached.run


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
