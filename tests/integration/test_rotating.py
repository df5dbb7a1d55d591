"""Packed sliding windows against mlx-lm's own cache of what is stored, after any schedule."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstow
from kvstow import SchemeError, UnsupportedModel

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
lists = pytest.importorskip("tests.integration.row_lists")

pytestmark = pytest.mark.mlx
PackedRotating = integration.PackedRotatingKVCache
DeferredRotating = integration.DeferredRotatingKVCache
H, D = lists.H, lists.D
Tokens, Row, turbo, cut = lists.Tokens, lists.Row, lists.turbo, lists.cut
WINDOW = 8
SCHEMES = ["turbo:k8v3", "turbo:k4v2+start12", "turbo:k2v8+start3+stored", "turbo:k5v5+stored"]


@pytest.fixture(params=["eager", "deferred"])
def cls(request):
    with deferred.installed():
        yield {"eager": PackedRotating, "deferred": DeferredRotating}[request.param]


@pytest.fixture
def draw():
    return Tokens()


def give(cache, tokens):
    return lists.decoded(cache.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v)))


def assert_same(got, wanted):
    for a, b in ((got.k, wanted.k), (got.v, wanted.v)):
        assert (a.shape, a.tobytes()) == (b.shape, b.tobytes())


def assert_same_mask(one, other, n):
    for options in ({}, {"window_size": WINDOW}, {"window_size": 3}, {"return_array": True}):
        got, wanted = (c.make_mask(n, **options) for c in (one, other))
        assert type(got) is type(wanted)
        assert np.array_equal(np.array(got), np.array(wanted))


class Beside:
    """A packed window, and two of mlx-lm's own: of exact tokens, and of what is left of them."""

    def __init__(self, cls, scheme, keep):
        self.draw, self.scheme, self.packed = Tokens(), scheme, False
        self.ours = cls(scheme, WINDOW, keep)
        self.exact, self.left = (host.RotatingKVCache(WINDOW, keep) for _ in range(2))

    def append(self, n):
        new = self.draw(n)
        assert_same_mask(self.ours, self.exact, n)
        got, exact = give(self.ours, new), give(self.exact, new)
        left = give(self.left, lists.stored(self.scheme, new))
        packs = self.exact.offset >= (self.scheme.start_tokens or 1)
        assert_same(got, left if self.packed or (packs and self.scheme.stored) else exact)
        self.packed = self.packed or packs

    def decode(self, n):
        for _ in range(n):
            self.append(1)

    def trim(self, n):
        if self.exact.is_trimmable():
            n = min(n, self.exact.offset)
            assert [c.trim(n) for c in (self.ours, self.exact, self.left)] == [n, n, n]
        if self.exact.offset == 0:  # fresh: mlx-lm's own keeps its arrays, and grows another way
            keep = self.exact.keep
            self.exact, self.left = (host.RotatingKVCache(WINDOW, keep) for _ in range(2))
            self.packed = False

    def deepcopy(self, n):
        before, self.ours = self.ours, copy.deepcopy(self.ours)
        give(before, self.draw(n))

    def state(self, n):
        before, self.ours = self.ours, type(self.ours).from_state(self.ours.state)
        give(before, self.draw(n))

    def check(self):
        ours, exact = self.ours, self.exact
        assert (ours.offset, ours.size(), ours.is_packed, ours.is_trimmable()) == (
            (exact.offset, exact.size(), self.packed, exact.is_trimmable())
        )
        assert ours.empty() == (ours.offset == 0)
        if ours.offset:
            shown = self.left if self.packed else exact
            assert_same(held(ours), held(shown))
            per_token = self.scheme.bytes_per_token(D) if self.packed else 2 * 4 * D
            assert ours.nbytes * 2 * 4 * D == shown.nbytes * per_token


def held(cache):
    k, v = map(np.array, cache.keys_and_values())
    return SimpleNamespace(k=k, v=v)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "decode", "trim", "deepcopy", "state"]),
        st.integers(1, 3) | st.integers(4, 20),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(SCHEMES),
    in_windows=st.booleans(),
    keep=st.sampled_from([0, 0, 2]),
    operations=OPERATIONS,
)
def test_every_append_sees_what_mlx_lms_cache_of_the_stored_tokens_would_show(
    text, in_windows, keep, operations
):
    """Bit for bit and place for place, before the window is full and laps after."""
    with deferred.installed():
        caches = Beside(DeferredRotating if in_windows else PackedRotating, turbo(text), keep)
        for operation, n in operations:
            getattr(caches, operation)(n)
            caches.check()


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k8v3+start40"])
def test_memory_stops_growing_at_the_window(cls, draw, text):
    cache = cls(turbo(text), 300)
    for _ in range(300):
        give(cache, draw(1))
    full, capacity = cache.nbytes, cache.capacity
    assert full == turbo().bytes_per_token(D) * H * 300
    for _ in range(400):
        cache.update_and_fetch(*(mx.zeros((1, H, 1, D)) for _ in range(2)))
    mx.eval([x for s in cache.state[0] for x in s[:2]])
    assert (cache.nbytes, cache.capacity, cache.offset) == (full, capacity, 700)
    give(cache, draw(50))  # a chunk of a prompt is held on top, until the next append
    assert cache.capacity == 300 - 1 + 50
    give(cache, draw(1))
    assert cache.capacity == 300
    usage = kvstow.usage([cache])
    assert (usage.kv_bytes, usage.tokens, usage.capacity_tokens) == (full, 751, 300)
    assert usage.compression_ratio == pytest.approx(2.56)


def test_memory_really_allocated_is_that_of_the_window(cls):
    cache = cls(turbo(), 512)
    x = mx.full((1, H, 512, D), 0.5)
    mx.eval(x)
    before = mx.get_active_memory()
    for _ in range(6):
        cache.update_and_fetch(x, x)
        mx.eval([a for s in cache.state[0] for a in s[:2]])
    for _ in range(3):
        cache.update_and_fetch(x[:, :, :1], x[:, :, :1])
        mx.eval([a for s in cache.state[0] for a in s[:2]])
    held = mx.get_active_memory() - before
    assert cache.nbytes == turbo().bytes_per_token(D) * H * 512
    assert cache.nbytes <= held < 1.25 * cache.nbytes + 5 * 16384


def test_an_overflow_is_counted_until_the_window_forgets_it(cls, draw):
    cache, tokens = cls(turbo(), WINDOW), draw(3)
    tokens.v[0, 0, 1, 7] = np.nan
    give(cache, tokens)
    for n in range(WINDOW - 2):
        assert kvstow.usage([cache]).nonfinite_groups == 2, n
        give(cache, draw(1))
    give(cache, draw(1))
    assert kvstow.usage([cache]).nonfinite_groups == 0


@pytest.mark.parametrize("n", [5, 30])
@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k8v3+start12"])
def test_a_converted_cache_continues_like_one_that_was_filled(cls, draw, text, n):
    tokens, more = draw(n), [draw(1), draw(4), draw(1)]
    plain = host.RotatingKVCache(WINDOW)
    filled = cls(turbo(text), WINDOW)
    for cache in (plain, filled):
        give(cache, cut(tokens, 0, 3))
        give(cache, cut(tokens, 3, n))
    converted = cls.from_kv_cache(plain, turbo(text))
    for piece in more:
        assert_same_mask(converted, filled, piece.k.shape[2])
        assert_same(give(converted, piece), give(filled, piece))
    assert plain.offset == n
    assert cls.from_kv_cache(host.RotatingKVCache(WINDOW), turbo(text)).empty()


def test_a_row_trimmed_to_nothing_is_fresh(cls, draw):
    cache, tokens = cls(turbo(), WINDOW), draw(4)
    give(cache, draw(6))
    assert cache.trim(99) == 6
    assert (cache.is_packed, cache.empty(), cache.nbytes) == (False, True, 0)
    assert_same(give(cache, tokens), tokens)


@pytest.mark.parametrize("scheme", ["off", "affine:8"])
def test_a_state_of_another_kind_of_scheme_is_refused(cls, draw, scheme):
    cache = cls(turbo(), WINDOW)
    give(cache, draw(3))
    arrays, is_packed, _, dtype = cache.state
    with pytest.raises(SchemeError, match=f"needs a turbo scheme, got {scheme}"):
        cls.from_state((arrays, is_packed, scheme, dtype))


def test_what_cannot_be_stored_is_refused_before_anything_is_taken(cls):
    cache = cls(turbo(), WINDOW)
    with pytest.raises(UnsupportedModel, match="the model has 80"):
        cache.update_and_fetch(mx.zeros((1, H, 2, 80)), mx.zeros((1, H, 2, 80)))
    assert cache.empty()


# --- in a batch


def filled_rows(cls, scheme, draw, lengths):
    """Rows, and a batch of caches that read them in chunks of 6."""
    rows = [Row(scheme, draw(0), packed=False, window=WINDOW) for _ in lengths]
    caches = [cls(scheme, WINDOW) for _ in lengths]
    for row, cache, n in zip(rows, caches, lengths, strict=True):
        for at in range(0, n, 6):
            piece = draw(min(6, n - at))
            row.append(piece)
            give(cache, piece)
    return cls.merge(caches), rows


def check_leaves(batch, rows, draw):
    """Each row continues alone as it is."""
    assert np.array(batch.offset).tolist() == [row.n for row in rows]
    for i, row in enumerate(rows):
        cache, row = batch.extract(i), row.copy()
        assert (cache.offset, cache.is_packed) == (row.n, row.packed)
        for n in (1, 3, 1):
            piece, before = draw(n), row.n
            mask = cache.make_mask(n, window_size=WINDOW)
            got = give(cache, piece)
            seen = lists.visible(mask, 1, n, got.k.shape[2])[0]
            for j, wanted in enumerate(row.append(piece)):
                columns = SimpleNamespace(k=got.k[0][:, seen[j]], v=got.v[0][:, seen[j]])
                lists.assert_sees(columns, wanted, in_order=False)
            assert cache.offset == before + n


class Batched:
    """A batch and its rows, under the operations of mlx-lm's batch generation."""

    def __init__(self, cls, scheme, lengths):
        self.cls, self.scheme, self.draw = cls, scheme, Tokens()
        self.batch, self.rows = filled_rows(cls, scheme, self.draw, lengths)
        self.decoded = False

    def prompt(self, rng):
        # mlx-lm reads prompts before it decodes. The other way round its own batch loses a
        # token of a row whose window is not full (docs/limits.md).
        n_tokens = rng.integers(0, 12, len(self.rows)).tolist()
        if not self.decoded and max(n_tokens) > 1:
            lists.append(self.batch, self.rows, [self.draw(n) for n in n_tokens])

    def decode(self, rng):
        self.decoded = True
        for _ in range(rng.integers(1, 12)):
            lists.append(self.batch, self.rows, [self.draw(1) for _ in self.rows])

    def extend(self, rng):
        if len(self.rows) < 5:
            lengths = rng.integers(0, 20, 2).tolist()
            more, rows = filled_rows(self.cls, self.scheme, self.draw, lengths)
            self.batch.extend(more)
            self.rows = self.rows + rows

    def filter(self, rng):
        self.keep(rng.permutation(len(self.rows)).tolist()[: rng.integers(1, len(self.rows) + 1)])

    def keep(self, order):
        self.batch.filter(order)
        self.rows = [self.rows[i] for i in order]

    def split(self, rng):
        order = rng.permutation(len(self.rows)).tolist()
        if len(order) > 1:
            self.decoded = True
            other, rows = copy.deepcopy(self.batch), [self.rows[i] for i in order[1:]]
            other.filter(order[1:])
            self.keep(order[:1])
            lists.append(other, rows, [self.draw(1) for _ in rows])
            self.batch.extend(other)
            self.rows += rows

    def leave(self, rng):
        order = rng.permutation(len(self.rows)).tolist()
        self.batch = self.cls.merge([self.batch.extract(i) for i in order])
        self.rows = [self.rows[i] for i in order]


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from(SCHEMES),
    in_windows=st.booleans(),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    operations=st.lists(
        st.sampled_from(["prompt", "decode", "decode", "extend", "filter", "split", "leave"]),
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
def test_a_row_of_a_batch_sees_its_own_window_whatever_the_others_do(
    text, in_windows, lengths, operations, seed
):
    rng = np.random.default_rng(seed)
    with deferred.installed():
        cls = DeferredRotating if in_windows else PackedRotating
        batched = Batched(cls, turbo(text), lengths)
        for operation in operations:
            getattr(batched, operation)(rng)
        check_leaves(batched.batch, batched.rows, batched.draw)


def test_rows_of_a_batch_can_be_trimmed_while_their_window_is_not_full(cls, draw):
    batch, rows = filled_rows(cls, turbo(), draw, [3, 5])
    assert batch.is_trimmable()
    assert batch.trim(4) == 4
    for row in rows:
        row.trim(4)
    lists.append(batch, rows, [draw(2), draw(2)])
    lists.append(batch, rows, [draw(6), draw(6)])
    assert not batch.is_trimmable()
    check_leaves(batch, rows, draw)


def test_windows_of_different_sizes_and_first_tokens_that_are_kept_are_not_batched():
    with pytest.raises(ValueError, match=r"window 8, keep 0.*window 9, keep 0"):
        PackedRotating.merge([PackedRotating(turbo(), n) for n in (8, 9)])
    with pytest.raises(ValueError, match="keep is not 0"):
        PackedRotating.merge([PackedRotating(turbo(), 8, keep=2) for _ in range(2)])


def test_a_pad_that_would_take_the_place_of_a_token_is_refused(cls, draw):
    batch, _ = filled_rows(cls, turbo(), draw, [9, 9])
    batch.prepare(lengths=[1, 0], right_padding=[0, 1])
    x = mx.zeros((2, H, 1, D))
    with pytest.raises(RuntimeError, match="cannot be padded"):
        batch.update_and_fetch(x, x)
