"""Clients that mean harm or know no better, clocks that jump, and what may not be held up."""

import contextlib
import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import categorical_sampling

from kvstow.serve import connection
from tests.serve import conftest
from tests.serve.conftest import CHAT, ENDLESS, HELLO, serving, until

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("faults")]


@pytest.fixture(scope="module")
def server(tiny):
    with serving(tiny, context=256, max_tokens=2) as it:
        yield it


@contextlib.contextmanager
def connected(it):
    host, port = it.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        yield client


def can_read(client):
    """Whether something comes soon."""
    return bool(select.select([client], [], [], 0.2)[0])


def everything(client):
    """What comes until the server closes."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def head(n_bytes, *more):
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {n_bytes}", *more, "", ""]).encode()


def chat_body(**fields):
    return json.dumps({"messages": HELLO} | fields).encode()


def answers(it):
    return it.post(messages=HELLO).status_code == 200


# --- what is asked

EXTREMES = [
    {"temperature": 5e-324},
    {"temperature": 1e-40},
    {"temperature": 1, "top_p": 5e-324},
    {"temperature": 1, "min_p": 5e-324},
    {"temperature": 1, "top_k": 1},
    {"temperature": 1, "top_k": 260},  # all tokens of the model
    {"temperature": 1, "top_k": 261},  # and all of its tokenizer
    {"temperature": 1, "top_k": 2**64},
    {"temperature": 1, "seed": 2**64 - 1},
    {"logit_bias": {str(token): -100 for token in range(260)}},
    {"logit_bias": {"1": 5, "01": 5}, "logprobs": True, "top_logprobs": 20},
    {"repetition_penalty": 5e-324, "presence_penalty": 2, "frequency_penalty": -2},
    {"repetition_penalty": 10, "repetition_context_size": 100_000},
    {"stop": ["\0", "</s>", "\u200b", " ", *("x" * 1000 for _ in range(12))]},
    {"messages": [{"role": "user", "content": "<s></s><|im_end|>\0"}]},
    {"messages": [{"role": "tool", "content": ""}]},
    {"messages": [{"role": "system", "content": "a"}] * 3},
]


@pytest.mark.parametrize("ask", EXTREMES, ids=lambda ask: str(ask)[:50])
def test_every_value_that_is_allowed_is_answered(server, ask):
    assert server.post(**{"messages": HELLO} | ask).status_code == 200
    assert server.service.state == "ok"


@pytest.mark.parametrize("prompt", [[257] * 50, [258] * 50, [259], [257, 258, 259] * 30])
def test_a_prompt_of_special_tokens_is_answered(server, prompt):
    assert server.post("/v1/completions", prompt=prompt).status_code == 200


def calling(arguments):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return chat_body(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])


NONSENSE = {
    "a number without an end": b'{"messages": [], "max_tokens": ' + b"9" * 5000 + b"}",
    "a large number": chat_body(max_tokens=10**4000),
    "the name of a token without an end": chat_body(logit_bias={"1" * 5000: 1}),
    "a token that only the tokenizer has": chat_body(logit_bias={"260": 1}),
    "many names": chat_body(**{str(i): 1 for i in range(50_000)}),
    "many biases": chat_body(logit_bias={str(i): 1 for i in range(50_000)}),
    "many stop words": chat_body(stop=[str(i) for i in range(50_000)]),
    "many bad turns": chat_body(messages=[{"role": "x"}] * 50_000),
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "UTF-16": chat_body().decode().encode("utf-16"),
    "a byte of zero": b"\0",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "Infinity": b'{"messages": [], "temperature": -Infinity}',
    "beyond all floats": b'{"messages": [], "temperature": 1e999}',
    "deep lists": b'{"messages": ' + b"[" * 100_000,
    "deep objects": b'{"metadata": ' + b'{"a":' * 300 + b"1" + b"}" * 301,
    "deep lists in a call": calling("[" * 100_000),
    "deep objects in a call": calling('{"a":' * 100_000),
    "a long number in a call": calling('{"a": ' + "1" * 5000 + "}"),
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_a_short_400(server, body):
    response = server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < 700
    assert server.gateway.n_running == 0


def test_a_token_that_the_model_cannot_read_is_refused(server, tiny):
    assert len(tiny[1]) == 261
    refused = server.post("/v1/completions", prompt=[260]).json()["error"]
    assert refused["message"] == "tokens of a prompt must be 0 to 259"


def test_text_that_is_too_long_whatever_its_tokens_is_not_tokenised(server, monkeypatch):
    longest = server.engine.model_provider.longest_token
    monkeypatch.setattr(server.engine, "tokenise", lambda *_: pytest.fail("it is tokenised"))
    text = "x" * 256 * longest
    for path, ask in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
    ):
        refused = server.post(path, **ask).json()["error"]
        assert refused["code"] == "context_length_exceeded"
        assert "got at least 256 of prompt" in refused["message"]


def test_tokenising_takes_no_longer_than_a_request_may(serve, tiny, monkeypatch):
    with serve(tiny, context=256, request_timeout_s=0.3) as it:
        tokenise = it.engine.tokenise

        def slow(*args):
            time.sleep(1)
            tokenise(*args)

        monkeypatch.setattr(it.engine, "tokenise", slow)
        assert it.post(messages=HELLO).json()["error"]["code"] == "request_timeout"
        monkeypatch.setattr(it.engine, "tokenise", tokenise)
        until(lambda: answers(it))


def test_another_temperature_is_not_another_sampler(server, monkeypatch):
    """mlx compiles a function anew for other numbers: on a CPU with a C++ compiler, in seconds."""
    seen = []

    def sampling(logits, temp):
        seen.append(temp)
        return categorical_sampling(logits, temp)

    monkeypatch.setattr("mlx_lm.sample_utils.categorical_sampling", sampling)
    for temperature in (0.5, 0.75):
        assert server.post(messages=HELLO, temperature=temperature).status_code == 200
    assert [type(temp) for temp in seen] == [mx.array] * len(seen)
    assert {temp.item() for temp in seen} == {0.5, 0.75}


# --- connections


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: x\r\n", head(10) + b"{"],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_a_client_that_says_half_of_it_is_left(serve, tiny, monkeypatch, sent):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with serve(tiny, request_timeout_s=0.3) as it, connected(it) as client:
        client.sendall(sent)
        status = everything(client)[:12]
        assert status == (b"HTTP/1.1 504" if b"Content-Length" in sent else b"")
        assert it.http.get("/health").status_code == 200


def test_a_client_that_says_its_next_request_too_slowly_is_left(serve, tiny, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.4)
    with serve(tiny) as it, connected(it) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        sent = []
        with contextlib.suppress(ConnectionError):
            while len(sent) < 100:
                client.sendall(b"x")
                sent.append("x")
                time.sleep(0.05)
        assert len(sent) < 100


def test_a_long_answer_is_not_cut_off(serve, tiny, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    with serve(tiny, context=4000) as it:
        found = it.post(messages=HELLO, max_tokens=500, logit_bias=ENDLESS, stream=True)
        assert found.text.endswith("[DONE]\n\n")
        assert found.elapsed.total_seconds() > 0.2


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 70_000,
        head(2, "Transfer-Encoding: chunked") + b"zz\r\n",
        b"\x16\x03\x01\x00\xa5\x01",  # TLS
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["a huge header", "a bad chunk", "TLS", "a length below zero"],
)
def test_what_is_not_http_is_closed(server, sent):
    with connected(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(sent)
        assert everything(client).startswith(b"HTTP/1.1 400")
    assert answers(server)


def test_a_body_of_terabytes_is_refused_by_its_head(server):
    with connected(server) as client:
        client.sendall(head(10**12) + b"{")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_requests_that_come_at_once_on_one_connection_are_answered_in_turn(server):
    with connected(server) as client:
        body = chat_body()
        client.sendall((head(len(body)) + body) * 3 + head(len(body), "Connection: close") + body)
        assert everything(client).count(b"HTTP/1.1 200") == 4


def test_a_client_that_closes_its_half_has_gone(serve, tiny):
    with serve(tiny, context=20_000) as it, connected(it) as client:
        body = chat_body(max_tokens=15_000, logit_bias=ENDLESS)
        client.sendall(head(len(body)) + body)
        until(lambda: it.gateway.n_running)
        client.shutdown(socket.SHUT_WR)
        assert everything(client) == b""
        until(it.is_idle)


def test_a_client_that_does_not_read_is_left(serve, tiny, monkeypatch):
    listen = conftest.listen

    def narrow(*address):
        listener = listen(*address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(conftest, "listen", narrow)
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.3)
    with serve(tiny, context=20_000) as it, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = it.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        body = chat_body(
            max_tokens=15_000, logit_bias=ENDLESS, stream=True, logprobs=True, top_logprobs=20
        )
        client.sendall(head(len(body)) + body)
        until(lambda: it.gateway.n_running)
        until(it.is_idle, 10)
        assert answers(it)


def test_idle_connections_are_in_nobodys_way(server):
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connected(server))
        assert answers(server)


def test_more_connections_than_may_be_are_told_so(serve, tiny, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 4)
    with serve(tiny) as it:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connected(it)) for _ in range(6)]
            refused = [client for client in clients if can_read(client)]
            for client in refused:
                status, _, body = everything(client).partition(b"\r\n\r\n")
                assert status.startswith(b"HTTP/1.1 503")
                assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert len(refused) == 2
        until(lambda: answers(it))


# --- the engine


def test_a_clock_that_is_set_back_keeps_nobody_waiting(serve, tiny, monkeypatch):
    """Others are let into the batch meanwhile, and who goes leaves it."""
    with serve(tiny, context=20_000) as it:
        ask = {"messages": HELLO, "max_tokens": 6000, "logit_bias": ENDLESS, "stream": True}
        with it.http.stream("POST", CHAT, json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            now = time.time
            monkeypatch.setattr(time, "time", lambda: now() - 3600)
            assert answers(it)
            monkeypatch.setattr(time, "time", lambda: now() + 10 * 365 * 86_400)
            assert answers(it)
            assert it.gateway.n_running == 1
        until(it.is_idle)


def test_all_that_wait_are_told_at_once_when_the_model_fails(serve, tiny, monkeypatch):
    with serve(tiny, context=4000, decode_concurrency=4) as it:
        step = BatchGenerator.next

        def fails(self):
            if it.gateway.n_running == 4 and it.gateway.n_waiting == 4:
                raise MemoryError("no more of it")
            return step(self)

        monkeypatch.setattr(BatchGenerator, "next", fails)
        ask = {"messages": HELLO, "max_tokens": 3000, "logit_bias": ENDLESS}
        with ThreadPoolExecutor(8) as pool:
            begin = time.monotonic()
            found = list(pool.map(lambda _: it.post(**ask), range(8)))
        assert time.monotonic() - begin < 10
        assert {x.status_code for x in found} == {500}
        assert {x.json()["error"]["code"] for x in found} == {"generation_failed"}
        health = it.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "unavailable"})
