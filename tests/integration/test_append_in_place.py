"""Appends to the memory of planes: nobody who has an older handle ever sees them.

The stand-in for the kernel writes where the kernel would, at once.
"""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstow
from kvstow.scheme import Turbo

mx = pytest.importorskip("mlx.core")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
cache = pytest.importorskip("kvstow.integrations.mlx_lm.cache")
window = pytest.importorskip("kvstow.attention.window")
stand_in = pytest.importorskip("tests.kernels.stand_in")

pytestmark = pytest.mark.mlx
kernels = stand_in.kernels
D = 64
COPIES = {"deepcopy": copy.deepcopy, "state": lambda layer: type(layer).from_state(layer.state)}
LOOKS = {"packed": lambda layer: layer.packed(), "window": lambda layer: layer.window()}
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 2, 7, 250])),
    st.tuples(st.just("trim"), st.integers(0, 9)),
    st.tuples(st.sampled_from([*COPIES, *LOOKS]), st.just(0)),
)


def drawn(rng, n):
    return tuple(mx.array(rng.standard_normal((1, 2, n, D)).astype(np.float32)) for _ in "kv")


def decoded(layer):
    return [np.array(x) for x in layer.keys_and_values()] if layer.offset else []


class Both:
    """A layer whose appends are in place where they can be, and one whose never are."""

    def __init__(self, fused, plain):
        self.fused, self.plain = fused, plain

    def append(self, exact):
        self.fused.update_and_fetch(*exact)
        self.plain.update_and_fetch(*exact)

    def each(self, function):
        return function(self.fused), function(self.plain)

    def check(self):
        for got, want in zip(decoded(self.fused), decoded(self.plain), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14), seed=st.integers(0, 99))
def test_any_sequence_of_appends_trims_and_copies_is_that_of_arrays_made_anew(operations, seed):
    rng = np.random.default_rng(seed)
    with deferred.installed():
        layers = [Both(cache.FusedKVCache(Turbo(8, 3)), cache.DeferredKVCache(Turbo(8, 3)))]
        layers[0].append(drawn(rng, 5))
        seen = []  # planes that somebody has, and what they hold
        for what, n in operations:
            both = layers[rng.integers(len(layers))]
            if what == "append":
                both.append(drawn(rng, n))
            elif what in LOOKS and both.plain.is_packed:
                seen.append(both.each(LOOKS[what]))
            elif what in COPIES:
                layers.append(Both(*both.each(COPIES[what])))
            elif what == "trim":
                both.each(lambda layer, n=n: layer.trim(n))
        for both in layers:
            both.check()
        for got, want in seen:
            same(got, want)


def same(got, want):
    if isinstance(got, window.PackedWindow):
        n = want.n_tokens
        got, want = ((w.keys, w.values) for w in (got, want))
        got, want = ([p[:, :, :n] for p in (*keys, *values)] for keys, values in (got, want))
    else:
        got, want = ((*keys, *values) for keys, values in (got, want))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


def test_steps_are_written_in_place_once_nobody_else_has_the_planes(kernels):
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = cache.FusedKVCache(Turbo(8, 3))
        for n in (5, 1):  # with the self-check of the kernel
            layer.update_and_fetch(*drawn(rng, n))
        kernels.forget()
        layer.trim(1)
        for n in (1, 1):
            layer.update_and_fetch(*drawn(rng, n))
            kvstow.usage([layer])  # counts, and has no handle
        assert kernels.appended == [((1, 2, 1, D), 6)]
        mx.eval(layer.state)
        layer.update_and_fetch(*drawn(rng, 1))  # somebody may have the state
        assert len(kernels.appended) == 1
        layer.update_and_fetch(*drawn(rng, 1))
        layer.update_and_fetch(*drawn(rng, 300))  # grows
        layer.update_and_fetch(*drawn(rng, 2))
    assert kernels.appended[1:] == [((1, 2, 1, D), 8), ((1, 2, 2, D), 309)]


def test_attention_waits_for_what_is_written(kernels):
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = cache.FusedKVCache(Turbo(8, 3))
        for n in (5, 1, 1):
            fetched, _ = layer.update_and_fetch(*drawn(rng, n))
    assert fetched.written is kernels.tokens[-1]
    assert fetched.settled().written is None
    assert layer.window().written is kernels.tokens[-1]
    layer.packed()
    assert layer.window().written is None


def test_an_append_that_fails_its_self_check_is_done_by_arrays(kernels, monkeypatch):
    def writes_nothing(*_, **__):
        return mx.array([0])

    monkeypatch.setattr(kernels, "append", writes_nothing)
    both = Both(cache.FusedKVCache(Turbo(8, 3)), cache.DeferredKVCache(Turbo(8, 3)))
    rng = np.random.default_rng(0)
    with deferred.installed():
        both.append(drawn(rng, 5))
        with pytest.warns(UserWarning, match="append failed its self-check"):
            both.append(drawn(rng, 1))
        both.append(drawn(rng, 1))
        both.check()
