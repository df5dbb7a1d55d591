"""What an append attends to: exact tokens, or all that is stored."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from kvstow.scheme import KEY_BITS

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
attention = pytest.importorskip("kvstow.attention.mlx")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
PackedKVCache = integration.PackedKVCache
DeferredKVCache = integration.DeferredKVCache
turbo, join, decode, append = layer.turbo, layer.join, layer.decode, layer.append
filled, assert_same, assert_stores = layer.filled, layer.assert_same, layer.assert_stores


@pytest.mark.parametrize("n_tokens", [1, 5, 300])
def test_the_first_append_attends_to_the_exact_keys_and_values(cls, draw, n_tokens):
    tokens = draw(n_tokens)
    cache = cls(turbo())
    assert_same(append(cache, tokens), tokens)
    assert_stores(cache, tokens)


@pytest.mark.parametrize("n_tokens", [1, 4, 300])
def test_a_later_append_attends_to_what_is_stored_its_own_tokens_included(cls, draw, n_tokens):
    first, second = draw(5), draw(n_tokens)
    cache = filled(cls, first)
    assert_same(append(cache, second), decode(join(first, second), cache.scheme))


@pytest.mark.parametrize("options", ["+stored", "+start3+stored"])
def test_under_stored_even_the_first_append_attends_to_what_is_stored(cls, draw, options):
    tokens = draw(5)
    cache = cls(turbo(f"turbo:k8v3{options}"))
    assert_same(append(cache, tokens), decode(tokens, cache.scheme))


def test_what_is_stored_differs_from_what_was_given(draw):
    tokens = draw(5)
    stored = decode(tokens, turbo())
    assert 0.001 < np.abs(stored.k - tokens.k).max() < 0.05
    assert 0.1 < np.abs(stored.v - tokens.v).max() < 2


def test_only_the_deferred_class_hands_out_a_packed_window(draw):
    for cls, kind in ((PackedKVCache, mx.array), (DeferredKVCache, attention.PackedWindow)):
        cache, tokens = filled(cls, draw(3)), draw(1)
        with deferred.installed():
            fetched = cache.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
        assert all(isinstance(x, kind) for x in fetched)


def test_keys_and_values_are_arrays_in_both_classes(cls, draw):
    first, second = draw(5), draw(3)
    cache = filled(cls, first, second)
    k, v = cache.keys_and_values()
    got = SimpleNamespace(k=np.array(k), v=np.array(v))
    assert_same(got, decode(join(first, second), cache.scheme))


@pytest.mark.parametrize("lengths", [(3, 2, 2), (6, 1), (1,) * 7, (3, 9)])
def test_a_row_stays_plain_until_it_holds_n_tokens_then_packs_all_of_them(cls, draw, lengths):
    pieces = [draw(n) for n in lengths]
    cache = cls(turbo("turbo:k8v3+start7"))
    for i, piece in enumerate(pieces):
        so_far = join(*pieces[: i + 1])
        assert_same(append(cache, piece), so_far)  # exact, on the append that packs too
        assert cache.is_packed == (so_far.k.shape[2] >= 7)
        assert cache.offset == so_far.k.shape[2]
    assert_stores(cache, so_far)
    last = draw(2)
    assert_same(append(cache, last), decode(join(so_far, last), cache.scheme))


def test_under_start_and_stored_the_append_that_packs_attends_to_what_is_stored(cls, draw):
    first, second = draw(4), draw(3)
    cache = cls(turbo("turbo:k8v3+start7+stored"))
    assert_same(append(cache, first), first)
    assert_same(append(cache, second), decode(join(first, second), cache.scheme))


def test_a_search_changes_every_plane_and_no_size(cls, draw):
    tokens = draw(40)
    without = filled(cls, tokens)
    cache = filled(cls, tokens, scheme="turbo:k8v3+search")
    planes = [[np.array(x) for x in (*c.packed()[0], *c.packed()[1])] for c in (without, cache)]
    assert all((a != b).any() for a, b in zip(*planes, strict=True))
    assert cache.nbytes == without.nbytes
    assert_stores(cache, tokens)


@pytest.mark.parametrize("width", KEY_BITS)
def test_under_a_search_a_cache_holds_what_it_was_given_better(cls, draw, width):
    tokens = draw(200)
    errors = []
    for options in ("", "+search"):
        cache = filled(cls, tokens, scheme=f"turbo:k{width}v{width}{options}")
        k, v = cache.keys_and_values()
        k, v = np.array(k), np.array(v)
        # A search gives up some squared error for values that are not too short.
        sine = 1 - (v * tokens.v).sum() ** 2 / ((v**2).sum() * (tokens.v**2).sum())
        errors.append((((k - tokens.k) ** 2).mean(), sine))
    without, better = errors
    assert better[0] < 0.85 * without[0] if width == 8 else better[0] == without[0]
    assert better[1] < 0.97 * without[1]


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+start50"])
@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_the_mask_is_the_one_of_mlx_lms_own_cache(cls, draw, scheme, held, n_tokens):
    ours, theirs = cls(turbo(scheme)), host.KVCache()
    if held:
        tokens = draw(held)
        append(ours, tokens)
        theirs.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
    for return_array, window_size in product([False, True], [None, 3]):
        options = {"return_array": return_array, "window_size": window_size}
        got, wanted = (c.make_mask(n_tokens, **options) for c in (ours, theirs))
        assert type(got) is type(wanted)
        assert np.array_equal(np.array(got), np.array(wanted))
