"""What is remembered of a mask is what the mask says."""

import gc

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
masks = pytest.importorskip("kvstow.attention.masks")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")

pytestmark = pytest.mark.mlx
Turbo = pytest.importorskip("kvstow.scheme").Turbo
SCHEME = Turbo(8, 3)


def said(sight, b):
    """The booleans that a sight stands for, ``(b, l, t)``."""
    at = np.arange(sight.n_tokens)
    own = (sight.n_tokens - sight.n_queries + np.arange(sight.n_queries))[:, None]
    seen = at <= own
    if sight.window:
        seen = seen & (at > own - sight.window)
    starts = np.zeros(b, int) if sight.starts is None else np.array(sight.starts)
    return seen & (at >= starts[:, None, None])


def rows(n, b=1):
    return mx.random.normal((b, 2, n, 64))


def check(cache, n, b, **options):
    """Make a mask, append, and compare; returns what is known of it."""
    mask = cache.make_mask(n, **options)
    cache.update_and_fetch(rows(n, b), rows(n, b))
    width = cache.window().n_tokens
    sight = masks.sight_of(mask, n, width)
    if sight is not None and isinstance(mask, mx.array):
        wanted = np.broadcast_to(np.array(mask), (b, 1, n, width))[:, 0]
        np.testing.assert_array_equal(said(sight, b), wanted)
    return sight


@pytest.mark.parametrize("window_size", [None, 5, 16, 100])
def test_the_mask_of_one_request_is_known_with_its_window(window_size):
    cache = integration.PackedKVCache(SCHEME)
    for n in (9, 1, 4, 1, 8, 3):
        sight = check(cache, n, 1, window_size=window_size, return_array=True)
        if n <= 8:
            assert sight is not None
            assert sight.window == (window_size or 0)


@pytest.mark.parametrize("schedule", [(9, 1, 1, 4, 3), (30, 1, 1, 4, 1, 1, 8, 1), (40, 4, 1, 1)])
@pytest.mark.parametrize("window_size", [None, 12, 16])
def test_the_mask_of_a_rotating_buffer_is_known_but_where_it_is_rolled(schedule, window_size):
    cache = integration.PackedRotatingKVCache(SCHEME, 16)
    for n in schedule:
        sight = check(cache, n, 1, window_size=window_size)
        rolled = n == 1 and window_size == 12 and cache.offset > 12
        if n <= 8:
            assert (sight is None) == rolled


def batch(lengths, make):
    caches = [make() for _ in lengths]
    for cache, n in zip(caches, lengths, strict=True):
        cache.update_and_fetch(rows(n), rows(n))
    return type(caches[0]).merge(caches)


@pytest.mark.parametrize("lengths", [(3, 11, 7), (5, 5), (40, 2, 20)])
@pytest.mark.parametrize("window_size", [None, 6])
def test_the_mask_of_a_batch_is_known_with_the_start_of_each_row(lengths, window_size):
    cache = batch(lengths, lambda: integration.PackedKVCache(SCHEME))
    for n in (1, 1, 3, 8, 1):
        sight = check(cache, n, len(lengths), window_size=window_size)
        assert sight is not None
        if len(set(lengths)) > 1:
            assert np.array(sight.starts).tolist() == [max(lengths) - x for x in lengths]


@pytest.mark.parametrize("lengths", [(3, 11, 7), (5, 5), (40, 2, 20), (40, 30)])
@pytest.mark.parametrize("schedule", [(1,) * 20, (3, 1, 1, 8, 1, 4, 1), (1, 1, 20, 1, 1)])
def test_the_mask_of_rotating_rows_is_known_or_not_and_never_wrong(lengths, schedule):
    cache = batch(lengths, lambda: integration.PackedRotatingKVCache(SCHEME, 16))
    known = [check(cache, n, len(lengths)) is not None for n in schedule]
    assert any(known)
    if min(lengths) >= 16 or len(set(schedule)) == 1:
        assert known[-1]  # every row has filled the buffer


def test_a_known_mask_that_is_changed_combined_or_freed_is_unknown():
    sight = masks.Sight(2, 9)
    mask = masks.remember(mx.ones((2, 9), mx.bool_), sight)
    assert masks.sight_of(mask, 2, 9) is sight
    assert masks.sight_of(mask & mask, 2, 9) is None
    assert masks.sight_of(mask[..., :], 2, 9) is None
    assert masks.sight_of(mask, 2, 8) is None
    assert masks.sight_of(mask, 1, 9) is None
    remembered = masks._remembered.pairs[0][0]
    del mask
    gc.collect()
    assert remembered() is None


def test_no_mask_is_causal_for_one_query_alone():
    assert masks.sight_of(None, 1, 9) is not None
    assert masks.sight_of(None, 2, 9) is None
    assert masks.sight_of("causal", 2, 9) is not None
    assert masks.sight_of("full", 2, 9) is None
    assert masks.sight_of(mx.ones((2, 9)), 2, 9) is None
