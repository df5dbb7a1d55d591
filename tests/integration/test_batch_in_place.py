"""Batches whose steps are written to the memory of planes: see test_append_in_place.py.

The stand-in for the kernel writes where the kernel would, at once, so that whoever shares the
memory and should not would see it.
"""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.scheme import Turbo

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
cache = pytest.importorskip("kvstow.integrations.mlx_lm.cache")
rotating = pytest.importorskip("kvstow.integrations.mlx_lm.rotating")
fused = pytest.importorskip("kvstow.attention.fused")
stand_in = pytest.importorskip("tests.kernels.stand_in")

pytestmark = pytest.mark.mlx
kernels = stand_in.kernels
H, D = 2, 64
SCHEMES = [Turbo(8, 3), Turbo(4, 2)]
GROWING = cache.FusedKVCache, cache.DeferredKVCache
SLIDING = rotating.FusedRotatingKVCache, rotating.DeferredRotatingKVCache


class Both:
    """A batch whose appends are in place where they can be, and one whose never are."""

    def __init__(self, *batches):
        self.batches = batches

    @classmethod
    def of(cls, rng, scheme, lengths, size=0):
        """Sliding windows of a size, or caches that grow."""
        drawn = [Both.drawn(rng, 1, n) for n in lengths]
        kinds, made = SLIDING if size else GROWING, []
        for one in kinds:
            rows = [one(scheme, size) if size else one(scheme) for _ in lengths]
            for row, exact in zip(rows, drawn, strict=True):
                row.update_and_fetch(*exact)
            made.append(one.merge(rows))
        return cls(*made)

    @staticmethod
    def drawn(rng, b, n):
        return [mx.array(rng.standard_normal((b, H, n, D)).astype(np.float32)) for _ in "kv"]

    def each(self, function):
        return [function(batch) for batch in self.batches]

    def extend(self, other):
        if self.n_rows + other.n_rows < 7:
            for batch, more in zip(self.batches, other.batches, strict=True):
                batch.extend(more)

    @property
    def n_rows(self):
        return self.batches[1].offset.shape[0]

    def append(self, rng, n):
        exact = self.drawn(rng, self.n_rows, n)
        return self.each(lambda batch: batch.update_and_fetch(*exact)[0])

    def have_written(self):
        """Whatever is on its way into planes is there; they stay nobody else's."""
        self.batches[0].window().settled()

    def check(self):
        got, want = self.each(lambda batch: np.array(batch.offset).tolist())
        assert got == want
        for i, n in enumerate(want):
            rows = self.each(lambda batch, i=i: batch.extract(i))
            assert [row.offset for row in rows] == [n, n]
            if n:
                same(*(row.packed() for row in rows))


class Seen:
    """Planes that somebody has and may read later, and what they are to hold."""

    def __init__(self, both, got, wanted, n_tokens):
        self.got, self.wanted, self.n_tokens = got, list(map(np.array, wanted)), n_tokens
        self.arrival = None
        self.starts = both.batches[1]._stages.packed.caches[0].left_padding.tolist()

    @classmethod
    def of_windows(cls, both, windows):
        seen = cls(both, *((*w.keys, *w.values) for w in windows), windows[1].n_tokens)
        seen.arrival = windows[0].arrival
        return seen

    def check(self):
        if self.arrival is not None:
            self.arrival.wait()
        for plane, wanted in zip(map(np.array, self.got), self.wanted, strict=True):
            for row, expected, start in zip(plane, wanted, self.starts, strict=True):
                seen = slice(None), slice(start, self.n_tokens)
                np.testing.assert_array_equal(row[seen], expected[seen])


def same(got, want):
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


# --- any sequence: an operation may give another batch, or windows that somebody has


def append(both, n, rng):
    if rng.integers(2):  # which has handles ready
        both.each(lambda batch: batch.window())
    return Seen.of_windows(both, both.append(rng, n))


def attend(both, _, rng):
    masks = both.each(lambda batch: batch.make_mask(1))
    windows = both.append(rng, 1)
    queries = both.drawn(rng, both.n_rows, 1)[0]
    got, want = (
        np.array(fused.attend(queries, window, scale=0.1, mask=mask))
        for window, mask in zip(windows, masks, strict=True)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    return Seen.of_windows(both, windows)


def prompt(both, n, rng):
    """Prompts of several lengths, in chunks, with pads on the right."""
    lengths = rng.integers(1, 8, both.n_rows).tolist()
    pads = [max(lengths) - m for m in lengths]
    both.each(lambda batch: batch.prepare(lengths=lengths, right_padding=pads))
    for at in range(0, max(lengths), n):
        both.append(rng, min(n, max(lengths) - at))
    both.each(lambda batch: batch.finalize())


def trim(both, n, _):
    if n < min(both.batches[1].offset.tolist()):
        both.each(lambda batch: batch.trim(n))


def keep(both, _, rng):
    order = rng.permutation(both.n_rows).tolist()
    both.each(lambda batch: batch.filter(order[: 1 + len(order) // 2]))


def extend(both, _, rng):
    both.extend(Both.of(rng, both.batches[1].scheme, rng.integers(1, 9, 2).tolist()))


def extend_by_itself(both, *_):
    both.extend(Both(*both.each(copy.deepcopy)))


def extract(both, _, rng):
    i = int(rng.integers(both.n_rows))
    rows = both.each(lambda batch: batch.extract(i))
    return Both(*(type(row).merge([row]) for row in rows))


def window(both, *_):
    return Seen.of_windows(both, both.each(lambda batch: batch.window()))


def state(both, *_):
    got, wanted = both.each(lambda batch: batch.state)
    return Seen(both, *([x for c in s for x in c[:2]] for s in (got, wanted)), wanted[0][-1])


def deepcopy(both, *_):
    return Both(*both.each(copy.deepcopy))


WITHOUT_NUMBER = [attend, keep, extend, extend_by_itself, extract, window, state, deepcopy]
OPERATIONS = st.one_of(
    st.tuples(st.just(append), st.sampled_from([1, 1, 1, 2, 7, 250])),
    st.tuples(st.just(prompt), st.integers(1, 4)),
    st.tuples(st.just(trim), st.sampled_from([0, 1, 1, 2, 9])),
    st.tuples(st.sampled_from(WITHOUT_NUMBER), st.just(0)),
)


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    lengths=st.lists(st.sampled_from([1, 5, 9]), min_size=1, max_size=3),
    operations=st.lists(OPERATIONS, max_size=12),
    seed=st.integers(0, 99),
)
def test_any_sequence_is_that_of_arrays_made_anew(scheme, lengths, operations, seed):
    rng = np.random.default_rng(seed)
    with deferred.installed():
        batches, seen = [Both.of(rng, scheme, lengths)], []
        batches[0].append(rng, 1)  # the next one is in place
        for operation, n in operations:
            made = operation(batches[rng.integers(len(batches))], n, rng)
            if made is not None:
                (batches if isinstance(made, Both) else seen).append(made)
        for made in (*batches, *seen):
            made.check()


# --- one by one


@pytest.fixture
def stepped(kernels):
    """Two rows and steps up to the first in place, self-checks left out."""
    rng = np.random.default_rng(0)
    with deferred.installed():
        both = Both.of(rng, Turbo(8, 3), [5, 9])

        def step(n=1):
            window = both.append(rng, n)[0]
            both.have_written()
            return window

        step()
        step()
        kernels.forget()
        yield both, step


def test_steps_are_written_behind_the_longest_row(stepped, kernels):
    _, step = stepped
    step()
    step(3)
    assert kernels.appended == [((2, H, 1, D), 11), ((2, H, 3, D), 12)]
    assert kernels.encoded == []


def test_growth_is_mlx_lms(stepped, kernels):
    both, step = stepped
    assert both.batches[0].capacity == 272
    step(272 - 11)
    assert len(kernels.appended) == 1
    step()
    assert len(kernels.appended) == 1
    assert both.batches[0].capacity == 528
    step()
    assert kernels.appended[1:] == [((2, H, 1, D), 273)]
    both.check()


GIVES_UP = {
    "state": lambda batch: batch.state,
    "deepcopy": copy.deepcopy,
    "extract": lambda batch: batch.extract(0),
    "filter": lambda batch: batch.filter([0, 1]),
    "extend": lambda batch: batch.extend(copy.deepcopy(batch)),
    "trim": lambda batch: batch.trim(1),
    "stored_rows": lambda batch: list(batch.stored_rows()),
}


@pytest.mark.parametrize("name", GIVES_UP)
def test_who_may_have_the_planes_is_waited_for_and_sees_no_step(stepped, kernels, name):
    both, _ = stepped
    batch, rng = both.batches[0], np.random.default_rng(1)
    assert batch.window().arrival.there() is kernels.tokens[-1]
    GIVES_UP[name](batch)
    packed = batch._stages.packed
    assert packed.arrival is None
    for n_in_place in (0, 1):
        batch.update_and_fetch(*Both.drawn(rng, batch.offset.shape[0], 1))
        both.have_written()
        assert len(kernels.appended) == n_in_place


def test_who_has_the_state_keeps_it_whatever_comes_in_the_place_of_tokens(stepped):
    both, step = stepped
    held = both.batches[0].state[0][0]
    had = np.array(held)
    both.each(lambda batch: batch.trim(2))
    step()
    step()
    np.testing.assert_array_equal(np.array(held), had)


@pytest.mark.parametrize("look", ["nbytes", "capacity", "n_elements", "n_tokens", "offset"])
def test_usage_and_masks_leave_steps_in_place(stepped, kernels, look):
    both, step = stepped
    getattr(both.batches[0], look)
    both.batches[0].make_mask(1)
    both.batches[0].is_trimmable()
    step()
    assert len(kernels.appended) == 1


def test_mlx_lms_caches_are_where_the_tokens_are(stepped):
    both, step = stepped
    step(4)
    fused_caches, plain_caches = both.each(lambda batch: batch._stages.packed.caches)
    for got, want in zip(fused_caches, plain_caches, strict=True):
        assert got._idx == want._idx == 15
        assert got.offset.tolist() == want.offset.tolist() == [11, 15]
        assert got.left_padding.tolist() == want.left_padding.tolist() == [4, 0]
        for a, b in zip(got.keys_and_values(), want.keys_and_values(), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


def test_planes_that_are_not_contiguous_are_made_so_for_mlx_lms_caches_too(stepped, kernels):
    both, _ = stepped
    packed, rng = both.batches[0]._stages.packed, np.random.default_rng(1)
    for held in packed.caches:
        held.keys, held.values = map(otherwise_laid_out, (held.keys, held.values))
    packed._own.is_shared = False  # as after an append that kept the layout
    both.batches[0].window()
    for _ in range(2):
        both.append(rng, 1)
        both.have_written()
    assert len(kernels.appended) == 2
    both.check()


def otherwise_laid_out(x):
    return mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)


def test_attention_waits_for_what_is_written(stepped, kernels):
    _, step = stepped
    window = step()
    assert window.arrival.there() is kernels.tokens[-1]
    assert window.fused


def test_rows_at_two_stages_are_not_written_in_place(stepped, kernels):
    both, _ = stepped
    batch, rng = both.batches[0], np.random.default_rng(1)
    batch.extend(type(batch)([cache.FusedKVCache(Turbo(8, 3))]))
    batch.update_and_fetch(*Both.drawn(rng, 3, 1))  # decodes, and would wait for what is written
    assert kernels.appended == []


SIZE = 16
OF_WINDOWS = st.one_of(
    st.tuples(st.just("steps"), st.sampled_from([1, 1, 2, 5, 20])),
    st.tuples(st.sampled_from(["keep", "extend", "extract", "deepcopy", "look"]), st.just(0)),
)


def steps_of(both, rng, n):
    """What each step attends to, not computed yet; with the mask of that step."""
    for _ in range(n):
        masks = both.each(lambda batch: batch.make_mask(1))
        queries = both.drawn(rng, both.n_rows, 1)[0]
        yield [
            fused.attend(queries, window, scale=0.1, mask=mask)
            for window, mask in zip(both.append(rng, 1), masks, strict=True)
        ]


def look(both, *_):
    both.each(lambda batch: batch.keys_and_values())


CHANGES = {"keep": keep, "extract": extract, "deepcopy": deepcopy, "look": look}


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([3, 9, 16, 30]), min_size=1, max_size=3),
    operations=st.lists(OF_WINDOWS, max_size=8),
    seed=st.integers(0, 99),
)
def test_any_sequence_of_sliding_windows_is_that_of_arrays_made_anew(lengths, operations, seed):
    rng, outputs = np.random.default_rng(seed), []
    with deferred.installed():
        both = Both.of(rng, Turbo(8, 3), lengths, SIZE)
        for what, n in [("steps", 3), *operations]:
            if what == "steps":
                outputs += steps_of(both, rng, n)
            elif what == "extend":
                both.extend(Both.of(rng, Turbo(8, 3), rng.integers(1, 30, 2).tolist(), SIZE))
            else:
                both = CHANGES[what](both, n, rng) or both
        for got, want in outputs:
            np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-5)
        got, want = both.each(lambda batch: np.array(batch.offset).tolist())
        assert got == want
        for i in range(both.n_rows):
            rows = both.each(lambda batch, i=i: batch.extract(i).keys_and_values())
            np.testing.assert_array_equal(*map(np.array, (rows[0][0], rows[1][0])))


def test_steps_of_full_sliding_windows_take_the_places_of_the_oldest_tokens(kernels):
    rng = np.random.default_rng(0)
    with deferred.installed():
        both = Both.of(rng, Turbo(8, 3), [SIZE + 1, SIZE + 9], SIZE)
        list(steps_of(both, rng, 3))
        kernels.forget()
        outputs = [got for got, _ in steps_of(both, rng, SIZE)]
    assert [place for _, place in kernels.stored] == [*range(3, SIZE), 0, 1, 2]
    assert kernels.appended == kernels.encoded == []
    waited = kernels.waited[1 - SIZE :]
    assert all(one is two for one, two in zip(waited, outputs[:-1], strict=True))
