"""mlx-lm's own prefix cache, `LRUPromptCache`, over packed caches: what it copies and continues.

It hands out a deep copy of what it keeps, trimmed to what the prompts share, so a hit must not
copy the prefix, and must continue like a run that had a boundary where the hit ends.
"""

import copy
import gc

import numpy as np
import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
generation = pytest.importorskip("mlx_lm.generate")
packed_cache = pytest.importorskip("kvstow.integrations.mlx_lm").PackedKVCache
tiny = pytest.importorskip("tests.integration.tiny")

pytestmark = pytest.mark.mlx
build, tokens = tiny.build, tiny.tokens
FETCHES = ("eager", "deferred")
TEXT = tokens(400)
# Bookkeeping arrays and rounded allocations; the planes are a thousand times this.
SMALL_BYTES = 4096


def append(model, cache, start, end):
    """Logits of tokens `start` to `end` of the text, appended at once."""
    logits = model(TEXT[:, start:end], cache=cache)
    mx.eval(logits, [c.state for c in cache])
    return np.array(logits)


def filled(model, *lengths):
    """A prompt cache after appends of so many tokens."""
    cache, at = host.make_prompt_cache(model), 0
    for n in lengths:
        append(model, cache, at, at + n)
        at += n
    return cache


def planes(cache):
    """The bytes of every layer's tokens."""
    return [np.array(plane) for c in cache for pair in c.packed() for plane in pair]


def assert_same_bytes(one, other):
    assert [c.offset for c in one] == [c.offset for c in other]
    for a, b in zip(planes(one), planes(other), strict=True):
        np.testing.assert_array_equal(a, b)


def list_of(start, end):
    return TEXT[0, start:end].tolist()


@pytest.fixture(params=FETCHES)
def model(request):
    model = build("llama")
    mx.eval(model.parameters())
    kvstow.attach(model, "turbo:k8v3", fetch=request.param)
    yield model
    kvstow.detach(model)


# --- what is copied


class Meter:
    """Bytes that a block leaves allocated, and the most that it had at once.

    mlx may give out a larger buffer that was freed before, so it may keep none meanwhile.
    """

    def __enter__(self):
        gc.collect()
        self._limit = mx.set_cache_limit(0)
        mx.clear_cache()
        mx.reset_peak_memory()
        self._before = mx.get_active_memory()
        return self

    def __exit__(self, *_):
        self.kept = mx.get_active_memory() - self._before
        self.peak = mx.get_peak_memory() - self._before
        mx.set_cache_limit(self._limit)


ONE_TOKEN_BYTES = 8 * 128 * 4 * 64  # what encoding one token may take beside the planes


def long_entry():
    """One layer that holds 4100 tokens in planes of 4352, far above all bookkeeping."""
    cache = packed_cache(kvstow.Scheme.parse("turbo:k8v3"))
    write(cache, 4100)
    assert cache.nbytes > 3 * ONE_TOKEN_BYTES
    return cache


def write(cache, n_tokens):
    """Append without attending to anything, so that only the store allocates."""
    x = mx.full((1, 8, n_tokens, 128), 0.5)
    cache._take(x, x) if not cache.is_packed else cache._append(x, x)
    del x
    mx.eval(cache.state)


def test_a_deep_copy_copies_nothing():
    entry = long_entry()
    with Meter() as meter:
        twins = [copy.deepcopy(entry) for _ in range(100)]
        mx.eval([t.state for t in twins])
    assert meter.peak < SMALL_BYTES


@pytest.mark.parametrize("trimmed", [0, 700])
def test_the_first_append_to_a_deep_copy_copies_the_planes_once_and_the_next_nothing(trimmed):
    entry = long_entry()
    write(copy.deepcopy(entry), 1)  # constants of the encoder are made once
    twin = copy.deepcopy(entry)
    twin.trim(trimmed)
    with Meter() as first:
        write(twin, 1)
    assert entry.nbytes <= first.kept < entry.nbytes + SMALL_BYTES
    assert first.peak < entry.nbytes + ONE_TOKEN_BYTES
    with Meter() as following:
        for _ in range(5):
            write(twin, 1)
    assert following.kept < SMALL_BYTES
    assert following.peak < ONE_TOKEN_BYTES
    assert (entry.offset, twin.offset) == (4100, 4106 - trimmed)


def test_a_deep_copy_that_outlives_its_original_is_written_in_place():
    entry = long_entry()
    write(copy.deepcopy(entry), 1)
    twin = copy.deepcopy(entry)
    del entry
    with Meter() as meter:
        write(twin, 1)
    assert meter.kept < SMALL_BYTES
    assert meter.peak < ONE_TOKEN_BYTES


def test_a_hit_of_a_whole_model_copies_each_layer_once(model):
    kept = filled(model, 100)
    append(model, copy.deepcopy(kept), 100, 101)
    n_bytes = kvstow.usage(kept).kv_bytes
    with Meter() as meter:
        hit = copy.deepcopy(kept)
        append(model, hit, 100, 101)
        append(model, hit, 101, 102)
    assert n_bytes <= meter.kept < n_bytes + SMALL_BYTES


def test_every_hit_on_a_prefix_shares_its_planes_until_it_is_written_to(model):
    kept = filled(model, 100)
    prefixes = host.LRUPromptCache()
    prefixes.insert_cache("model", list_of(0, 100), kept)
    before = planes(kept)
    for _ in range(2):  # the entry is still whole after a hit went its own way
        hit, rest = prefixes.fetch_nearest_cache("model", list_of(0, 130))
        assert rest == list_of(100, 130)
        append(model, hit, 100, 130)
    for a, b in zip(planes(kept), before, strict=True):
        np.testing.assert_array_equal(a, b)


# --- how a hit goes on


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2+stored", "turbo:k8v3+start60"])
@pytest.mark.parametrize("fetch", FETCHES)
def test_a_hit_continues_byte_for_byte_like_an_uncached_run_with_a_boundary_there(fetch, scheme):
    model = build("llama")
    kvstow.attach(model, scheme, fetch=fetch)
    prefixes = host.LRUPromptCache()
    prefixes.insert_cache("model", list_of(0, 100), filled(model, 70, 30))
    for exact in (False, True):
        end = 100 if exact else 145
        hit, rest = prefixes.fetch_nearest_cache("model", list_of(0, end))
        assert rest == list_of(100, end)
        uncached = filled(model, 70, 30)
        for start, stop in ((100, 145), (145, 146), (146, 150)):
            got, wanted = (append(model, c, start, stop) for c in (hit, uncached))
            np.testing.assert_array_equal(got, wanted)
        assert_same_bytes(hit, uncached)
    kvstow.detach(model)


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2", "turbo:k8v3+stored"])
@pytest.mark.parametrize("fetch", FETCHES)
def test_a_hit_on_a_part_of_an_entry_continues_like_an_uncached_run_of_that_part(fetch, scheme):
    """The entry's prompt was read at once, longer than what is shared: it is trimmed."""
    model = build("llama")
    kvstow.attach(model, scheme, fetch=fetch)
    prefixes = host.LRUPromptCache()
    prefixes.insert_cache("model", list_of(0, 100), filled(model, 100))
    prompt = list_of(0, 64) + list_of(200, 230)
    hit, rest = prefixes.fetch_nearest_cache("model", prompt)
    assert ([c.offset for c in hit], rest) == ([64, 64], prompt[64:])
    uncached = filled(model, 64)
    for start, stop in ((200, 230), (230, 231), (231, 235)):
        got, wanted = (append(model, c, start, stop) for c in (hit, uncached))
        # Products of 100 rows and of 64 round differently, so a code or two may differ.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-3)
    kvstow.detach(model)


@pytest.mark.parametrize("fetch", FETCHES)
def test_greedy_text_is_the_same_on_a_hit_and_without_one(fetch):
    """As the server does it: fetch, generate, insert."""
    model, prefixes = build("llama", tie_word_embeddings=False), host.LRUPromptCache()
    kvstow.attach(model, "turbo:k8v3+stored", fetch=fetch)

    def answer(prompt):
        cache, rest = prefixes.fetch_nearest_cache("model", prompt)
        n_cached, cache = len(prompt) - len(rest), cache or host.make_prompt_cache(model)
        steps = generation.generate_step(
            mx.array(rest), model, prompt_cache=cache, max_tokens=12, prefill_step_size=32
        )
        reply = [int(token) for token, _ in steps]
        prefixes.insert_cache("model", prompt + reply, cache)
        return n_cached, reply

    system, turns = list_of(0, 50), [list_of(50 + 20 * i, 70 + 20 * i) for i in range(3)]
    on_hits = [answer(system + turn) for turn in turns]
    assert [n for n, _ in on_hits] == [0, 50, 50]
    for turn, (_, reply) in zip(turns, on_hits, strict=True):
        prefixes = host.LRUPromptCache()
        assert answer(system + turn) == (0, reply)
    assert len({tuple(reply) for _, reply in on_hits}) == 3
    kvstow.detach(model)


def test_the_prefix_cache_counts_the_bytes_of_packed_planes(model):
    prefixes = host.LRUPromptCache()
    cache = filled(model, 100)
    prefixes.insert_cache("model", list_of(0, 100), cache)
    assert prefixes.nbytes == kvstow.usage(cache).kv_bytes
    assert kvstow.usage(cache).compression_ratio == pytest.approx(2.56)
    prefixes.insert_cache("model", list_of(0, 120), filled(model, 120))
    assert len(prefixes) == 1  # the shorter one is a part of the longer
    prefixes.trim_to(n_bytes=0)
    assert (len(prefixes), prefixes.nbytes) == (0, 0)
