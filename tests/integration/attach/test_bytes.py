"""An attached model allocates what its scheme says, and nothing beside it."""

import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
build, tokens = tiny.build, tiny.tokens
run = attached.run


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


def test_attach_computes_nothing_and_leaves_nothing_behind():
    model = build("llama")  # its weights are a graph that nothing has computed
    kvstow.attach(build("llama"), "turbo")  # constants are made once
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kvstow.attach(model, "turbo")
    assert mx.get_peak_memory() - before < 16384
    assert mx.get_active_memory() - before < 1024
