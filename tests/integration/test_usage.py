"""`usage` counts what any prompt cache really allocates."""

import pytest

import kvstow
from kvstow import Scheme

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")

pytestmark = pytest.mark.mlx
H, D = 2, 64
BF16 = 2 * 2 * H * D  # bytes of one token, keys and values, in two-byte elements


def packed(text="turbo:k8v3"):
    return integration.PackedKVCache(Scheme.parse(text))


def feed(cache, n_tokens, dtype=mx.float32):
    x = mx.random.normal((1, H, n_tokens, D)).astype(dtype)
    cache.update_and_fetch(x, x)
    return cache


def recurrent():
    cache = host.ArraysCache(2)
    cache[0] = mx.zeros((1, 3, 40), mx.float32)
    return cache


def figures(*cache):
    usage = kvstow.usage(list(cache))
    return usage.kv_bytes, usage.kv_bytes_bf16, usage.tokens, usage.capacity_tokens


def test_no_cache_at_all_is_empty():
    assert figures() == (0, 0, 0, 0)
    assert kvstow.usage([]).compression_ratio == 1.0


@pytest.mark.parametrize(
    "make",
    [
        packed,
        host.KVCache,
        host.QuantizedKVCache,
        lambda: host.RotatingKVCache(max_size=32),
        lambda: host.ArraysCache(2),
        host.ConcatenateKVCache,
    ],
    ids=["packed", "plain", "affine", "rotating", "recurrent", "concatenating"],
)
def test_a_cache_before_its_first_token_is_empty(make):
    assert figures(make(), make()) == (0, 0, 0, 0)
    assert kvstow.usage([make()]).compression_ratio == 1.0


def test_a_plain_cache_takes_its_own_dtype():
    assert figures(feed(host.KVCache(), 5)) == (2 * BF16 * 256, BF16 * 256, 5, 256)
    half = figures(feed(host.KVCache(), 5, mx.bfloat16))
    assert half == (BF16 * 256, BF16 * 256, 5, 256)


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k2v2", "turbo:k5v5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_cache_takes_what_its_scheme_says_whatever_the_dtype(text, dtype):
    cache = feed(packed(text), 300, getattr(mx, dtype))
    stored = Scheme.parse(text).bytes_per_token(D) * H * 512
    assert figures(cache) == (stored, BF16 * 512, 300, 512)


def test_a_row_that_is_still_plain_is_counted_as_plain():
    cache = feed(packed("turbo:k8v3+start50"), 5)
    assert figures(cache) == (2 * BF16 * 256, BF16 * 256, 5, 256)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 32)])
def test_an_affine_cache_takes_what_the_scheme_says(bits, group_size):
    cache = feed(host.QuantizedKVCache(group_size, bits), 5)
    scheme = Scheme.parse(f"affine:{bits}g{group_size}")
    stored = scheme.bytes_per_token(D, dtype_bytes=4) * H * 256
    assert figures(cache) == (stored, BF16 * 256, 5, 256)


def test_a_rotating_cache_counts_its_window_and_all_the_tokens_it_has_seen():
    cache = host.RotatingKVCache(max_size=32)
    for _ in range(3):
        feed(cache, 20)
    held = cache.keys.shape[2]
    assert held < 60
    assert figures(cache) == (2 * BF16 * held, BF16 * held, 60, held)


def test_a_recurrent_state_has_bytes_and_no_tokens():
    assert figures(recurrent()) == (480, 240, 0, 0)


def test_layers_of_different_kinds_add_up():
    kinds = [
        feed(packed(), 300),
        feed(packed("turbo:k8v3+start500"), 300),
        feed(host.KVCache(), 300),
        feed(host.QuantizedKVCache(64, 8), 300),
        feed(host.RotatingKVCache(max_size=32), 300),
        recurrent(),
        packed(),
    ]
    each = [figures(c) for c in kinds]
    total = figures(*kinds)
    assert total[:2] == (sum(x[0] for x in each), sum(x[1] for x in each))
    assert total[2:] == (300, 512)
    assert kvstow.usage(kinds).compression_ratio == total[1] / total[0]


def test_capacity_stays_after_a_trim():
    cache = feed(packed(), 300)
    before = figures(cache)
    cache.trim(290)
    assert figures(cache) == (*before[:2], 10, 512)


@pytest.mark.parametrize("make", [packed, host.KVCache], ids=["packed", "plain"])
def test_the_comparison_holds_after_every_token_was_trimmed(make):
    cache = feed(make(), 300)
    cache.trim(300)
    usage = kvstow.usage([cache])
    assert (usage.tokens, usage.kv_bytes) == (0, cache.nbytes)
    assert usage.kv_bytes_bf16 == BF16 * usage.capacity_tokens


def test_a_row_refilled_after_a_trim_to_nothing_counts_what_is_allocated():
    cache = feed(packed("turbo:k8v3+start50"), 60)
    cache.trim(60)
    feed(cache, 5)
    usage = kvstow.usage([cache])
    assert (usage.tokens, usage.kv_bytes) == (5, cache.nbytes)
    assert usage.kv_bytes_bf16 == BF16 * usage.capacity_tokens


def test_a_list_of_caches_counts_as_its_members():
    members = feed(host.KVCache(), 5), recurrent()
    assert figures(host.CacheList(*members)) == figures(*members)


def test_a_batch_of_rows_counts_the_longest_row():
    cache = host.BatchKVCache([0, 2])
    x = mx.zeros((2, H, 5, D))
    cache.update_and_fetch(x, x)
    assert figures(cache) == (2 * 2 * BF16 * 256, 2 * BF16 * 256, 5, 256)
