"""A layer made of one of mlx-lm's own plain caches."""

import pytest

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
turbo, join, cut, decode, append = layer.turbo, layer.join, layer.cut, layer.decode, layer.append
assert_same, assert_stores = layer.assert_same, layer.assert_stores


@pytest.mark.parametrize("at", [1, 3, 299])
def test_from_kv_cache_stores_the_same_bytes_as_appending_at_once(cls, draw, at):
    tokens = draw(300)
    plain = host.KVCache()
    for piece in (cut(tokens, 0, at), cut(tokens, at, 300)):
        plain.update_and_fetch(mx.array(piece.k), mx.array(piece.v))
    cache = cls.from_kv_cache(plain, turbo())
    assert type(cache) is cls
    assert_stores(cache, tokens)
    assert plain.offset == 300
    last = draw(1)
    assert_same(append(cache, last), decode(join(tokens, last), cache.scheme))


def test_from_kv_cache_takes_only_the_tokens_that_were_not_trimmed(cls, draw):
    tokens = draw(10)
    plain = host.KVCache()
    plain.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
    plain.trim(4)
    assert_stores(cls.from_kv_cache(plain, turbo()), cut(tokens, 0, 6))
    plain.trim(6)
    assert cls.from_kv_cache(plain, turbo()).empty()


def test_from_an_empty_kv_cache_comes_an_empty_cache(cls, draw):
    cache = cls.from_kv_cache(host.KVCache(), turbo())
    assert cache.empty()
    tokens = draw(3)
    assert_same(append(cache, tokens), tokens)


def test_from_a_short_kv_cache_comes_a_row_that_is_still_plain(cls, draw):
    tokens = draw(6)
    plain = host.KVCache()
    plain.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
    cache = cls.from_kv_cache(plain, turbo("turbo:k8v3+start7"))
    assert (cache.is_packed, cache.offset) == (False, 6)
    last = draw(1)
    assert_same(append(cache, last), join(tokens, last))
    assert_stores(cache, join(tokens, last))
