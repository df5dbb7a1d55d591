"""The statistics of a real server: what was done, counted once, and nothing else."""

import threading
from contextlib import suppress

import httpx
import pytest
from mlx_lm.generate import BatchGenerator
from prometheus_client.parser import text_string_to_metric_families

import kvstow
from kvstow.serve.answer import Answer
from kvstow.serve.options import PrefixFiles
from tests.serve.conftest import ALONE, CHAT, ENDLESS, HELLO, serving, until

pytestmark = pytest.mark.mlx


def stats(server):
    return server.http.get("/v1/kvstow/stats").json()


def outcomes(server):
    return {k: n for k, n in stats(server)["requests"]["outcomes"].items() if n}


def leave(server, **ask):
    """Ask for an endless answer, and go away in the middle of it."""
    body = {"prompt": "abc", "max_tokens": 15_000, "stream": True, "logit_bias": ENDLESS} | ask
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # which closes the response when it goes
        next(line for line in lines if line.startswith("data:"))
    until(server.is_idle)


@pytest.mark.parametrize("ask", [{}, ALONE], ids=["batch", "alone"])
def test_tokens_are_those_that_the_answers_say(tiny, ask):
    with serving(tiny, context=256, prefill_step_size=16) as it:
        used = [
            it.post("/v1/completions", prompt=prompt, max_tokens=n, **ask).json()["usage"]
            for prompt, n in (("a" * 50, 7), ("a" * 50 + "bc", 9), ("a" * 45 + "d", 1), ("q", 4))
        ]
        cached = [u["prompt_tokens_details"]["cached_tokens"] for u in used]
        found = stats(it)
        assert found["decode"]["tokens"] == sum(u["completion_tokens"] for u in used)
        assert found["prompt"]["tokens"] == sum(u["prompt_tokens"] for u in used) - sum(cached)
        assert found["prefixes"]["memory"] == {
            "requests": sum(c > 0 for c in cached),
            "tokens": sum(cached),
        }
        assert found["prefixes"]["missed_requests"] == sum(c == 0 for c in cached)
        assert sum(c > 0 for c in cached) >= 2
        assert 0 < found["decode"]["busy_s"] < found["uptime_s"]
        assert found["decode"]["per_s"] > 0


def test_tokens_of_a_speculative_answer_are_counted_too(tiny, load_tiny):
    with serving(tiny, context=256, draft=load_tiny(seed=1)[0]) as it:
        used = [
            it.post("/v1/completions", prompt="a" * n, max_tokens=9).json()["usage"]
            for n in (50, 60)
        ]
        found = stats(it)
        n_cached = used[1]["prompt_tokens_details"]["cached_tokens"]
        assert found["decode"]["tokens"] == sum(u["completion_tokens"] for u in used)
        assert found["prompt"]["tokens"] == sum(u["prompt_tokens"] for u in used) - n_cached
        assert found["prefixes"]["memory"]["tokens"] == n_cached > 40


def test_a_prefix_from_disk_counts_as_one_from_disk(tiny, tmp_path):
    files = PrefixFiles(tmp_path / "prefixes", 10**9)
    for n_found in (0, 1):
        with serving(tiny, context=4000, prefix_files=files) as it:
            it.post("/v1/completions", prompt=[65] * 300, max_tokens=4)
            found = stats(it)["prefixes"]
            assert found["disk"] == {"requests": n_found, "tokens": 299 * n_found}
            assert found["missed_requests"] == 1 - n_found
            assert found["memory"]["requests"] == found["disk_errors"] == 0
            if not n_found:
                until(lambda: stats(it)["prefixes"]["disk_writes"] > 0)
                assert stats(it)["prefixes"]["disk_written_bytes"] > 300 * 400


def test_every_request_ends_in_one_way_and_they_add_up(tiny):
    with serving(tiny, context=20_000, decode_concurrency=1, max_queue=0) as it:
        n = 0
        for stream in (False, True, False):
            assert it.post(messages=HELLO, stream=stream).status_code == 200
            until(it.is_idle)  # the next would be refused: none may wait here
            n += 1
        for ask in ({"max_tokens": 0}, {"max_tokens": 30_000}, {"model": "x"}, {"max_tokens": 0}):
            assert it.post(**{"messages": HELLO} | ask).status_code >= 400
            n += 1
        leave(it)
        leave(it, **ALONE)
        n += 2
        body = {"prompt": "abc", "max_tokens": 15_000, "stream": True, "logit_bias": ENDLESS}
        with it.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # which closes the response when it goes
            next(line for line in lines if line.startswith("data:"))
            assert it.post(messages=HELLO).status_code == 429
        until(it.is_idle)
        n += 2
        with pytest.raises(httpx.ReadTimeout):
            it.http.post("/v1/completions", json={**body, "stream": False}, timeout=0.3)
        n += 1
        until(lambda: outcomes(it).get("disconnected") == 4)
        found = stats(it)["requests"]
        assert found["refused"] == {
            "context_length_exceeded": 1,
            "invalid_value": 2,
            "model_not_found": 1,
            "queue_full": 1,
        }
        assert outcomes(it) == {"answered": 3, "disconnected": 4}
        assert sum(found["outcomes"].values()) + sum(found["refused"].values()) == n
        assert found["duration"]["count"] == 7
        assert 6 <= found["first_token"]["count"] <= 7  # one left before it, perhaps


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_has_timed_out(tiny, stream):
    with serving(tiny, context=20_000, request_timeout_s=0.3) as it:
        it.post(messages=HELLO, max_tokens=15_000, logit_bias=ENDLESS, stream=stream)
        assert outcomes(it) == {"timed_out": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_loses_has_failed(tiny, stream, monkeypatch):
    def broken(_):
        raise RuntimeError("out of memory")

    with serving(tiny) as it:
        monkeypatch.setattr(BatchGenerator, "next", broken)
        it.post(messages=HELLO, stream=stream)
        assert outcomes(it) == {"failed": 1}
        assert stats(it)["state"] == "unavailable"


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_in_making_an_answer_has_failed_and_is_said(tiny, stream, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    with serving(tiny) as it:
        monkeypatch.setattr(Answer, "feed", broken)
        said = []
        with (
            suppress(httpx.RemoteProtocolError),  # a stream is cut off behind it
            it.http.stream("POST", CHAT, json={"messages": HELLO, "stream": stream}) as response,
        ):
            said.extend(response.iter_text())
        assert '"code":"internal_error"' in said[-1].replace(": ", ":")
        assert outcomes(it) == {"failed": 1}
        until(it.is_idle)


def test_a_stranger_is_counted_and_shown_nothing_but_the_page(tiny):
    with serving(tiny, api_key="sesame") as it:
        for path in ("/", "/page/main.js", "/page/style.css"):
            assert it.http.get(path).status_code == 200
        for path in ("/v1/kvstow/stats", "/metrics", "/page/other"):
            assert it.http.get(path).status_code == 401
        key = {"authorization": "Bearer sesame"}
        found = it.http.get("/v1/kvstow/stats", headers=key).json()
        assert found["requests"]["refused"] == {"invalid_api_key": 3}
        assert it.http.get("/metrics", headers=key).status_code == 200


def test_who_waits_and_who_is_answered_is_seen(tiny):
    with serving(tiny, context=20_000, decode_concurrency=2) as it:
        body = {"prompt": "abc", "max_tokens": 15_000, "stream": True, "logit_bias": ENDLESS}
        gone = threading.Event()

        def ask():
            with it.http.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    if gone.is_set():
                        return

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        work = {"waiting": 1, "reading_prompts": 0, "decoding": 2, "alone": 0, "running": 2}
        until(lambda: stats(it)["work"] == work)
        budget = stats(it)["budget"]
        assert budget["total_bytes"] == it.gateway.budget_bytes
        assert budget["reserved_bytes"] == it.gateway.reserved_bytes > 0
        gone.set()
        for thread in threads:
            thread.join()
        until(lambda: not any(stats(it)["work"].values()))
        assert stats(it)["budget"]["reserved_bytes"] == 0


def test_a_model_that_loads_is_said_to_load(tiny, may_load):
    with serving(tiny, wait=False) as it:
        found = stats(it)
        assert (found["state"], found["layers"]["total"]) == ("loading", 0)
        assert found["measured_s_ago"] is None
        it.post(messages=HELLO)
        may_load.set()
        until(lambda: stats(it)["state"] == "ok")
        found = stats(it)
        assert found["requests"]["refused"] == {"model_loading": 1}
        assert found["layers"]["by_scheme"] == {"turbo:k8v3": found["layers"]["total"]}


def test_layers_are_what_attach_said(tiny):
    with serving(tiny, "affine:8") as it:
        report = it.engine.model_provider.report
        layers = stats(it)["layers"]
        assert layers["quantised"] == report.n_quantised == layers["total"]
        assert layers["by_path"] == {"host": layers["total"]}
        assert [x["scheme"] for x in layers["each"]] == [str(x.scheme) for x in report.layers]


def test_metrics_say_the_same_as_the_statistics(tiny):
    with serving(tiny, context=256) as it:
        for _ in range(2):
            it.post("/v1/completions", prompt="z" * 40, max_tokens=5)
        until(
            lambda: (
                stats(it)["memory"]["prefixes"]["sequences"] == 1
                and not stats(it)["memory"]["in_flight"]["sequences"]
            )
        )
        found = stats(it)
        families = text_string_to_metric_families(it.http.get("/metrics").text)
        samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
        assert samples["kvstow_decode_tokens_total",] == found["decode"]["tokens"] == 10
        assert samples["kvstow_prompt_tokens_total",] == found["prompt"]["tokens"]
        assert samples["kvstow_requests_total", "answered"] == 2
        hits = found["prefixes"]["memory"]
        assert samples["kvstow_prefix_lookups_total", "memory"] == hits["requests"] == 1
        assert samples["kvstow_prefix_tokens_total", "memory"] == hits["tokens"]
        kept = found["memory"]["prefixes"]
        assert samples["kvstow_kv_cache_bytes", "prefixes"] == kept["kv_bytes"] > 0
        assert samples["kvstow_time_to_first_token_seconds_count",] == 2
        assert kept["kv_bytes_bf16"] / kept["kv_bytes"] == pytest.approx(2.56)


def test_two_servers_in_one_process_count_apart(tiny):
    with serving(tiny) as one:
        one.post(messages=HELLO)
        with serving(tiny) as other:
            assert outcomes(other) == {}
            assert stats(other)["decode"]["tokens"] == 0
        assert outcomes(one) == {"answered": 1}
    assert kvstow.usage([]).kv_bytes == 0
