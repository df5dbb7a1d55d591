"""`PackedStore` against a model of it: five numpy arrays, concatenated and sliced."""

import copy
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.store import STEP_TOKENS, PackedStore

BATCH, HEADS = 2, 3
# Key codes, scales, zeros, value codes, scales: head_dim 64 at k8v3, codes cut short.
WIDTHS_AND_DTYPES = (
    (16, np.int8),
    (2, np.float16),
    (2, np.float16),
    (6, np.uint8),
    (2, np.float16),
)
BYTES_PER_TOKEN = BATCH * HEADS * sum(w * np.dtype(t).itemsize for w, t in WIDTHS_AND_DTYPES)


@pytest.fixture(
    scope="module",
    params=["numpy", pytest.param("mlx.core", marks=pytest.mark.mlx)],
    ids=["numpy", "mlx"],
)
def xp(request):
    if request.param == "mlx.core":
        pytest.importorskip("mlx.core")
    return import_module(request.param)


def random_planes(rng, n_tokens):
    return tuple(
        rng.integers(-100, 100, (BATCH, HEADS, n_tokens, width)).astype(dtype)
        for width, dtype in WIDTHS_AND_DTYPES
    )


def append(store, planes, xp):
    given_arrays = [xp.array(plane) for plane in planes]
    store.append(PackedKeys(*given_arrays[:3]), PackedValues(*given_arrays[3:]))
    return given_arrays


def filled(xp, rng, n_tokens):
    store, planes = PackedStore(xp), random_planes(rng, n_tokens)
    append(store, planes, xp)
    return store, planes


def window(store):
    keys, values = store.window()
    return tuple(np.array(plane) for plane in (*keys, *values))


def assert_holds(store, planes):
    """The window of `store` is `planes`, byte for byte."""
    for got, wanted in zip(window(store), planes, strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.tobytes() == wanted.tobytes()


def joined(old, new):
    return tuple(np.concatenate(pair, axis=2) for pair in zip(old, new, strict=True))


LENGTHS = st.integers(1, 6) | st.sampled_from([100, 255, 256, 257, 512])
OPERATIONS = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(st.just("append"), LENGTHS),
            st.tuples(st.just("trim"), LENGTHS),
            st.tuples(st.just("deepcopy"), st.just(0)),
            st.tuples(st.just("restore"), st.just(0)),
        ),
        st.integers(0, 99),
    ),
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS)
def test_any_sequence_of_operations_leaves_every_store_with_its_own_tokens(xp, operations):
    rng = np.random.default_rng(0)
    family = [(PackedStore(xp), random_planes(rng, 0))]
    for (operation, n_tokens), choice in operations:
        which = choice % len(family)
        store, planes = family[which]
        if operation == "append":
            new = random_planes(rng, n_tokens)
            append(store, new, xp)
            family[which] = store, joined(planes, new)
        elif operation == "trim":
            held = planes[0].shape[2]
            assert store.trim(n_tokens) == min(n_tokens, held)
            family[which] = store, tuple(p[:, :, : max(held - n_tokens, 0)] for p in planes)
        elif operation == "deepcopy":
            family.append((copy.deepcopy(store), planes))
        else:
            twin = PackedStore(xp)
            twin.restore(store.planes, store.offset)
            family.append((twin, planes))
        for store, planes in family:
            assert store.offset == planes[0].shape[2]
            assert store.capacity % STEP_TOKENS == 0
            assert store.capacity >= store.offset
            assert store.nbytes == BYTES_PER_TOKEN * store.capacity
    for store, planes in family:
        if store.capacity:
            assert_holds(store, planes)


def test_an_empty_store_allocates_nothing(xp):
    store = PackedStore(xp)
    assert (store.offset, store.capacity, store.nbytes, store.planes) == (0, 0, 0, ())
    assert store.trim(3) == 0


@pytest.mark.parametrize(
    ("n_tokens", "capacity"), [(1, 256), (255, 256), (256, 256), (257, 512), (512, 512)]
)
def test_capacity_is_the_next_multiple_of_256(xp, rng, n_tokens, capacity):
    assert filled(xp, rng, n_tokens)[0].capacity == capacity


def test_planes_grow_only_when_they_are_full(xp, rng):
    store, _ = filled(xp, rng, 250)
    append(store, random_planes(rng, 6), xp)
    assert store.capacity == 256
    append(store, random_planes(rng, 1), xp)
    assert store.capacity == 512


def test_trimmed_tokens_give_their_place_to_the_next_ones(xp, rng):
    store, planes = filled(xp, rng, 256)
    assert store.trim(7) == 7
    new = random_planes(rng, 7)
    append(store, new, xp)
    assert store.capacity == 256
    assert_holds(store, joined(tuple(p[:, :, :249] for p in planes), new))


def test_nbytes_is_what_the_planes_take_and_not_what_the_window_takes(xp, rng):
    store, _ = filled(xp, rng, 3)
    assert store.nbytes == sum(plane.nbytes for plane in store.planes) == 256 * BYTES_PER_TOKEN


def test_the_allocated_planes_begin_with_the_window(xp, rng):
    store, planes = filled(xp, rng, 5)
    keys, values = store.allocated()
    for plane, wanted in zip((*keys, *values), planes, strict=True):
        assert plane.shape[2] == 256
        assert np.array(plane)[:, :, :5].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("how", ["restore", "deepcopy"])
@pytest.mark.parametrize("writer", ["original", "twin"])
def test_an_append_to_one_of_two_equal_stores_leaves_the_other(xp, rng, how, writer):
    original, planes = filled(xp, rng, 5)
    if how == "deepcopy":
        twin = copy.deepcopy(original)
    else:
        twin = PackedStore(xp)
        twin.restore(original.planes, original.offset)
    changed, left = (original, twin) if writer == "original" else (twin, original)
    changed.trim(3)
    append(changed, random_planes(rng, 3), xp)
    assert_holds(left, planes)
    append(left, random_planes(rng, 2), xp)
    assert left.offset == 7
    assert changed.offset == 5


def test_planes_that_were_handed_out_do_not_change_with_the_store(xp, rng):
    store, planes = filled(xp, rng, 5)
    before = store.planes
    store.trim(5)
    append(store, random_planes(rng, 5), xp)
    for plane, wanted in zip(before, planes, strict=True):
        assert np.array(plane)[:, :, :5].tobytes() == wanted.tobytes()


def test_arrays_that_fill_the_planes_exactly_stay_the_callers_own(xp, rng):
    store, planes = PackedStore(xp), random_planes(rng, 256)
    callers = append(store, planes, xp)
    store.trim(256)
    append(store, random_planes(rng, 9), xp)
    for array, wanted in zip(callers, planes, strict=True):
        assert np.array(array).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("offset", [-1, 257])
def test_an_offset_outside_the_planes_is_refused_and_changes_nothing(xp, rng, offset):
    store, planes = filled(xp, rng, 5)
    other, _ = filled(xp, rng, 4)
    with pytest.raises(ValueError, match=rf"offset must be in 0\.\.256 .* got {offset}"):
        store.restore(other.planes, offset)
    assert_holds(store, planes)


def test_an_offset_into_no_planes_is_refused(xp):
    with pytest.raises(ValueError, match=r"offset must be in 0\.\.0 "):
        PackedStore(xp).restore((), 1)


def test_a_store_restored_from_nothing_is_empty(xp, rng):
    store, _ = filled(xp, rng, 5)
    store.restore((), 0)
    assert (store.offset, store.capacity, store.nbytes) == (0, 0, 0)


def test_a_full_store_is_restored_whole(xp, rng):
    store, planes = filled(xp, rng, 256)
    twin = PackedStore(xp)
    twin.restore(store.planes, 256)
    assert_holds(twin, planes)
