"""A batch of packed rows against the same rows alone, one list of tokens each."""

import copy

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvstow
from kvstow import UnsupportedModel

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
attention = pytest.importorskip("kvstow.attention.mlx")
lists = pytest.importorskip("tests.integration.row_lists")

pytestmark = pytest.mark.mlx
PackedKVCache, DeferredKVCache = integration.PackedKVCache, integration.DeferredKVCache
H, D = lists.H, lists.D
Tokens, Row, append = lists.Tokens, lists.Row, lists.append
join, turbo, planes = lists.join, lists.turbo, lists.planes
padded, decoded, visible = lists.padded, lists.decoded, lists.visible


@pytest.fixture(params=["eager", "deferred"])
def cls(request):
    """The class of one row, while mlx-lm's attention would take its windows."""
    with deferred.installed():
        yield {"eager": PackedKVCache, "deferred": DeferredKVCache}[request.param]


@pytest.fixture
def draw():
    return Tokens()


def alone(scheme, tokens, cls=PackedKVCache):
    """A cache of one row that was given `tokens` at once."""
    cache = cls(scheme)
    if tokens.k.shape[2]:
        cache.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
    return cache


def assert_bytes(cache, tokens):
    """A cache of one row holds what it would hold if it had never been in a batch."""
    wanted = alone(cache.scheme, tokens)
    assert (cache.offset, cache.is_packed) == (wanted.offset, wanted.is_packed)
    if not cache.offset:
        return
    got, wanted = (
        planes(c.packed()) if c.is_packed else [np.array(x) for x in c.keys_and_values()]
        for c in (cache, wanted)
    )
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def assert_holds(batch, rows):
    assert np.array(batch.offset).tolist() == [row.n for row in rows]
    assert batch.empty() == (not any(row.n for row in rows))
    for i, row in enumerate(rows):
        extracted = batch.extract(i)
        assert extracted.is_packed == row.packed
        if row.n and row.packed:
            assert planes(extracted.packed())[0].shape == (
                1,
                H,
                row.n,
                D * row.scheme.key_bits // 8,
            )
        if row.packed == (row.n >= (row.scheme.start_tokens or 1)):
            assert_bytes(extracted, row.tokens)


# --- any sequence

SCHEMES = ["turbo:k8v3", "turbo:k4v2+start7", "turbo:k2v8+start3+stored", "turbo:k5v5+stored"]
N_TOKENS = st.integers(0, 9) | st.sampled_from([20, 260])


class AnySequence(RuleBasedStateMachine):
    """Batches that are merged, read prompts, decode, split, join, trim and lose rows."""

    @initialize(
        text=st.sampled_from(SCHEMES),
        in_windows=st.booleans(),
        lengths=st.lists(N_TOKENS, min_size=1, max_size=3),
    )
    def begin(self, text, in_windows, lengths):
        self.owner = deferred.Owner()
        deferred.install(self.owner)
        self.draw, self.scheme = Tokens(), turbo(text)
        self.cls = DeferredKVCache if in_windows else PackedKVCache
        self.batch, self.rows = self.make(lengths)

    def teardown(self):
        deferred.remove(self.owner)

    def make(self, lengths):
        rows = [Row(self.scheme, self.draw(0), packed=False) for _ in lengths]
        for row, n in zip(rows, lengths, strict=True):
            row.append(self.draw(n))
        caches = [alone(self.scheme, row.tokens, self.cls) for row in rows]
        return self.cls.merge(caches), rows

    def some(self, data):
        return data.draw(st.permutations(range(len(self.rows))))

    @rule(data=st.data(), chunk=st.none() | st.integers(1, 6))
    def prompt(self, data, chunk):
        lengths = [data.draw(st.integers(0, 9)) for _ in self.rows]
        assume(any(lengths))
        append(self.batch, self.rows, [self.draw(n) for n in lengths], chunk)

    @rule(n=st.integers(1, 3))
    def decode(self, n):
        for _ in range(n):
            append(self.batch, self.rows, [self.draw(1) for _ in self.rows])

    @rule(lengths=st.lists(N_TOKENS, min_size=1, max_size=2))
    def extend(self, lengths):
        if len(self.rows) < 5:
            batch, rows = self.make(lengths)
            self.batch.extend(batch)
            self.rows += rows

    @rule(data=st.data())
    def filter(self, data):
        kept = self.some(data)[: data.draw(st.integers(1, len(self.rows)))]
        self.batch.filter(kept)
        self.rows = [self.rows[i] for i in kept]

    @rule(data=st.data())
    def split_and_join(self, data):
        """As mlx-lm moves rows from the prompts to the replies."""
        order = self.some(data)
        at = data.draw(st.integers(0, len(order)))
        if at in (0, len(order)):
            return
        other = copy.deepcopy(self.batch)
        self.batch.filter(order[:at])
        other.filter(order[at:])
        rows = [self.rows[i] for i in order]
        append(other, rows[at:], [self.draw(1) for _ in rows[at:]])
        self.batch.extend(other)
        self.rows = rows

    @rule(data=st.data())
    def extract_and_merge(self, data):
        """Every row leaves, and comes back in another order."""
        order = self.some(data)
        self.batch = self.cls.merge([self.batch.extract(i) for i in order])
        self.rows = [self.rows[i] for i in order]

    @rule(n=st.integers(0, 12))
    def trim(self, n):
        longest = max(row.n for row in self.rows)
        assert self.batch.trim(n) == min(n, longest)
        for row in self.rows:
            row.trim(n)

    @invariant()
    def every_row_holds_its_own_tokens(self):
        if rows := getattr(self, "rows", []):
            assert_holds(self.batch, rows)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=25, stateful_step_count=10, deadline=None)


# --- rows at different stages, one by one


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k8v3+start6", "turbo:k8v3+stored"])
def test_a_ragged_prompt_packs_each_row_by_its_own_tokens(cls, draw, text, chunk):
    rows = [Row(turbo(text), draw(0), packed=False) for _ in range(4)]
    batch = cls.merge([cls(turbo(text)) for _ in rows])
    append(batch, rows, [draw(n) for n in (7, 5, 1, 6)], chunk)
    assert [row.packed for row in rows] == [
        text != "turbo:k8v3+start6" or n > 5 for n in (7, 5, 1, 6)
    ]
    for _ in range(3):
        append(batch, rows, [draw(1) for _ in rows])
    assert_holds(batch, rows)


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k4v2+stored", "turbo:k8v3+start9"])
def test_a_new_row_beside_packed_ones_attends_to_what_it_would_alone(cls, draw, text):
    rows = [Row(turbo(text), draw(0), packed=False) for _ in range(3)]
    for row, n in zip(rows, (20, 0, 12), strict=True):
        row.append(draw(n))
    batch = cls.merge([alone(turbo(text), row.tokens, cls) for row in rows])
    append(batch, rows, [draw(n) for n in (2, 5, 1)])  # the second is new
    append(batch, rows, [draw(n) for n in (1, 6, 0)])
    append(batch, rows, [draw(1) for _ in rows])
    assert_holds(batch, rows)


def test_a_row_is_where_mlx_lms_own_batch_has_it(cls, draw):
    """So that a layer which keeps its own cache can use this layer's mask."""
    caches = [[kind() for _ in range(3)] for kind in (lambda: cls(turbo()), host.KVCache)]
    for one, *_ in caches:  # the others are new: their first append is beside stored tokens
        one.update_and_fetch(*(mx.zeros((1, H, 4, D)) for _ in range(2)))
    ours, theirs = cls.merge(caches[0]), host.KVCache.merge(caches[1])
    for lengths in ((5, 2, 0), (1, 1, 1), (2, 8, 1), (1, 1, 1)):
        pieces, width = [draw(n) for n in lengths], max(lengths)
        k, v = padded(pieces, width)
        for batch in (ours, theirs):
            batch.prepare(lengths=lengths, right_padding=[width - n for n in lengths])
        masks = [batch.make_mask(width, return_array=True) for batch in (ours, theirs)]
        n_columns = masks[1].shape[-1]
        seen = [visible(mask, 3, width, n_columns) for mask in masks]
        assert np.array_equal(*seen)
        got, wanted = (batch.update_and_fetch(k, v)[0] for batch in (ours, theirs))
        got = got.n_tokens if isinstance(got, attention.PackedWindow) else got.shape[2]
        assert got == wanted.shape[2] == n_columns
        for batch in (ours, theirs):
            batch.finalize()
        assert ours.offset.tolist() == theirs.offset.tolist()
    for batch in (ours, theirs):
        batch.filter([2, 1])
    assert (ours.offset.tolist(), ours.size()) == (theirs.offset.tolist(), theirs.size())


def test_pads_on_the_left_are_no_tokens(cls, draw):
    batch = cls.merge([cls(turbo("turbo:k8v3+start4")) for _ in range(2)])
    batch.prepare(left_padding=[0, 3])
    rows = [Row(batch.scheme, draw(0), packed=False) for _ in range(2)]
    pieces = [draw(5), draw(2)]
    k, v = padded([pieces[0], join(draw(3), pieces[1])], 5)
    mask = batch.make_mask(5)
    assert batch.offset.tolist() == [0, -3]
    got = decoded(batch.update_and_fetch(k, v))
    for i, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
        wanted = row.append(piece)[-1]
        seen = visible(mask, 2, 5, 5)[i, -1]
        assert got.k[i][:, seen].tobytes() == wanted.k.tobytes()
    assert [row.packed for row in rows] == [True, False]
    append(batch, rows, [draw(1) for _ in rows])
    append(batch, rows, [draw(1) for _ in rows])
    assert rows[1].packed
    assert_holds(batch, rows)


def test_pads_are_reported_nowhere_but_where_they_are_allocated(cls, draw):
    batch = cls.merge([cls(turbo()) for _ in range(2)])
    pieces = [draw(9), draw(2)]
    k, v = padded(pieces, 9)
    k[1, 0, 5] = float("inf")  # a pad overflows
    batch.prepare(lengths=[9, 2], right_padding=[0, 7])
    batch.update_and_fetch(k, v)
    for finalize in (False, True):
        if finalize:
            batch.finalize()
        usage = kvstow.usage([batch])
        assert (usage.tokens, usage.nonfinite_groups) == (9, 0)
        assert usage.kv_bytes == batch.nbytes == turbo().bytes_per_token(D) * H * 2 * batch.capacity
        assert usage.kv_bytes_bf16 == 2 * 2 * D * H * 2 * batch.capacity
    assert batch.extract(1).nbytes == turbo().bytes_per_token(D) * H * 2


def test_an_overflow_is_counted_in_its_row_and_leaves_with_it(cls, draw):
    tokens = draw(4)
    tokens.v[0, 0, 2, 7] = np.nan
    batch = cls.merge([alone(turbo(), tokens, cls), alone(turbo(), draw(6), cls)])
    assert kvstow.usage([batch]).nonfinite_groups == 2  # both groups of the value
    assert kvstow.usage([batch.extract(0)]).nonfinite_groups == 2
    batch.filter([1])
    assert kvstow.usage([batch]).nonfinite_groups == 0


def test_rows_that_leave_take_their_bytes_with_them(cls, draw):
    batch = cls.merge([alone(turbo(), draw(n), cls) for n in (700, 9)])
    before = batch.nbytes
    batch.filter([1])
    assert batch.nbytes == turbo().bytes_per_token(D) * H * 9
    assert before > 100 * batch.nbytes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_keeps_the_dtype_of_the_model(cls, draw, dtype):
    tokens, dtype = draw(4), getattr(mx, dtype)
    cache = cls(turbo())
    cache.update_and_fetch(*(mx.array(x).astype(dtype) for x in (tokens.k, tokens.v)))
    row = cls.merge([cls(turbo()), cache]).extract(1)
    assert {x.dtype for x in row.keys_and_values()} == {dtype}


def test_what_is_merged_stays_as_it_is(cls, draw):
    tokens = [draw(5), draw(3)]
    caches = [
        alone(turbo(f"turbo:k8v3{option}"), t, cls) for t in tokens for option in ("", "+start9")
    ]
    for pair in (caches[::2], caches[1::2]):
        batch = cls.merge(pair)
        rows = [Row(c.scheme, t, c.is_packed) for c, t in zip(pair, tokens, strict=True)]
        append(batch, rows, [draw(2), draw(4)])
        batch.trim(3)
        for cache, t in zip(pair, tokens, strict=True):
            assert_bytes(cache, t)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_batch_and_its_deep_copy_share_nothing(cls, draw, writer):
    rows = [Row(turbo(), draw(0), packed=False) for _ in range(2)]
    batch = cls.merge([cls(turbo()) for _ in rows])
    append(batch, rows, [draw(5), draw(3)])
    twins = [(batch, rows), (copy.deepcopy(batch), [row.copy() for row in rows])]
    append(*twins[writer], [draw(1), draw(1)])
    twins[writer][0].trim(2)
    for row in twins[writer][1]:
        row.trim(2)
    append(*twins[1 - writer], [draw(2), draw(1)])
    for twin in twins:
        assert_holds(*twin)


# --- refusals


def test_a_batch_has_one_scheme_and_one_class(draw):
    caches = [alone(turbo(), draw(2)), alone(turbo("turbo:k8v4"), draw(2)), host.KVCache()]
    for other in caches[1:]:
        with pytest.raises(ValueError, match=r"got PackedKVCache \(turbo:k8v3\) and"):
            PackedKVCache.merge([caches[0], other])
    one, two = (PackedKVCache.merge([cache]) for cache in caches[:2])
    with pytest.raises(ValueError, match=r"\(turbo:k8v3\) and PackedKVCache \(turbo:k8v4\)"):
        one.extend(two)


def test_pads_where_no_pads_can_be_are_refused(cls, draw):
    batch = cls.merge([alone(turbo(), draw(3), cls), cls(turbo())])
    with pytest.raises(ValueError, match="only an empty batch"):
        batch.prepare(left_padding=[0, 1])
    with pytest.raises(ValueError, match="needs lengths"):
        batch.prepare(right_padding=[0, 1])


def test_a_token_after_a_padded_prompt_that_was_not_finalized_is_refused(cls):
    batch = cls.merge([cls(turbo()) for _ in range(2)])
    batch.prepare(lengths=[2, 1], right_padding=[0, 1])
    x = mx.zeros((2, H, 2, D))
    batch.update_and_fetch(x, x)
    with pytest.raises(RuntimeError, match="finalize"):
        batch.update_and_fetch(x[:, :, :1], x[:, :, :1])


def test_a_batch_refuses_what_cannot_be_stored_before_it_takes_anything(cls):
    batch = cls.merge([cls(turbo())])
    with pytest.raises(UnsupportedModel, match="the model has 80"):
        batch.update_and_fetch(mx.zeros((1, H, 2, 80)), mx.zeros((1, H, 2, 80)))
    assert batch.empty()


def test_only_the_deferred_class_hands_out_windows_and_only_where_all_rows_are_packed(draw):
    with deferred.installed():
        for cls, kind in ((PackedKVCache, mx.array), (DeferredKVCache, attention.PackedWindow)):
            x = mx.zeros((2, H, 1, D))
            packed = cls.merge([alone(turbo(), draw(n), cls) for n in (3, 1)])
            assert isinstance(packed.update_and_fetch(x, x)[0], kind)
            assert hasattr(packed, "bits") == (cls is DeferredKVCache)
            mixed = cls.merge([alone(turbo(), draw(3), cls), cls(turbo())])
            assert isinstance(mixed.update_and_fetch(x, x)[0], mx.array)
            assert isinstance(mixed.update_and_fetch(x, x)[0], kind)
