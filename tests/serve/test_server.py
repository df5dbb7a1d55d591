"""The server on a tiny model: what is asked, what is refused, and what is left behind."""

import copy
import json
import socket
import threading

import httpx
import openai
import pytest
from mlx_lm.generate import BatchGenerator

from tests.serve.conftest import ENDLESS, HELLO, serving, until

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("server")]


@pytest.fixture(scope="module")
def server(tiny):
    with serving(tiny, context=256, max_tokens=8) as it:
        yield it


def test_streamed_parts_are_the_whole_answer(server):
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 12}
    whole = server.client.chat.completions.create(**ask)
    parts = list(server.client.chat.completions.create(**ask, stream=True))
    text = "".join(p.choices[0].delta.content or "" for p in parts)
    assert text == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert {p.id for p in parts} != {whole.id}
    assert len({p.id for p in parts}) == 1


def test_a_stream_ends_with_its_usage_where_that_is_asked(server):
    ask = {"model": "tiny", "messages": HELLO, "stream": True}
    parts = list(
        server.client.chat.completions.create(**ask, stream_options={"include_usage": True})
    )
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == 8
    assert [p.usage for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert all(p.usage is None for p in server.client.chat.completions.create(**ask))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_word(server, stream):
    whole = server.client.completions.create(model="tiny", prompt="abc", max_tokens=24)
    text = whole.choices[0].text
    stop = text[5:8]
    found = server.client.completions.create(
        model="tiny", prompt="abc", max_tokens=24, stop=[stop], stream=stream
    )
    parts = list(found) if stream else [found]
    assert "".join(p.choices[0].text for p in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_a_prompt_may_be_tokens(server, tiny):
    tokens = tiny[1].encode("abc")
    by_text = server.client.completions.create(model="tiny", prompt="abc", max_tokens=6)
    by_tokens = server.client.completions.create(model="tiny", prompt=tokens, max_tokens=6)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_tokens.usage.prompt_tokens == len(tokens)


def test_the_same_prompt_is_read_once(server):
    messages = [{"role": "user", "content": "never asked before"}]
    first, second = (
        server.client.chat.completions.create(model="tiny", messages=messages) for _ in range(2)
    )
    assert first.usage.prompt_tokens_details.cached_tokens <= 1  # all prompts begin alike
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_a_prompt_that_is_held_whole_is_answered(server):
    """mlx-lm's engine has nothing left to read then, and its thread dies."""
    first = server.client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=1)
    held = server.engine.prompt_cache._lru._lrus["assistant"][-1][1]
    again = server.client.completions.create(model="tiny", prompt=list(held), max_tokens=2)
    assert again.usage.prompt_tokens_details.cached_tokens == len(held) - 1
    assert first.usage.completion_tokens == 1


def test_log_probabilities_have_the_shapes_of_openai(server):
    chat = server.client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=5
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        tops = [t.logprob for t in token.top_logprobs]
        assert (len(tops), tops) == (3, sorted(tops, reverse=True))
        assert token.logprob == pytest.approx(tops[0])  # the likeliest is drawn
        assert token.logprob < 0
    data = b"".join(bytes(token.bytes) for token in content)
    assert data.decode("utf-8", "replace").strip() == chat.choices[0].message.content.strip()
    text = server.client.completions.create(model="tiny", prompt="abc", logprobs=2, max_tokens=4)
    found = text.choices[0].logprobs
    assert [len(x) for x in (found.tokens, found.token_logprobs, found.text_offset)] == [4] * 3
    assert all(len(top) <= 2 for top in found.top_logprobs)


def test_a_streamed_answer_has_the_same_log_probabilities(server):
    ask = {"model": "tiny", "messages": HELLO, "logprobs": True, "max_tokens": 6}
    whole = server.client.chat.completions.create(**ask).choices[0].logprobs.content
    parts = server.client.chat.completions.create(**ask, stream=True)
    streamed = [t for p in parts if p.choices[0].logprobs for t in p.choices[0].logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in whole]


@pytest.mark.parametrize(
    ("ask", "lane"),
    [({}, "batch"), ({"seed": 1}, "batch"), ({"seed": 1, "temperature": 0.7}, "single")],
)
def test_the_response_says_in_which_lane_it_was_made(server, ask, lane):
    assert server.post(messages=HELLO, **ask).headers["x-kvstow-lane"] == lane


def test_a_seed_repeats_an_answer(server):
    ask = {"messages": HELLO, "temperature": 1.0, "max_tokens": 16}
    texts = [
        server.post(**ask, seed=seed).json()["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_model_is_listed_under_its_name(server):
    assert [m.id for m in server.client.models.list().data] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here, 'tiny' is"):
        server.client.models.retrieve("other")


REFUSED = [
    ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
    ({"messages": []}, openai.BadRequestError, "messages", "invalid_value"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
    ({"max_tokens": 300}, openai.BadRequestError, "messages", "context_length_exceeded"),
    (
        {"messages": [{"role": "user", "content": "x" * 400}]},
        *(openai.BadRequestError, "messages", "context_length_exceeded"),
    ),
    ({"n": 2}, openai.BadRequestError, "n", "unsupported_parameter"),
    ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        *(openai.BadRequestError, "tools", "no_tool_calling"),
    ),
    (
        {"extra_body": {"num_draft_tokens": 2}},
        *(openai.BadRequestError, "num_draft_tokens", "invalid_value"),
    ),
    (
        {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
        *(openai.BadRequestError, "chat_template_kwargs", "invalid_value"),
    ),
    ({"extra_body": {"beam": 3}}, openai.BadRequestError, "beam", "unknown_parameter"),
]


@pytest.mark.parametrize(
    ("ask", "kind", "param", "code"),
    REFUSED,
    ids=lambda x: getattr(x, "__name__", None) or str(x)[:40],
)
def test_what_is_not_done_is_refused_by_name(server, ask, kind, param, code):
    with pytest.raises(kind) as refused:
        server.client.chat.completions.create(**{"model": "tiny", "messages": HELLO} | ask)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert server.is_idle()
    assert server.gateway.n_waiting == 0


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"temperature": 3}, "temperature should be less than or equal to 2, got 3"),
        ({"messages": []}, "messages should have at least 1 item, got []"),
        ({"stop": ""}, "stop.0 should have at least 1 character, got ''"),
        ({"stop": ["a"] * 17}, "stop should have at most 16 items, got ['a', 'a', 'a', "),
        ({"stream_options": 3}, "stream_options should be a valid dictionary, got 3"),
        ({"max_tokens": 1.5}, "max_tokens should be a valid integer, got 1.5"),
    ],
)
def test_a_refusal_names_what_is_allowed_and_what_was_got(server, ask, message):
    got = server.post(**{"messages": HELLO} | ask).json()["error"]["message"]
    assert got.startswith(message)


def test_a_body_that_is_no_json_object_is_refused(server):
    headers = {"content-type": "application/json"}
    for content in (b"{", b"[]", b"", b'{"temperature": NaN}', b"\xff\xfe", b"[" * 100_000):
        response = server.http.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_form_of_a_web_page_is_refused(server):
    response = server.http.post("/v1/chat/completions", content=b"{}")
    assert (response.status_code, response.json()["error"]["code"]) == (
        415,
        "unsupported_media_type",
    )


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/x", 404), ("GET", "/v1/completions", 405)]
)
def test_an_unknown_url_has_an_error_of_openais_shape(server, method, path, status):
    response = server.http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, "unknown_url")


def test_a_body_beyond_the_limit_is_refused_declared_or_not(serve, tiny):
    with serve(tiny, max_body_bytes=100) as it:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 200}]}).encode()
        headers = {"content-type": "application/json"}
        for content in (body, iter([body])):
            response = it.http.post("/v1/chat/completions", content=content, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (
                413,
                "body_too_large",
            )


def test_a_key_is_needed_for_everything_but_health(serve, tiny):
    with serve(tiny, api_key="sesam öffne dich") as it:
        assert it.http.get("/health").status_code == 200
        for key in (None, "Bearer", "Bearer wrong", "Basic sesam"):
            response = it.http.get("/v1/models", headers={"authorization": key} if key else {})
            assert (response.status_code, response.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
        key = "Bearer sesam öffne dich".encode()
        assert it.http.get("/v1/models", headers={b"authorization": key}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            it.client.with_options(api_key="x").models.list()


def test_no_web_page_is_let_in_unless_it_is_named(serve, tiny):
    origin = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with serve(tiny) as it:
        assert "access-control-allow-origin" not in it.http.get("/health", headers=origin).headers
        assert it.http.options("/v1/models", headers=origin).status_code == 405
    with serve(tiny, allowed_origins=("https://chat.example",), api_key="k") as it:
        # Among them those that OpenAI's own client sends from a page.
        sent = {"access-control-request-headers": "authorization,content-type,x-stainless-lang"}
        allowed = it.http.options("/v1/chat/completions", headers=origin | sent)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        other = it.http.options("/v1/models", headers=origin | {"origin": "https://x.example"})
        assert "access-control-allow-origin" not in other.headers


def test_another_name_of_the_server_is_refused(serve, tiny):
    with serve(tiny, allowed_hosts=("127.0.0.1", "localhost")) as it:
        assert it.http.get("/v1/models").status_code == 200
        refused = it.http.get("/v1/models", headers={"host": "evil.example:80"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_client_that_goes_stops_its_answer_and_frees_its_room(serve, tiny, temperature):
    """In the batch, and outside it."""
    with serve(tiny, context=20_000, kv_budget_bytes=50_000_000) as it:
        ask = {
            "messages": HELLO,
            "max_tokens": 15_000,
            "stream": True,
            "seed": 1,
            "temperature": temperature,
            "logit_bias": ENDLESS,
        }
        with it.http.stream("POST", "/v1/chat/completions", json=ask) as response:
            lines = response.iter_lines()
            for _ in range(5):
                next(lines)
            assert it.gateway.n_running == 1
        until(it.is_idle)
        assert it.engine._outboxes == set()
        assert it.post(messages=HELLO).status_code == 200


def test_a_client_that_goes_before_a_whole_answer_stops_it(serve, tiny):
    with serve(tiny, context=20_000) as it:
        ask = {"messages": HELLO, "max_tokens": 15_000, "logit_bias": ENDLESS}
        with pytest.raises(httpx.ReadTimeout):
            it.http.post("/v1/chat/completions", json=ask, timeout=0.5)
        until(it.is_idle)


def test_what_takes_too_long_is_ended(serve, tiny):
    with serve(tiny, context=20_000, request_timeout_s=0.5) as it:
        ask = {"messages": HELLO, "max_tokens": 15_000, "logit_bias": ENDLESS}
        response = it.post(**ask)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        streamed = it.post(**ask, stream=True)
        assert streamed.status_code == 200
        last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "request_timeout"
        until(it.is_idle)


def test_a_body_that_does_not_come_is_not_waited_for(serve, tiny):
    with serve(tiny, request_timeout_s=0.5) as it:
        host, port = it.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 10\r\n\r\n{"
            )
            assert client.recv(1000).startswith(b"HTTP/1.1 504")


def test_a_thread_that_dies_hangs_nobody(serve, tiny, monkeypatch):
    with serve(tiny) as it:

        def broken(_):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(BatchGenerator, "next", broken)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            it.client.chat.completions.create(model="tiny", messages=HELLO)
        health = it.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "unavailable"})
        assert it.post(messages=HELLO).status_code == 500
        assert it.is_idle()


def test_requests_while_the_model_loads_are_told_to_come_again(serve, tiny, may_load):
    with serve(tiny, wait=False) as it:
        until(lambda: it.http.get("/health").status_code == 503)
        assert it.http.get("/health").json() == {"status": "loading"}
        refused = it.post(messages=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert int(refused.headers["retry-after"]) > 0
        may_load.set()
        until(lambda: it.http.get("/health").status_code == 200)
        assert it.post(messages=HELLO).status_code == 200


def test_answers_that_do_not_end_are_told_when_the_time_for_draining_is_over(serve, tiny):
    with serve(tiny, context=20_000, drain_timeout_s=0.1, decode_concurrency=1) as it:
        ask = {"messages": HELLO, "max_tokens": 15_000, "stream": True, "logit_bias": ENDLESS}
        waited = []
        waiting = threading.Thread(target=lambda: waited.append(it.post(messages=HELLO)))
        with it.http.stream("POST", "/v1/chat/completions", json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            waiting.start()
            until(lambda: it.gateway.n_waiting == 1)
            it.server.stop()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        waiting.join(10)
        assert [(w.status_code, w.json()["error"]["code"]) for w in waited] == [(503, "stopping")]
        with pytest.raises((httpx.ConnectError, httpx.ReadError)):  # or it closes at that moment
            it.http.get("/health")


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ raise_exception('turns must alternate') }}", "invalid_prompt"),
        (None, "no_chat_template"),
    ],
)
def test_what_the_chat_template_cannot_say_is_refused(serve, tiny, template, code):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.chat_template, tokenizer.has_chat_template = template, template is not None
    with serve((model, tokenizer)) as it:
        error = it.post(messages=HELLO).json()["error"]
        assert (error["param"], error["code"]) == ("messages", code)
        assert code != "invalid_prompt" or "turns must alternate" in error["message"]
        assert it.post("/v1/completions", prompt="abc", max_tokens=1).status_code == 200
