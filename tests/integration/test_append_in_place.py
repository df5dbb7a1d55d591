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
fused = pytest.importorskip("kvstow.attention.fused")
window = pytest.importorskip("kvstow.attention.window")
stand_in = pytest.importorskip("tests.kernels.stand_in")

pytestmark = pytest.mark.mlx
kernels = stand_in.kernels
D = 64
COPIES = {"deepcopy": copy.deepcopy, "state": lambda layer: type(layer).from_state(layer.state)}
LOOKS = {"packed": lambda layer: layer.packed(), "window": lambda layer: layer.window()}
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 2, 7, 250])),
    st.tuples(st.just("attend"), st.sampled_from([1, 1, 1, 2])),
    st.tuples(st.just("trim"), st.integers(0, 9)),
    st.tuples(st.sampled_from([*COPIES, *LOOKS]), st.just(0)),
)


def drawn(rng, n):
    return tuple(mx.array(rng.standard_normal((1, 2, n, D)).astype(np.float32)) for _ in "kv")


def decoded(layer):
    return [np.array(x) for x in layer.keys_and_values()] if layer.offset else []


def attended(layer, exact, queries):
    keys, values = layer.update_and_fetch(*exact)
    options = {"scale": 0.1, "mask": "causal"}
    if isinstance(keys, window.PackedWindow):
        return np.array(fused.attend(queries, keys, **options))
    return np.array(mx.fast.scaled_dot_product_attention(queries, keys, values, **options))


class Both:
    """A layer whose appends are in place where they can be, and one whose never are."""

    def __init__(self, fused, plain):
        self.fused, self.plain = fused, plain

    def append(self, exact):
        self.fused.update_and_fetch(*exact)
        self.plain.update_and_fetch(*exact)

    def attend(self, rng, n):
        """Append, and attend to what was handed out."""
        exact, (queries, _) = drawn(rng, n), drawn(rng, n)
        got, want = self.each(lambda layer: attended(layer, exact, queries))
        np.testing.assert_allclose(got, want, atol=1e-6)

    def each(self, function):
        return function(self.fused), function(self.plain)

    def check(self):
        for got, want in zip(decoded(self.fused), decoded(self.plain), strict=True):
            np.testing.assert_array_equal(got, want)


STEPS = {
    "append": lambda both, rng, n: both.append(drawn(rng, n)),
    "attend": lambda both, rng, n: both.attend(rng, n),
    "trim": lambda both, _, n: both.each(lambda layer: layer.trim(n)),
}


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
            if what in STEPS:
                STEPS[what](both, rng, n)
            elif what in LOOKS and both.plain.is_packed:
                seen.append(both.each(LOOKS[what]))
            elif what in COPIES:
                layers.append(Both(*both.each(COPIES[what])))
        for both in layers:
            both.check()
        for got, want in seen:
            same(got, want)


def same(got, want):
    if isinstance(got, window.PackedWindow):
        n = want.n_tokens
        got, want = ((w.keys, w.values) for w in (got.settled(), want))
        got, want = ([p[:, :, :n] for p in (*keys, *values)] for keys, values in (got, want))
    else:
        got, want = ((*keys, *values) for keys, values in (got, want))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


def steps(layer, rng, *sizes):
    """Appends whose tokens are waited for."""
    for n in sizes:
        layer.update_and_fetch(*drawn(rng, n))
        layer.window().settled()


def test_steps_are_written_in_place_once_nobody_else_has_the_planes(kernels):
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = cache.FusedKVCache(Turbo(8, 3))
        steps(layer, rng, 5, 1)  # with the self-check of the kernel
        kernels.forget()
        layer.trim(1)
        steps(layer, rng, 1)
        kvstow.usage([layer])  # counts, and has no handle
        steps(layer, rng, 1)
        assert kernels.appended == [((1, 2, 1, D), 6)]
        mx.eval(layer.state)
        steps(layer, rng, 1)  # somebody may have the state
        assert len(kernels.appended) == 1
        steps(layer, rng, 1, 300, 2)  # the second one grows
    assert kernels.appended[1:] == [((1, 2, 1, D), 8), ((1, 2, 2, D), 309)]


@pytest.fixture
def stepped(kernels):
    """A layer whose next append is in place, and a function that appends; self-checks left out."""
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = cache.FusedKVCache(Turbo(8, 3))

        def step(n=1):
            return layer.update_and_fetch(*drawn(rng, n))[0]

        step(5)
        step()
        fused.attend(drawn(rng, 1)[0], step(), scale=0.1)
        kernels.forget()
        yield layer, step


def queries(n=1, dtype=mx.float32):
    return drawn(np.random.default_rng(1), n)[0].astype(dtype)


def test_tokens_in_the_place_of_trimmed_ones_wait_for_their_readers(stepped, kernels):
    layer, step = stepped
    output = fused.attend(queries(), step(), scale=0.1)
    layer.trim(2)
    got = fused.attend(queries(), step(), scale=0.1)
    assert kernels.stored == [((1, 2, 1, D), 7), ((1, 2, 1, D), 6)]
    assert kernels.waited[-1] is output
    assert not np.array_equal(np.array(got), np.array(output))


def test_tokens_that_a_prompt_may_still_read_are_not_overwritten(kernels):
    rng = np.random.default_rng(0)
    both = Both(cache.FusedKVCache(Turbo(8, 3)), cache.DeferredKVCache(Turbo(8, 3)))
    with deferred.installed():
        both.append(drawn(rng, 5))
        both.append(drawn(rng, 1))
        outputs = []
        for n in (12, 1):  # the second one in the place of a part of the first one
            exact, (asked, _) = drawn(rng, n), drawn(rng, n)
            kernels.forget()
            windows = both.each(lambda layer, exact=exact: layer.update_and_fetch(*exact)[0])
            outputs += [[fused.attend(asked, w, scale=0.1, mask="causal") for w in windows]]
            both.each(lambda layer: layer.trim(6))
            del windows
    assert kernels.stored == kernels.appended == []
    assert kernels.encoded == [((1, 2, 1, D), "turbo:k8v3")]
    for got, want in outputs:
        np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-6)


def test_tokens_that_others_may_read_are_not_overwritten_after_a_trim(stepped, kernels):
    layer, step = stepped
    had = layer.packed()
    layer.trim(1)
    step()
    had = layer.window()
    layer.trim(1)
    step()
    assert kernels.stored == kernels.appended == []
    assert len(kernels.encoded) == 2
    assert had.n_tokens == 7


def test_attention_stores_a_decoded_token_and_others_wait_for_it(stepped, kernels):
    layer, step = stepped
    fetched = step()
    assert kernels.stored == kernels.appended == []
    fused.attend(queries(), fetched, scale=0.1)
    fused.attend(queries(), fetched, scale=0.1)  # as layers do that share keys and values
    assert kernels.stored == [((1, 2, 1, D), 7)]
    assert kernels.appended == []
    assert [call.longest for call in kernels.attended if call.capacity == 256] == [8, 8]
    assert layer.window().arrival.there() is kernels.tokens[-1]
    layer.packed()
    assert layer.window().arrival is None


def test_a_token_that_nobody_attends_to_is_stored_by_a_launch_of_its_own(stepped, kernels):
    layer, step = stepped
    step()
    step()
    assert kernels.appended == [((1, 2, 1, D), 7)]
    fused.attend(queries(), layer.window(), scale=0.1)
    assert kernels.stored == [((1, 2, 1, D), 8)]
    layer.packed()
    assert len(kernels.appended) == 1


def test_each_launch_waits_for_the_one_before(stepped, kernels):
    _, step = stepped
    first = step()
    output = fused.attend(queries(), first, scale=0.1)
    again = fused.attend(queries(), first, scale=0.1)  # another layer's, of the same window
    assert kernels.attended[-1].after is output
    second = fused.attend(queries(), step(), scale=0.1)
    assert kernels.waited[-1] is again
    step()
    third = step()  # has the one before stored by a launch of its own
    assert kernels.waited[-1] is second
    alone = kernels.tokens[-1]
    fused.attend(queries(2), third, scale=0.1, mask="causal")
    assert kernels.waited[-1] is alone
    assert kernels.attended[-1].after is kernels.tokens[-2]  # the last one is its own output


def test_no_token_is_promised_once_the_default_device_is_another(stepped, kernels, monkeypatch):
    layer, step = stepped
    fused.attend(queries(), step(), scale=0.1)
    monkeypatch.setattr(fused, "why_no_device", lambda: "mlx's default device is the CPU")
    fetched = step()
    assert fetched.arrival is None
    assert not np.isnan(np.array(fused.attend(queries(), fetched, scale=0.1))).any()
    assert layer.offset == 9
    assert kernels.appended == []


APART = {
    "several query tokens": (1, lambda fetched: (queries(2), fetched)),
    "several tokens": (2, lambda fetched: (queries(2), fetched)),
    "a query token in the place of several": (2, lambda fetched: (queries(1), fetched)),
    "another dtype": (1, lambda fetched: (queries(1, mx.float16), fetched)),
}


@pytest.mark.parametrize("name", APART)
def test_what_attention_cannot_store_is_stored_before(stepped, kernels, name):
    n, given = APART[name]
    _, step = stepped
    asked, fetched = given(step(n))
    fused.attend(asked, fetched, scale=0.1, mask="causal")
    assert kernels.stored == []
    assert kernels.appended == [((1, 2, n, D), 7)]


def test_a_search_is_not_done_by_attention(kernels):
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = cache.FusedKVCache(Turbo(8, 3, search=True))
        steps(layer, rng, 5, 1, 1)
        kernels.forget()
        fused.attend(queries(), layer.update_and_fetch(*drawn(rng, 1))[0], scale=0.1)
    assert kernels.stored == []
    assert kernels.appended == [((1, 2, 1, D), 7)]


def test_attention_that_stores_wrongly_is_not_asked_to(kernels, monkeypatch):
    def stores_nothing(*given, **_):
        kernels.tokens.append(kernels.attend(*given[:5]))
        return kernels.tokens[-1]

    monkeypatch.setattr(kernels, "store_and_attend", stores_nothing)
    rng = np.random.default_rng(0)
    both = Both(cache.FusedKVCache(Turbo(8, 3)), cache.DeferredKVCache(Turbo(8, 3)))
    with deferred.installed():
        both.append(drawn(rng, 5))
        both.append(drawn(rng, 1))
        with pytest.warns(UserWarning, match="_store failed its self-check"):
            both.attend(rng, 1)
        kernels.forget()
        both.attend(rng, 1)
        both.check()
    assert len(kernels.appended) == 1


def test_attention_that_cannot_be_called_leaves_the_token_to_a_launch_of_its_own(
    stepped, kernels, monkeypatch
):
    def fails(*_, **__):
        raise RuntimeError("no launch")

    monkeypatch.setattr(kernels, "store_and_attend", fails)
    _, step = stepped
    with pytest.warns(UserWarning, match="could not be called"):
        fused.attend(queries(), step(), scale=0.1)
    assert kernels.appended == [((1, 2, 1, D), 7)]


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
