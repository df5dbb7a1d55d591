"""What is held is what `kvstow.usage` says of the same caches, at the same moment."""

import gc
import random
import threading
import weakref
from contextlib import contextmanager

import mlx.core as mx
import mlx_lm.server as host
import pytest
from mlx_lm.generate import BatchGenerator

import kvstow
from kvstow.integrations.mlx_lm import PackedKVCache
from kvstow.integrations.mlx_lm.prompt_cache import TieredPromptCache
from kvstow.serve import watch as watches
from kvstow.serve.stats import Held, Work
from kvstow.serve.tally import Tally
from kvstow.serve.watch import Watch
from tests.serve.conftest import ALONE, ENDLESS, serving, until

pytestmark = pytest.mark.mlx


def usage_of(*prompt_caches):
    found = [kvstow.usage(cache) for cache in prompt_caches]
    return sum(u.kv_bytes for u in found), sum(u.kv_bytes_bf16 for u in found)


def bytes_of(held):
    return held.kv_bytes, held.kv_bytes_bf16


class Looks:
    """Every look of a watch, beside `kvstow.usage` of the same caches, in the same thread."""

    def __init__(self, watch):
        self.pairs, self.works, self.threads = [], [], set()
        self._watch, self._look = watch, watch.look
        watch.look = self

    def __call__(self, **_):
        watch = self._watch
        watch._next_look = 0
        self._look()
        memory = watch.seen.memory
        if memory.in_flight.sequences:
            self.pairs.append((bytes_of(memory.in_flight), usage_of(*self._caches())))
            self.works.append(watch.seen.work)
            self.threads.add(threading.get_ident())

    def _caches(self):
        if self._watch._alone is not None:
            yield self._watch._alone[0]
        if (batch := self._watch._batch()) is not None:
            yield from (sequence[3] for sequence in batch._unprocessed_sequences)
            yield batch._prompt_batch.prompt_cache
            yield batch._generation_batch.prompt_cache


@contextmanager
def streaming(server, **ask):
    """A request that is being answered for the length of the block."""
    body = {"prompt": "abc", "max_tokens": 15_000, "stream": True, "logit_bias": ENDLESS} | ask
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # which closes the response when it goes
        next(line for line in lines if line.startswith("data:"))
        yield
    until(server.is_idle)


def held(server):
    return server.engine.watch.seen.memory


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v3+start100", "affine:8", "off"])
@pytest.mark.parametrize("ask", [{}, ALONE], ids=["batch", "alone"])
def test_what_is_in_flight_is_what_usage_says_at_every_step(tiny, scheme, ask):
    with serving(tiny, scheme, context=20_000, prefill_step_size=16) as it:
        looks = Looks(it.engine.watch)
        asks = [
            {"prompt": "x" * n, "max_tokens": 40, "logit_bias": ENDLESS} | ask for n in (5, 60, 300)
        ]
        threads = [
            threading.Thread(target=it.post, args=("/v1/completions",), kwargs=a) for a in asks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(it.is_idle)
        is_batch = not ask and scheme != "affine:8"
        assert len(looks.pairs) > 40
        assert [pair for pair in looks.pairs if pair[0] != pair[1]] == []
        assert any(w.decoding > 1 for w in looks.works) == is_batch
        assert any(w.reading_prompts for w in looks.works) == is_batch
        assert any(w.alone for w in looks.works) != is_batch
        assert looks.threads == {it.engine._generation_thread.ident}


def test_caches_of_a_draft_model_count_too(tiny, load_tiny):
    with serving(tiny, context=20_000, draft=load_tiny(seed=1)[0]) as it:
        looks = Looks(it.engine.watch)
        it.post("/v1/completions", prompt="x" * 60, max_tokens=40, logit_bias=ENDLESS)
        assert len(looks.pairs) > 5
        assert [pair for pair in looks.pairs if pair[0] != pair[1]] == []
        of_both = max(pair[0][0] for pair in looks.pairs)
    with serving(tiny, context=20_000) as it:
        looks = Looks(it.engine.watch)
        it.post("/v1/completions", prompt="x" * 60, max_tokens=40, logit_bias=ENDLESS, **ALONE)
        assert of_both == 2 * max(pair[0][0] for pair in looks.pairs)


@pytest.mark.parametrize(
    ("ask", "work"),
    [({}, Work(reading_prompts=1)), (ALONE, Work(alone=1))],
    ids=["batch", "alone"],
)
def test_a_prompt_is_seen_to_be_read_before_a_step_that_may_take_minutes(
    tiny, monkeypatch, ask, work
):
    monkeypatch.setattr(watches, "LEAST_S", 1000)
    monkeypatch.setattr(watches, "COST_SHARE", 0)  # however long the look before took
    with serving(tiny) as it:
        until(lambda: it.engine.watch.seen.at is not None)
        model, seen = it.engine.model_provider.model, []
        forward = type(model).__call__

        def call(*args, **options):
            seen.append(it.engine.watch.seen.work)
            return forward(*args, **options)

        monkeypatch.setattr(type(model), "__call__", call)
        it.post("/v1/completions", prompt="x" * 60, max_tokens=2, **ask)
        assert seen[0] == work


def test_packed_caches_are_smaller_than_bf16_by_what_the_scheme_says(tiny):
    with serving(tiny, "turbo:k8v3", context=20_000) as it, streaming(it):
        until(lambda: held(it).in_flight.tokens > 10)
        assert held(it).in_flight.compression_ratio == pytest.approx(16 / 6.25)
        assert it.engine.watch.seen.work == Work(decoding=1)


def test_without_a_scheme_nothing_is_claimed(tiny):
    with serving(tiny, "off", context=20_000) as it, streaming(it):
        until(lambda: held(it).in_flight.tokens > 10)
        assert held(it).in_flight.compression_ratio == 0.5  # float32


@pytest.mark.parametrize("ask", [{}, ALONE], ids=["batch", "alone"])
def test_tokens_held_grow_with_the_answer(tiny, ask):
    with serving(tiny, context=20_000) as it, streaming(it, **ask):
        until(lambda: held(it).in_flight.sequences == 1)
        first = held(it).in_flight.tokens
        until(lambda: held(it).in_flight.tokens > first + 20)


@pytest.mark.parametrize("ask", [{}, ALONE], ids=["batch", "alone"])
def test_a_kept_prompt_counts_once_and_memory_returns_to_nothing(tiny, ask):
    with serving(tiny, context=256) as it:
        for n in (3, 30, 30):
            it.post("/v1/completions", prompt="y" * n, max_tokens=5, **ask)
        kept = it.engine.prompt_cache
        memory = it.settled()
        assert memory.prefixes.sequences == len(kept)
        entries = [kept._trie.get(*key) for lru in kept._lru._lrus.values() for key in lru]
        assert bytes_of(memory.prefixes) == usage_of(*(e.prompt_cache for e in entries))
        assert memory.prefixes.kv_bytes == kept.nbytes > 0
        assert memory.in_flight == Held()
        before = it.engine.watch.seen.evictions
        n = len(kept)
        kept.trim_to(n_sequences=0)
        assert it.settled().prefixes == Held()
        assert it.engine.watch.seen.evictions - before == n


def test_caches_end_with_the_engine_that_made_them(tiny):
    """mlx aborts the program if the last arrays of a thread's stream outlive it."""
    with serving(tiny) as it:
        it.post("/v1/completions", prompt="abc")
        it.settled()
        kept = it.engine.prompt_cache
        entry = weakref.ref(kept._trie.get(*kept._lru._lrus["assistant"][0]))
        del kept
    gc.collect()
    assert it.engine.watch.seen.at is not None
    assert entry() is None


def test_the_ledger_is_the_sum_of_the_entries_whatever_happens():
    kept = TieredPromptCache(max_size=4)
    watch = Watch(Tally(), kept)
    draw = random.Random(1)
    sizes = {}
    for _ in range(200):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 6))]
        if draw.random() < 0.1:
            kept.trim_to(n_sequences=draw.randrange(3))
        cache = [PackedKVCache(kvstow.Scheme.parse("turbo"))]
        x = mx.zeros((1, 1, draw.choice((len(tokens), 300)), 64))
        cache[0].update_and_fetch(x, x)
        kept.insert_cache("m", tokens, cache)
        keys = [key for lru in kept._lru._lrus.values() for key in lru]
        entries = [(kept._trie.get(*key).prompt_cache, len(key[1])) for key in keys]
        whole = watch._ledger.held
        assert bytes_of(whole) == usage_of(*(cache for cache, _ in entries))
        assert (whole.sequences, whole.tokens) == (len(keys), sum(n for _, n in entries))
        sizes[len(keys)] = True
    assert watch._ledger.evictions > 0
    assert len(sizes) > 1


def test_numbers_that_are_not_finite_are_counted_while_they_are_kept():
    kept = TieredPromptCache()
    watch = Watch(Tally(), kept)
    cache = [PackedKVCache(kvstow.Scheme.parse("turbo"))]
    x = mx.full((1, 1, 4, 64), mx.inf)
    cache[0].update_and_fetch(x, x)
    kept.insert_cache("m", [1, 2, 3, 4], cache)
    watch.look()
    assert watch.seen.memory.nonfinite_groups == kvstow.usage(cache).nonfinite_groups > 0
    kept.trim_to(n_sequences=0)
    watch._next_look = 0
    watch.look()
    assert watch.seen.memory.nonfinite_groups == 0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("soon", [False, True])
def test_looks_take_a_hundredth_of_the_time_at_most(monkeypatch, soon):
    clock, n_looks = Clock(), []
    watch = Watch(Tally(clock), TieredPromptCache())
    took = 0.01

    def measure():
        n_looks.append(1)
        return Held(), Work()

    monkeypatch.setattr(watch, "_in_flight", measure)
    times = iter(t for i in range(1000) for t in (i, i + took))
    monkeypatch.setattr(watches.time, "perf_counter", lambda: next(times))
    for _ in range(1000):
        clock.now += 0.01
        watch.look(soon=soon)
    assert len(n_looks) == pytest.approx(clock.now / (took * watches.COST_SHARE), abs=1)


def test_the_module_of_mlx_lm_stays_as_it_is(tiny):
    with serving(tiny) as it:
        it.post(messages=[{"role": "user", "content": "hello"}])
        assert it.engine.watch._batch().__class__ is not BatchGenerator
        assert host.BatchGenerator is BatchGenerator


@pytest.mark.parametrize(
    ("method", "name"), [("_generate", "BatchGenerator"), ("_serve_single", "stream_generate")]
)
def test_mlx_lm_looks_up_what_is_watched_by_name(method, name):
    code = getattr(host.ResponseGenerator, method).__code__
    assert name in code.co_names
    assert code.co_freevars == ()
