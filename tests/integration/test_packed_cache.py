"""The semantics of one packed layer, sentence by sentence, without a model."""

import copy
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstow import Scheme, SchemeError, UnsupportedModel
from kvstow.codec import reference as codec
from kvstow.scheme import KEY_BITS

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
attention = pytest.importorskip("kvstow.attention.mlx")

pytestmark = pytest.mark.mlx
PackedKVCache, DeferredKVCache = integration.PackedKVCache, integration.DeferredKVCache
H, D = 2, 64


@pytest.fixture(params=["eager", "deferred"])
def cls(request):
    """One of the two classes, while mlx-lm's attention would take its windows."""
    with deferred.installed():
        yield {"eager": PackedKVCache, "deferred": DeferredKVCache}[request.param]


@pytest.fixture
def draw(rng):
    """Draws random keys and values ``(b, H, n_tokens, D)`` of float32."""

    def tokens(n_tokens, b=1):
        return SimpleNamespace(
            k=rng.standard_normal((b, H, n_tokens, D)).astype(np.float32),
            v=rng.standard_normal((b, H, n_tokens, D)).astype(np.float32),
        )

    return tokens


def turbo(text="turbo:k8v3"):
    return Scheme.parse(text)


def join(*pieces):
    return SimpleNamespace(
        k=np.concatenate([p.k for p in pieces], axis=2),
        v=np.concatenate([p.v for p in pieces], axis=2),
    )


def cut(tokens, start, end):
    return SimpleNamespace(k=tokens.k[:, :, start:end], v=tokens.v[:, :, start:end])


def encode(tokens, scheme):
    """The five planes of the definition."""
    return (
        *codec.encode_keys(tokens.k, bits=scheme.key_bits, guard=True, search=scheme.search),
        *codec.encode_values(tokens.v, bits=scheme.value_bits, guard=True, search=scheme.search),
    )


def decode(tokens, scheme):
    """What is left of `tokens` after storing them."""
    planes = encode(tokens, scheme)
    return SimpleNamespace(
        k=codec.decode_keys(codec.PackedKeys(*planes[:3]), bits=scheme.key_bits),
        v=codec.decode_values(
            codec.PackedValues(*planes[3:]), bits=scheme.value_bits, head_dim=tokens.v.shape[-1]
        ),
    )


def append(cache, tokens):
    """What the append attends to, as numpy, whichever way the cache fetches."""
    k, v = cache.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
    if isinstance(k, attention.PackedWindow):
        assert k is v
        k, v = attention.decode_window(k, mx.float32, rotated=False)
    return SimpleNamespace(k=np.array(k), v=np.array(v))


def filled(cls, *pieces, scheme="turbo:k8v3"):
    cache = cls(turbo(scheme))
    for piece in pieces:
        append(cache, piece)
    return cache


def assert_same(got, wanted):
    """Bit for bit."""
    for a, b in ((got.k, wanted.k), (got.v, wanted.v)):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_stores(cache, tokens):
    """The cache holds the bytes that the definition makes of `tokens`."""
    assert cache.is_packed
    keys, values = cache.packed()
    for got, wanted in zip((*keys, *values), encode(tokens, cache.scheme), strict=True):
        got = np.array(got)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes()


# --- what an append attends to


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


# --- +start<N>


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


def test_a_row_that_packs_frees_its_plain_arrays(cls, draw):
    cache = filled(cls, draw(4), scheme="turbo:k8v3+start7")
    plain_bytes = cache.nbytes
    append(cache, draw(4))
    assert cache.nbytes == cache.scheme.bytes_per_token(D) * H * 256
    assert plain_bytes == 2 * 4 * D * H * 256


# --- +search


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


# --- schedules


SCHEMES = [
    "turbo:k8v3",
    "turbo:k2v2",
    "turbo:k5v5+stored",
    "turbo:k4v8+start9",
    "turbo:k8v4+start9+stored",
    "turbo:k8v3+search",
    "turbo:k4v8+search+start9",
]


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from(SCHEMES),
    in_windows=st.booleans(),
    lengths=st.lists(st.integers(1, 12) | st.sampled_from([250, 256, 300]), min_size=1, max_size=6),
    b=st.integers(1, 2),
)
def test_appending_in_pieces_stores_the_same_bytes_as_at_once(text, in_windows, lengths, b):
    rng, n_tokens = np.random.default_rng(sum(lengths)), sum(lengths)
    k, v = rng.standard_normal((2, b, H, n_tokens, D)).astype(np.float32)
    tokens = SimpleNamespace(k=k, v=v)
    cache, start = (DeferredKVCache if in_windows else PackedKVCache)(turbo(text)), 0
    for length in lengths:
        append(cache, cut(tokens, start, start + length))
        start += length
    if n_tokens >= (cache.scheme.start_tokens or 1):
        assert_stores(cache, tokens)
    else:
        assert not cache.is_packed
    assert (cache.offset, cache.size(), cache.empty()) == (n_tokens, n_tokens, False)


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


# --- trim


def test_a_trim_leaves_the_row_packed(cls, draw):
    first, second = draw(20), draw(3)
    cache = filled(cls, first, scheme="turbo:k8v3+start7")
    assert cache.trim(15) == 15
    assert (cache.is_packed, cache.offset) == (True, 5)
    kept = cut(first, 0, 5)
    assert_same(append(cache, second), decode(join(kept, second), cache.scheme))
    assert_stores(cache, join(kept, second))


def test_a_row_trimmed_to_nothing_is_fresh(cls, draw):
    cache = filled(cls, draw(20))
    assert cache.trim(99) == 20
    assert (cache.is_packed, cache.offset, cache.size(), cache.empty()) == (False, 0, 0, True)
    assert cache.trim(1) == 0
    tokens = draw(4)
    assert_same(append(cache, tokens), tokens)
    assert_stores(cache, tokens)


def test_a_row_trimmed_to_nothing_waits_for_n_tokens_again(cls, draw):
    cache = filled(cls, draw(20), scheme="turbo:k8v3+start7")
    cache.trim(20)
    first, second = draw(6), draw(1)
    assert_same(append(cache, first), first)
    assert not cache.is_packed
    assert_same(append(cache, second), join(first, second))
    assert_stores(cache, join(first, second))


def test_a_plain_row_can_be_trimmed(cls, draw):
    first, second = draw(5), draw(6)
    cache = filled(cls, first, scheme="turbo:k8v3+start7")
    assert cache.trim(3) == 3
    assert (cache.is_packed, cache.offset) == (False, 2)
    both = join(cut(first, 0, 2), second)
    assert_same(append(cache, second), both)
    assert_stores(cache, both)


def test_a_speculative_step_equals_the_sequential_one(cls, draw):
    """Five tokens drafted at once, two of them kept, is an append of those two alone."""
    first, drafted, following = draw(9), draw(5), draw(1)
    speculative, sequential = filled(cls, first), filled(cls, first)
    window = append(speculative, drafted)
    speculative.trim(3)
    for i in range(2):
        seen = append(sequential, cut(drafted, i, i + 1))
        assert_same(cut(window, 0, 10 + i), seen)
    assert_same(append(speculative, following), append(sequential, following))


def test_every_cache_can_be_trimmed_and_mlx_lm_agrees(cls, draw):
    cache = filled(cls, draw(5))
    assert cache.is_trimmable()
    assert host.can_trim_prompt_cache([cache])
    assert host.trim_prompt_cache([cache], 2) == 2
    assert cache.offset == 3


# --- state


KINDS = {
    "empty": ("turbo:k8v3", 0),
    "packed": ("turbo:k8v3", 5),
    "full": ("turbo:k4v2", 256),
    "plain": ("turbo:k8v3+start9", 5),
    "stored": ("turbo:k8v3+start3+stored", 5),
}


@pytest.fixture(params=KINDS)
def kept(request, cls, draw):
    """A cache of each kind, and the tokens it holds."""
    text, n_tokens = KINDS[request.param]
    cache, tokens = cls(turbo(text)), draw(n_tokens)
    if n_tokens:
        append(cache, tokens)
    return cache, tokens


def assert_twins(twin, cache):
    assert type(twin) is type(cache)
    assert (twin.scheme, twin.offset, twin.is_packed) == (
        cache.scheme,
        cache.offset,
        cache.is_packed,
    )
    if cache.offset:
        a, b = twin.keys_and_values(), cache.keys_and_values()
        got, wanted = (SimpleNamespace(k=np.array(k), v=np.array(v)) for k, v in (a, b))
        assert_same(got, wanted)


def assert_independent(one, other, draw):
    """Each continues from the common tokens as if the other did not exist."""
    before = None if other.empty() else [np.array(x) for x in other.keys_and_values()]
    one.trim(1)
    append(one, draw(2))
    if before is not None:
        for x, wanted in zip(other.keys_and_values(), before, strict=True):
            assert np.array(x).tobytes() == wanted.tobytes()
    else:
        assert other.empty()


def test_a_cache_from_the_state_of_another_continues_like_it(kept, draw):
    cache, _ = kept
    twin = type(cache).from_state(cache.state)
    assert_twins(twin, cache)
    following = draw(3)
    assert_same(append(twin, following), append(cache, following))
    assert_twins(twin, cache)


def test_the_state_can_be_set_on_a_cache_of_another_scheme(kept, draw):
    cache, _ = kept
    other = filled(type(cache), draw(4), scheme="turbo:k2v2")
    other.state = cache.state
    assert_twins(other, cache)


def test_a_cache_and_one_from_its_state_share_nothing(kept, draw):
    cache, _ = kept
    assert_independent(cache, type(cache).from_state(cache.state), draw)
    assert_independent(type(cache).from_state(cache.state), cache, draw)


def test_two_caches_from_one_state_share_nothing(kept, draw):
    state = kept[0].state
    one, other = (type(kept[0]).from_state(state) for _ in range(2))
    assert_independent(one, other, draw)


def test_a_cache_and_its_deep_copy_share_nothing(kept, draw):
    cache, _ = kept
    assert_twins(copy.deepcopy(cache), cache)
    assert_independent(cache, copy.deepcopy(cache), draw)
    assert_independent(copy.deepcopy(cache), cache, draw)


def test_a_state_that_was_taken_does_not_change_with_the_cache(kept, draw):
    cache, tokens = kept
    state = cache.state
    cache.trim(cache.offset)
    append(cache, draw(max(1, tokens.k.shape[2])))
    twin = type(cache).from_state(state)
    assert twin.offset == tokens.k.shape[2]
    if twin.is_packed:
        assert_stores(twin, tokens)
    elif twin.offset:
        k, v = twin.keys_and_values()
        assert_same(SimpleNamespace(k=np.array(k), v=np.array(v)), tokens)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_restored_cache_decodes_to_the_dtype_of_the_model(cls, draw, dtype):
    tokens = draw(4)
    cache = cls(turbo())
    cache.update_and_fetch(*(mx.array(x).astype(getattr(mx, dtype)) for x in (tokens.k, tokens.v)))
    twin = cls.from_state(cache.state)
    assert {x.dtype for x in twin.keys_and_values()} == {getattr(mx, dtype)}


def test_mlx_lm_can_write_every_kind_and_its_file_holds_the_whole_cache(
    kept, draw, tmp_path, monkeypatch
):
    cache, _ = kept
    path = str(tmp_path / "cache.safetensors")
    host.save_prompt_cache(path, [cache, host.KVCache()], {"model": "none"})
    # Its reader looks classes up in its own module, where ours are not.
    monkeypatch.setattr(host, type(cache).__name__, type(cache), raising=False)
    (twin, plain), metadata = host.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "none"}
    assert plain.empty()
    assert_twins(twin, cache)
    following = draw(3)
    assert_same(append(twin, following), append(cache, following))


@pytest.mark.parametrize("text", ["off", "affine:8"])
def test_a_state_of_another_kind_of_scheme_is_refused(cls, draw, text):
    arrays, *rest = filled(cls, draw(3)).state
    rest[2] = text
    with pytest.raises(SchemeError, match=f"needs a turbo scheme, got {text}"):
        cls.from_state((arrays, *rest))


# --- counts and masks


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k2v2", "turbo:k5v8"])
@pytest.mark.parametrize(
    ("n_tokens", "capacity"), [(1, 256), (256, 256), (257, 512)], ids=["1", "256", "257"]
)
def test_nbytes_is_the_schemes_bytes_per_token_times_the_capacity(
    cls, draw, text, n_tokens, capacity
):
    cache = cls(turbo(text))
    append(cache, draw(n_tokens, b=3))
    assert cache.capacity == capacity
    assert cache.nbytes == cache.scheme.bytes_per_token(D) * capacity * H * 3
    usage = integration.usage([cache])
    assert (usage.kv_bytes, usage.tokens, usage.capacity_tokens) == (
        cache.nbytes,
        n_tokens,
        capacity,
    )
    assert usage.kv_bytes_bf16 == 2 * 2 * D * capacity * H * 3


def test_an_empty_cache_holds_no_bytes(cls):
    cache = cls(turbo())
    assert (cache.offset, cache.size(), cache.empty(), cache.nbytes, cache.capacity) == (
        (0, 0, True, 0, 0)
    )


def test_a_cache_keeps_no_decoded_copy_of_its_tokens(cls, draw):
    cache = filled(cls, draw(256))
    mx.eval(cache.state[0])
    before, held = mx.get_active_memory(), cache.nbytes
    append(cache, draw(256))
    mx.eval(cache.state[0])
    grown = mx.get_active_memory() - before
    # Allocations are rounded up to pages; decoded float32 would be 5 times as much.
    assert cache.nbytes == 2 * held
    assert grown < 1.25 * held + 5 * 16384


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


# --- what mlx-lm must not find


def test_a_cache_has_no_length_and_nothing_that_mlx_lm_would_convert_by():
    for name in ("__len__", "__bool__", "to_quantized"):
        assert not hasattr(PackedKVCache, name)
        assert not hasattr(DeferredKVCache, name)
    assert PackedKVCache(turbo())


# --- degenerate input


def test_a_model_that_overflows_is_counted_in_usage(cls, draw):
    tokens = draw(6)
    tokens.k[0, 1, 2, 40] = np.inf
    tokens.v[0, 0, 3, 7] = np.nan
    cache = filled(cls, cut(tokens, 0, 3))
    append(cache, cut(tokens, 3, 6))
    # The key's group, and both groups of the value: the rotation mixes them.
    assert integration.usage([cache]).nonfinite_groups == 1 + 2
    cache.trim(3)
    assert integration.usage([cache]).nonfinite_groups == 1
    cache.trim(1)
    assert integration.usage([cache]).nonfinite_groups == 0


def test_an_overflow_stays_in_its_own_token(cls, draw):
    tokens = draw(6)
    tokens.k[0, 1, 2, 40] = np.inf
    tokens.v[0, 1, 2, 7] = -np.inf
    cache = filled(cls, tokens)
    k, v = (np.array(x) for x in cache.keys_and_values())
    lost = np.zeros((1, H, 6), bool)
    lost[0, 1, 2] = True
    for x in (k, v):
        assert (~np.isfinite(x).all(axis=-1) == lost).all()


def test_sane_tokens_are_not_counted(cls, draw):
    cache = filled(cls, draw(300))
    assert integration.usage([cache]).nonfinite_groups == 0


@pytest.mark.parametrize("element", [0.0, 1e-7, 1.0, -3.0, 60000.0])
def test_constant_keys_and_values_come_back_finite(cls, element):
    x = mx.full((1, H, 3, D), element)
    cache = cls(turbo("turbo:k8v8"))
    cache.update_and_fetch(x, x)
    k, v = (np.array(x) for x in cache.keys_and_values())
    # 8 bits and float16 scales; a rotated constant is one large element among small ones.
    np.testing.assert_allclose(k, element, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(v, element, rtol=0.4, atol=1e-9)


def test_float16_tokens_are_clamped_to_float16(cls, rng):
    k = np.where(rng.random((1, H, 8, D)) < 0.5, -65504, 65504).astype(np.float16)
    cache = cls(turbo("turbo:k8v8"))
    cache.update_and_fetch(mx.array(k), mx.array(k))
    assert np.abs(decode(SimpleNamespace(k=k, v=k), cache.scheme).k).max() > 65504
    decoded_k, decoded_v = cache.keys_and_values()
    assert decoded_k.dtype == mx.float16
    assert mx.abs(decoded_k).max().item() == 65504
    assert mx.isfinite(decoded_v).all().item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_tokens_are_widened_before_they_are_encoded(cls, draw, dtype):
    tokens = draw(7)
    k, v = (mx.array(x).astype(getattr(mx, dtype)) for x in (tokens.k, tokens.v))
    cache = cls(turbo())
    exact = cache.update_and_fetch(k, v)
    assert {x.dtype for x in exact} == {k.dtype}
    widened = SimpleNamespace(k=np.array(k.astype(mx.float32)), v=np.array(v.astype(mx.float32)))
    assert_stores(cache, widened)


# --- the backstop


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+start9"])
@pytest.mark.parametrize("head_dim", [32, 80, 96, 1024])
def test_a_head_dim_that_cannot_be_rotated_is_refused(cls, scheme, head_dim):
    cache, x = cls(turbo(scheme)), mx.zeros((1, H, 3, head_dim))
    with pytest.raises(UnsupportedModel, match=f"the model has {head_dim}"):
        cache.update_and_fetch(x, x)
    assert cache.empty()


def test_keys_and_values_of_different_widths_are_refused(cls):
    cache = cls(turbo())
    with pytest.raises(UnsupportedModel, match=r"128.*64"):
        cache.update_and_fetch(mx.zeros((1, H, 3, 128)), mx.zeros((1, H, 3, 64)))
    assert cache.empty()


# --- any sequence


class AnySequence(RuleBasedStateMachine):
    """Caches under random operations, against the float tokens that each one holds."""

    @initialize(
        text=st.sampled_from(
            ["turbo:k8v3", "turbo:k4v2+start7", "turbo:k2v8+start3+stored", "turbo+search"]
        ),
        in_windows=st.booleans(),
    )
    def begin(self, text, in_windows):
        self.owner = deferred.Owner()
        deferred.install(self.owner)
        self.rng = np.random.default_rng(0)
        self.scheme = turbo(text)
        cls = DeferredKVCache if in_windows else PackedKVCache
        # Each entry: a cache, its tokens, whether it is packed.
        self.family = [[cls(self.scheme), self.random(0), False]]

    def random(self, n_tokens):
        k, v = self.rng.standard_normal((2, 1, H, n_tokens, D)).astype(np.float32)
        return SimpleNamespace(k=k, v=v)

    def pick(self, choice):
        return self.family[choice % len(self.family)]

    def teardown(self):
        deferred.remove(self.owner)

    @rule(choice=st.integers(0, 9), n=st.integers(1, 9) | st.sampled_from([250, 300]))
    def append(self, choice, n):
        entry = self.pick(choice)
        cache, held, packed = entry
        new = self.random(n)
        tokens = join(held, new)
        got = append(cache, new)
        packs = tokens.k.shape[2] >= (self.scheme.start_tokens or 1)
        if packed or (packs and self.scheme.stored):
            assert_same(got, decode(tokens, self.scheme))
        else:
            assert_same(got, tokens)
        entry[1:] = tokens, packed or packs

    @rule(choice=st.integers(0, 9), n=st.integers(0, 9) | st.just(1000))
    def trim(self, choice, n):
        entry = self.pick(choice)
        cache, held, packed = entry
        left = max(held.k.shape[2] - n, 0)
        assert cache.trim(n) == held.k.shape[2] - left
        entry[1:] = cut(held, 0, left), packed and left > 0

    @precondition(lambda self: len(self.family) < 4)
    @rule(choice=st.integers(0, 9))
    def deepcopy(self, choice):
        cache, held, packed = self.pick(choice)
        self.family.append([copy.deepcopy(cache), held, packed])

    @precondition(lambda self: len(self.family) < 4)
    @rule(choice=st.integers(0, 9))
    def from_state(self, choice):
        cache, held, packed = self.pick(choice)
        self.family.append([type(cache).from_state(cache.state), held, packed])

    @invariant()
    def every_cache_holds_its_own_tokens(self):
        for cache, held, packed in getattr(self, "family", []):
            n_tokens = held.k.shape[2]
            assert (cache.offset, cache.size(), cache.empty(), cache.is_packed) == (
                (n_tokens, n_tokens, n_tokens == 0, packed)
            )
            if packed:
                assert_stores(cache, held)
            elif n_tokens:
                k, v = cache.keys_and_values()
                assert_same(SimpleNamespace(k=np.array(k), v=np.array(v)), held)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
