"""A real server in a thread, asked by the real client of OpenAI."""

import contextlib
import threading
import time

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

import kvstow  # noqa: E402
from kvstow.integrations.mlx_lm import read_shape  # noqa: E402
from kvstow.integrations.mlx_lm.speculative import trimmable_tokens  # noqa: E402
from kvstow.serve.budget import Stored  # noqa: E402
from kvstow.serve.options import Defaults, EngineOptions, Limits, ModelOptions  # noqa: E402
from kvstow.serve.provider import Provider  # noqa: E402
from kvstow.serve.server import Server, Setup, listen  # noqa: E402

MB = 10**6
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ALONE = {"seed": 1, "temperature": 0.7}  # what cannot be batched
ENDLESS = {"258": -100, "259": -100}  # the tokens that would end an answer


def until(condition, seconds=20):
    """Wait until something holds; fail if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


class Running:
    """A server that runs, and clients of it."""

    def __init__(self, server, port):
        self.server, self.service = server, server.service
        self.url = f"http://127.0.0.1:{port}"
        key = self.service.limits.api_key or "none"
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60
        )
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def gateway(self):
        return self.service.gateway

    @property
    def engine(self):
        return self.service.engine

    def post(self, path="/v1/chat/completions", **body):
        return self.http.post(path, json=body)

    def is_idle(self):
        return self.gateway.n_running == 0 and self.gateway.reserved_bytes == 0

    def settled(self):
        """What is held once the engine is through with what it was doing.

        The second look from now on comes after all that followed a step.
        """
        until(self.is_idle)
        watch = self.engine.watch
        for _ in range(2):
            before = watch.seen
            until(lambda seen=before: watch.seen is not seen)
        return watch.seen.memory


@contextlib.contextmanager
def running(setup, *, wait=True, drain_timeout_s=5):
    """Run a server for the length of the block."""
    listener = listen("127.0.0.1", 0)
    server = Server(setup, drain_timeout_s=drain_timeout_s)
    thread = threading.Thread(target=server.run, args=(listener,))
    thread.start()
    try:
        it = Running(server, listener.getsockname()[1])
        if wait:
            until(lambda: server.service.state == "ok")
        it.thread = thread
        with it.client, it.http:
            yield it
    finally:
        server.stop()
        thread.join()


class Loaded(Provider):
    """A provider of a model that is in memory already; this one attaches it."""

    given = None
    draft = None

    def load_default(self):
        self.model, self.tokenizer = self.given
        self.report = kvstow.attach(self.model, self.options.stored, fetch=self.options.fetch)
        self.model_key = ("given",)
        if self.draft is not None:
            self.draft_report = kvstow.attach(self.draft, self.options.stored)
            self.draft_model = self.draft
            self.speculation_tokens = trimmable_tokens(self.model, self.draft)
        caches = make_prompt_cache(self.model)
        self.is_batchable = self.draft is None and all(hasattr(c, "merge") for c in caches)
        self.on_loaded()

    def reset(self):
        pass


@contextlib.contextmanager
def serving(pair, scheme="turbo:k8v3", *, kv_budget_bytes=200 * MB, context=None, **options):
    """Serve a model and a tokenizer that are in memory; nothing may be left of its requests."""
    wait, draft = options.pop("wait", True), options.pop("draft", None)
    prefix_files = options.pop("prefix_files", None)
    drain_timeout_s = options.pop("drain_timeout_s", 5)

    def of(kind):
        return kind(**{k: options.pop(k) for k in list(options) if k in kind.__dataclass_fields__})

    stored = kvstow.Scheme.parse(scheme)
    engine, limits = of(EngineOptions), of(Limits)
    setup = Setup(
        model=ModelOptions("given", stored, "tiny", context),
        caches=tuple(Stored(read_shape(m, context), stored) for m in (pair[0], draft) if m),
        kv_budget_bytes=kv_budget_bytes,
        engine=engine,
        defaults=Defaults(**{"max_tokens": 16} | options),
        limits=limits,
        prefix_files=prefix_files,
    )
    given = type("Given", (Loaded,), {"given": pair, "draft": draft})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstow.serve.server.Provider", given)
        with running(setup, wait=wait, drain_timeout_s=drain_timeout_s) as it:
            yield it
            until(lambda: it.is_idle() or not it.thread.is_alive())
    for model in (pair[0], draft):
        if model is not None:
            kvstow.detach(model)


@pytest.fixture
def serve():
    return serving


@pytest.fixture
def may_load(monkeypatch):
    """An event: no model is loaded before it is set."""
    event, load = threading.Event(), Loaded.load_default

    def slow(self):
        event.wait()
        load(self)

    monkeypatch.setattr(Loaded, "load_default", slow)
    yield event
    event.set()  # or a thread would wait for ever, where a test has failed


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory):
    """Load a tiny random model of an architecture, and its tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    write = pytest.importorskip("tests.models.conftest").gguf_writer(folder)

    def load(architecture="llama", seed=0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVSTOW_CACHE", str(folder / "cache"))
            model, tokenizer = kvstow.load(str(write(architecture, seed=seed)))
        mx.eval(model.parameters())  # what is not computed belongs to the thread that made it
        return model, tokenizer

    return load


@pytest.fixture(scope="session")
def tiny(load_tiny):
    """A tiny llama."""
    return load_tiny()


@pytest.fixture(scope="session")
def demo(smollm2):
    """The demo model, for the thread of a server."""
    mx.eval(smollm2[0].parameters())
    return smollm2
