"""Bytes: what is reserved, what is allocated, and what waits for them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from mlx_lm.generate import BatchGenerator

import kvstow
from kvstow.integrations.mlx_lm import read_shape
from kvstow.serve.budget import Stored
from kvstow.serve.options import PrefixFiles
from tests.serve.conftest import ENDLESS, until

pytestmark = pytest.mark.mlx


def ask(it, n_prompt, n_new, **more):
    return it.client.completions.create(
        model="tiny", prompt=[65] * n_prompt, max_tokens=n_new, logit_bias=ENDLESS, **more
    )


def bytes_of(pair, n_tokens):
    """What a request of so many tokens reserves under the default scheme."""
    return Stored(read_shape(pair[0]), kvstow.Scheme.parse("turbo:k8v3")).cache_bytes(n_tokens)


@pytest.mark.parametrize("scheme", ["off", "turbo:k8v3", "turbo:k4v3+start280"])
def test_a_batch_never_allocates_more_than_its_requests_reserve(serve, tiny, monkeypatch, scheme):
    seen = []
    step = BatchGenerator.next
    with serve(tiny, scheme, context=4000) as it:

        def watched(self):
            found = step(self)
            seen.append((self.prompt_cache_nbytes, it.gateway.reserved_bytes, it.gateway.n_running))
            return found

        monkeypatch.setattr(BatchGenerator, "next", watched)
        with ThreadPoolExecutor(5) as pool:
            lengths = [(10, 100), (600, 9), (250, 20), (1, 300), (270, 5)]
            list(pool.map(lambda n: ask(it, *n), lengths))
    assert max(n for _, _, n in seen) > 2
    assert [x for x in seen if x[0] > x[1]] == []
    assert max(allocated for allocated, _, _ in seen) > 0


def test_running_requests_and_what_is_kept_stay_within_the_budget(serve, tiny, monkeypatch):
    seen = []
    step = BatchGenerator.next
    one = bytes_of(tiny, 512)
    with serve(tiny, context=4000, kv_budget_bytes=3 * one) as it:

        def watched(self):
            found = step(self)
            seen.append((self.prompt_cache_nbytes, it.engine.prompt_cache.nbytes))
            return found

        monkeypatch.setattr(BatchGenerator, "next", watched)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda n: ask(it, 200 + n, 30), range(6)))
        until(lambda: it.gateway.n_running == 0)  # the last answer comes a moment before
        assert it.engine.prompt_cache.nbytes <= 3 * one
    assert max(active + kept for active, kept in seen) <= 3 * one
    assert max(kept for _, kept in seen) > 0


def test_a_request_waits_for_memory_and_then_runs(serve, tiny):
    one = bytes_of(tiny, 512)
    with serve(tiny, context=4000, kv_budget_bytes=one, max_queue=1) as it:
        stream = ask(it, 10, 400, stream=True)
        next(iter(stream))
        waiting = threading.Thread(target=ask, args=(it, 10, 2))
        waiting.start()
        until(lambda: it.gateway.n_waiting == 1)
        with pytest.raises(openai.RateLimitError) as full:
            ask(it, 10, 2)
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1
        stream.close()  # the client goes, and the room is free
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_client_that_goes_while_it_waits_is_forgotten(serve, tiny):
    one = bytes_of(tiny, 512)
    with serve(tiny, context=4000, kv_budget_bytes=one) as it:
        stream = ask(it, 10, 400, stream=True)
        next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            ask(it, 10, 2, timeout=0.3)
        until(lambda: it.gateway.n_waiting == 0)
        stream.close()


def test_what_never_fits_in_the_budget_is_refused(serve, tiny):
    one = bytes_of(tiny, 256)
    with serve(tiny, context=4000, kv_budget_bytes=one) as it:
        with pytest.raises(openai.BadRequestError, match="--kv-budget allows") as refused:
            ask(it, 200, 58)
        assert refused.value.code == "kv_budget_exceeded"
        assert ask(it, 200, 57).usage.completion_tokens == 57


def test_a_packed_cache_of_a_served_request_is_smaller(serve, tiny):
    kept = {}
    for scheme in ("off", "turbo:k8v3"):
        with serve(tiny, scheme, context=4000) as it:
            ask(it, 500, 4)
            it.settled()
            kept[scheme] = it.engine.prompt_cache.nbytes
    assert kept["off"] > 4 * kept["turbo:k8v3"] > 0  # float32: 32 bits to 6.25


def test_a_restarted_server_finds_its_prompts_in_files(serve, tiny, tmp_path):
    files = PrefixFiles(tmp_path / "prefixes", 10**9)
    for cached in (0, 299):
        with serve(tiny, context=4000, prefix_files=files) as it:
            usage = ask(it, 300, 4).usage
            assert usage.prompt_tokens_details.cached_tokens == cached
    assert list(files.directory.rglob("*.safetensors"))
