"""A server that says what a test tells it, with the real page, statistics and metrics."""

import asyncio
import json
import threading
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvstow.serve import observe
from kvstow.serve.stats import (
    Budget,
    Held,
    Hits,
    Latency,
    LayerStats,
    Memory,
    Prefixes,
    Requests,
    Stats,
    Throughput,
    Work,
)

RECURRENT = "recurrent layer has a state, not keys and values"
LAYERS = (
    *(LayerStats(i, "full", "turbo:k8v3", "deferred", "", "") for i in range(29)),
    LayerStats(29, "other", "off", "host", RECURRENT, ""),
)
STATS = Stats(
    state="ok",
    uptime_s=4000.0,
    measured_s_ago=0.1,
    versions={"kvstow": "0.1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2"},
    model="smollm2",
    context_tokens=8192,
    scheme="turbo:k8v3",
    layers=LAYERS,
    memory=Memory(
        Held(3, 6_144, 58_800_000, 150_500_000),
        Held(4, 4_096, 39_200_000, 100_300_000),
        0,
        620_000_000,
        1_089_000_000,
        12_000_000,
    ),
    budget=Budget(2_000_000_000, 300_000_000),
    work=Work(1, 1, 2, 0),
    prompt=Throughput(20_480, 240.0, 83.2, 5.0),
    decode=Throughput(4_321, 450.0, 9.6, 5.0),
    prefixes=Prefixes(Hits(7, 9_000), Hits(2, 4_096), 5, 1, 0, 6, 1_000_000, 0, 0),
    requests=Requests(
        {"answered": 12, "disconnected": 1, "timed_out": 0, "failed": 0},
        {"queue_full": 2, "context_length_exceeded": 1},
        Latency((0.5, 1.0), (4, 9, 12), 9.0),
        Latency((0.5, 1.0), (0, 2, 13), 40.0),
    ),
)


class Site:
    """What the server says, to be changed by a test; and what it was asked.

    Attributes:
        stats: The statistics.
        key: An API key that it wants; None: none.
        refusal: Status, message and headers that a chat gets in the place of an answer.
        chunks: Texts of an answer, or dicts that are sent as they are.
        pause_s: Before each.
        asked: The bodies of chats.
        left: Set when a client goes away in the middle of an answer.
        polls: How often the statistics were read.
        n_without_key: How often something was asked for without the key.
    """

    def __init__(self):
        self.stats = STATS
        self.key = self.refusal = None
        self.chunks = ["The sea", " is blue."]
        self.pause_s = 0.0
        self.asked = []
        self.left = threading.Event()
        self.polls = self.n_without_key = 0
        self.url = ""

    def read(self):
        self.polls += 1
        return self.stats

    def app(self):
        routes = observe.routes(self.read)
        app = Starlette(
            routes=[*routes, Route("/v1/chat/completions", self.chat, methods=["POST"])]
        )

        async def guarded(scope, receive, send):
            if scope["type"] == "http" and self._locked(scope):
                self.n_without_key += 1
                await _error(401, "an API key is needed")(scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded

    def _locked(self, scope):
        is_page = scope["path"] == "/" or scope["path"].startswith("/page/")
        said = dict(scope["headers"]).get(b"authorization", b"").decode()
        return self.key is not None and not is_page and said != f"Bearer {self.key}"

    async def chat(self, request):
        self.asked.append(await request.json())
        if self.refusal is not None:
            return _error(*self.refusal)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self):
        try:
            for chunk in self.chunks:
                await asyncio.sleep(self.pause_s)
                delta = {"content": chunk} if isinstance(chunk, str) else chunk
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                yield _event(chunk if "error" in delta else {"choices": [choice]})
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            used = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
            cached = {"prompt_tokens_details": {"cached_tokens": 16}}
            yield _event({"choices": [], "usage": used | cached})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


def _event(body):
    return f"data: {json.dumps(body)}\n\n"


def _error(status, message, headers=None):
    return JSONResponse({"error": {"message": message}}, status, headers)


@contextmanager
def serving(app):
    """Serve an application in a thread; gives its address."""
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()
