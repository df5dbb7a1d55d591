"""A layer holds the bytes that its scheme says, and no decoded copy."""

import pytest

mx = pytest.importorskip("mlx.core")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
PackedKVCache = integration.PackedKVCache
DeferredKVCache = integration.DeferredKVCache
H, D = layer.H, layer.D
turbo, append, filled = layer.turbo, layer.append, layer.filled


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k2v2", "turbo:k5v8"])
@pytest.mark.parametrize(
    ("n_tokens", "capacity"), [(1, 256), (256, 256), (257, 512)], ids=["1", "256", "257"]
)
def test_nbytes_is_the_schemes_bytes_per_token_times_the_capacity(
    cls, draw, text, n_tokens, capacity
):
    cache = cls(turbo(text))
    append(cache, draw(n_tokens, b=3))
    assert cache.capacity == capacity
    assert cache.nbytes == cache.scheme.bytes_per_token(D) * capacity * H * 3
    usage = integration.usage([cache])
    assert (usage.kv_bytes, usage.tokens, usage.capacity_tokens) == (
        cache.nbytes,
        n_tokens,
        capacity,
    )
    assert usage.kv_bytes_bf16 == 2 * 2 * D * capacity * H * 3


def test_an_empty_cache_holds_no_bytes(cls):
    cache = cls(turbo())
    assert (cache.offset, cache.size(), cache.empty(), cache.nbytes, cache.capacity) == (
        (0, 0, True, 0, 0)
    )


def test_a_row_that_packs_frees_its_plain_arrays(cls, draw):
    cache = filled(cls, draw(4), scheme="turbo:k8v3+start7")
    plain_bytes = cache.nbytes
    append(cache, draw(4))
    assert cache.nbytes == cache.scheme.bytes_per_token(D) * H * 256
    assert plain_bytes == 2 * 4 * D * H * 256


def test_a_cache_keeps_no_decoded_copy_of_its_tokens(cls, draw):
    cache = filled(cls, draw(256))
    mx.eval(cache.state[0])
    before, held = mx.get_active_memory(), cache.nbytes
    append(cache, draw(256))
    mx.eval(cache.state[0])
    grown = mx.get_active_memory() - before
    # Allocations are rounded up to pages; decoded float32 would be 5 times as much.
    assert cache.nbytes == 2 * held
    assert grown < 1.25 * held + 5 * 16384


def test_a_cache_has_no_length_and_nothing_that_mlx_lm_would_convert_by():
    for name in ("__len__", "__bool__", "to_quantized"):
        assert not hasattr(PackedKVCache, name)
        assert not hasattr(DeferredKVCache, name)
    assert PackedKVCache(turbo())
