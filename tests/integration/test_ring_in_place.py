"""Sliding windows whose steps are written to the memory of planes, in the place of older tokens.

The stand-in for the kernel writes at once and reads when its output is computed: a step that does
not wait for the readers of a token that it overwrites would change what they see.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.scheme import Turbo

mx = pytest.importorskip("mlx.core")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
rotating = pytest.importorskip("kvstow.integrations.mlx_lm.rotating")
fused = pytest.importorskip("kvstow.attention.fused")
encode = pytest.importorskip("kvstow.integrations.mlx_lm.encode").encode
window = pytest.importorskip("kvstow.attention.window")
stand_in = pytest.importorskip("tests.kernels.stand_in")

pytestmark = pytest.mark.mlx
kernels = stand_in.kernels
H, D, SIZE = 2, 64, 24
SCHEME = Turbo(8, 3)
COPIES = {"deepcopy": copy.deepcopy, "state": lambda layer: type(layer).from_state(layer.state)}
OPERATIONS = st.one_of(
    st.tuples(st.just("steps"), st.sampled_from([1, 1, 2, 5, 30])),
    st.tuples(st.just("attend"), st.sampled_from([1, 1, 2, 30])),
    st.tuples(st.sampled_from(["decode", "keep", "decode", "keep", *COPIES]), st.just(0)),
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 3])),
        st.tuples(st.just("trim"), st.integers(0, 3)),
    ),
)


def drawn(rng, n, heads=H):
    return mx.array(rng.standard_normal((1, heads, n, D)).astype(np.float32))


def attended(layer, exact, queries):
    """Not computed yet, and the window."""
    mask = layer.make_mask(queries.shape[2])
    keys, values = layer.update_and_fetch(*exact)
    options = {"scale": 0.1, "mask": mask}
    if isinstance(keys, window.PackedWindow):
        return fused.attend(queries, keys, **options), keys
    return mx.fast.scaled_dot_product_attention(queries, keys, values, **options), keys


class Both:
    """A layer whose appends are in place where they can be, and one whose never are."""

    def __init__(self, *layers):
        self.layers = layers

    def each(self, function):
        return [function(layer) for layer in self.layers]

    def attend(self, rng, n):
        exact, queries = (drawn(rng, n), drawn(rng, n)), drawn(rng, n, 2 * H)
        return self.each(lambda layer: attended(layer, exact, queries))


def trim(both, n):
    if both.layers[1].is_trimmable():
        both.each(lambda layer: layer.trim(n))


def append(both, exact):
    both.each(lambda layer: layer.update_and_fetch(*exact))


READS = {
    "attend": lambda both, rng, n: [[output for output, _ in both.attend(rng, n)]],
    "steps": lambda both, rng, n: [[out for out, _ in both.attend(rng, 1)] for _ in range(n)],
    "decode": lambda both, *_: zip(*both.each(lambda layer: layer.keys_and_values()), strict=True),
}
CHANGES = {
    "append": lambda both, rng, n: append(both, (drawn(rng, n), drawn(rng, n))),
    "trim": lambda both, _, n: trim(both, n),
}


def carry_out(operation, layers, rng, outputs, kept):
    what, n = operation
    both = layers[rng.integers(len(layers))]
    if what in READS and both.layers[1].offset:
        outputs += READS[what](both, rng, n)
    elif what == "keep" and both.layers[1].is_packed:
        kept.append((both.each(lambda layer: layer.window()), drawn(rng, 1, 2 * H)))
    elif what in COPIES:
        layers.append(Both(*both.each(COPIES[what])))
    elif what in CHANGES:
        CHANGES[what](both, rng, n)


def equal(got, want):
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-6)


@pytest.mark.usefixtures("kernels")
@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(OPERATIONS, max_size=10),
    keep=st.sampled_from([0, 4]),
    n_prompt=st.sampled_from([3, 20, 40]),
    seed=st.integers(0, 99),
)
def test_any_sequence_is_that_of_arrays_made_anew(operations, keep, n_prompt, seed):
    rng = np.random.default_rng(seed)
    kinds = rotating.FusedRotatingKVCache, rotating.DeferredRotatingKVCache
    outputs, kept = [], []
    with deferred.installed():
        layers = [Both(*(kind(SCHEME, SIZE, keep) for kind in kinds))]
        layers[0].attend(rng, n_prompt)
        for operation in operations:
            carry_out(operation, layers, rng, outputs, kept)
        for windows, queries in kept:
            outputs.append([fused.attend(queries, one, scale=0.1) for one in windows])
        for got, want in outputs:
            equal(got, want)
        for both in layers:
            held = both.each(lambda layer: layer.keys_and_values() if layer.offset else ())
            for got, want in zip(*held, strict=True):
                equal(got, want)


@pytest.fixture
def stepped(kernels):
    """A layer whose next append is in place, with a full window, and a function that attends."""
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = rotating.FusedRotatingKVCache(SCHEME, SIZE)

        def step(n=1):
            exact = drawn(rng, n), drawn(rng, n)
            return attended(layer, exact, drawn(rng, n, 2 * H))[0]

        step(2 * SIZE)
        for _ in range(3):
            step()
        kernels.forget()
        yield layer, step


def places(kernels):
    return [place for _, place in kernels.stored]


def test_steps_take_the_places_of_the_oldest_tokens_and_wait_for_their_readers(stepped, kernels):
    layer, step = stepped
    n_bytes = layer.nbytes
    outputs = [step() for _ in range(SIZE)]
    assert places(kernels) == [*range(3, SIZE), 0, 1, 2]
    assert kernels.appended == kernels.encoded == []
    waited = kernels.waited[1 - SIZE :]
    assert all(one is two for one, two in zip(waited, outputs[:-1], strict=True))
    assert layer.nbytes == n_bytes
    assert layer.offset == 3 * SIZE + 3


def test_a_prompt_shorter_than_the_window_grows_in_places_that_kernels_take(kernels):
    rng = np.random.default_rng(0)
    with deferred.installed():
        layer = rotating.FusedRotatingKVCache(SCHEME, 512)
        for n in [5] + [1] * 300:
            attended(layer, (drawn(rng, n), drawn(rng, n)), drawn(rng, n, 2 * H))
    assert layer.capacity == 512
    assert layer.offset == 305
    # The first step, and each that grows, is mlx-lm's; so is the one after a self-check.
    assert places(kernels)[-40:] == list(range(265, 305))
    assert len(kernels.encoded) < 8


READERS = {
    "a window that somebody has": lambda layer: layer.window(),
    "a deferred reader": lambda layer: layer.window().settled() and None,
    "decoded tokens": lambda layer: layer.keys_and_values() and None,
    "a state": lambda layer: layer.state and None,
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("name", READERS)
def test_a_token_that_others_may_read_is_not_overwritten(stepped, kernels, name):
    layer, step = stepped
    step()
    had = READERS[name](layer)
    kernels.forget()
    step()
    assert kernels.stored == []
    assert kernels.encoded == [((1, H, 1, D), str(SCHEME))]
    step()
    assert places(kernels) == [5]
    del had


def test_stored_rows_hold_a_token_that_was_on_its_way(stepped, kernels):
    layer, step = stepped
    exact = drawn(np.random.default_rng(3), 1), drawn(np.random.default_rng(4), 1)
    layer.update_and_fetch(*exact)
    (stored,) = layer.stored_rows()
    ((shape, place),) = kernels.appended
    assert shape == (1, H, 1, D)
    for part, wanted in zip(stored, encode(SCHEME, *exact), strict=True):
        np.testing.assert_array_equal(np.array(part.codes[:, :, place]), wanted.codes[:, :, 0])
    step()
    assert kernels.stored == []  # somebody may have these


THREADS = {
    "a step of a copy": lambda layer, step: step(copy.deepcopy(layer)),
    "a chunk": lambda layer, step: step(layer, 3),
    "a step": lambda layer, step: step(layer),
    "positions": lambda layer, _: layer.offset,
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", THREADS)
@pytest.mark.parametrize("batch", [1, 2])
def test_another_thread_goes_on_with_a_cache_whose_outputs_are_computed(name, batch):
    """What is not computed is bound to the stream of the thread that made it."""
    rng = np.random.default_rng(0)

    def step(layer, n=1):
        exact = [mx.array(rng.standard_normal((batch, H, n, D)).astype(np.float32)) for _ in "kv"]
        output, _ = attended(layer, exact, exact[0])
        offset = layer.offset  # which a model asks for
        return output + (offset if batch == 1 else offset[:, None, None, None])

    def made():
        rows = [rotating.FusedRotatingKVCache(SCHEME, SIZE) for _ in range(batch)]
        for i, row in enumerate(rows):
            n = SIZE + 9 * i
            attended(row, (drawn(rng, n), drawn(rng, n)), drawn(rng, n))
        layer = rows[0] if batch == 1 else type(rows[0]).merge(rows)
        for _ in range(6):
            mx.eval(step(layer))
        return layer

    with deferred.installed(), ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        layer = one.submit(made).result()
        other.submit(lambda: mx.eval(THREADS[name](layer, step))).result()


def test_a_step_that_overwrites_waits_for_each_layer_that_has_read(stepped, kernels):
    layer, _ = stepped
    rng = np.random.default_rng(1)
    keys = layer.update_and_fetch(drawn(rng, 1), drawn(rng, 1))[0]
    queries = drawn(rng, 1, 2 * H)
    first = fused.attend(queries, keys, scale=0.1)
    second = fused.attend(queries, keys, scale=0.1)  # of a layer that shares keys and values
    assert kernels.attended[-1].after is first
    del keys
    attended(layer, (drawn(rng, 1), drawn(rng, 1)), queries)
    assert kernels.waited[-1] is second
