"""The program itself, from its options to its exit code."""

import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kvstow.errors import ModelFileError

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.mlx


def ask(process, key="none", **more):
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key=key, max_retries=0) as client:
        return client.completions.create(model=process.name, prompt="abc", **more)


def test_the_program_serves_until_sigterm_and_lets_the_running_answer_end(tiny, program):
    process = program("--model", tiny.llama, "--max-tokens", 150, "--served-name", "mine")
    process.name = "mine"
    told = "".join(process.lines)
    assert "turbo:k8v3: 2 of 2 layers" in told
    assert "KV budget" in told
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        endless = {str(token): -100 for token in range(257, 260)}
        stream = client.completions.create(
            model="mine", prompt="abc", stream=True, logit_bias=endless
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("ending after 1 request, within 30 s; again ")
        reasons = [part.choices[0].finish_reason for part in stream]
    assert reasons[-1] == "length"
    assert process.wait(20) == 0


def test_the_program_does_not_wait_for_a_model_that_is_loading(tiny, cli, monkeypatch):
    provider = pytest.importorskip("kvstow.serve.provider")
    ended = threading.Event()

    def slow(*_, **__):
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else it ends this process
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        ended.wait()
        raise ModelFileError("too late")

    def leave(code):
        ended.set()
        sys.exit(code)

    monkeypatch.setattr(provider, "load", slow)
    monkeypatch.setattr(os, "_exit", leave)
    result = cli("serve", "--model", tiny.llama, "--port", 0)
    assert (result.exit_code, ended.is_set()) == (0, True)


def test_a_key_in_the_environment_is_needed(tiny, program):
    process = program("--model", tiny.llama, KVSTOW_API_KEY="sesame")
    process.name = tiny.llama.name
    with pytest.raises(openai.AuthenticationError):
        ask(process)
    assert ask(process, "sesame", max_tokens=2).usage.completion_tokens == 2


REFUSED = [
    (["--model", "nowhere"], 1, "no such model"),
    (["--kv-quant", "turbo:k3"], 2, "unknown scheme"),
    (["--port", "99999"], 2, "--port"),
    (["--kv-budget", "much"], 2, "--kv-budget"),
    (["--kv-budget", "1kB"], 1, "see --kv-budget"),
    (["--temp", "nan"], 2, "--temp"),
    (["--max-tokens", "0"], 2, "--max-tokens"),
    (["--api-key", " "], 2, "--api-key is empty"),
    (["--chat-template-args", "[]"], 2, "is not a JSON object"),
    (["--num-draft-tokens", "3"], 2, "--num-draft-tokens needs --draft-model"),
    (["--fetch", "fused", "--kv-quant", "off"], 2, "--fetch fused needs a turbo scheme"),
    (["--adapter-path", "."], 2, "lacks adapter_config.json and adapters.safetensors"),
    (["--chat-template-file", "nowhere"], 2, "--chat-template-file"),
    (["--chat-template-file", sys.executable], 2, "is no text in UTF-8"),
    (["--prefix-cache-bytes", "1GB"], 2, "needs --prefix-cache"),
    (["--prefix-cache", f"{sys.executable}/p"], 2, "is no directory to write in"),
    (["--allowed-origin", "http://localhost:3000/"], 2, "is not an origin"),
    (["--allowed-origin", "localhost:3000"], 2, "is not an origin"),
    (["--host", "256.0.0.1"], 1, "cannot listen on 256.0.0.1"),
]


@pytest.mark.parametrize(("args", "code", "words"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_served_is_refused_before_weights_load(
    tiny, refused, monkeypatch, args, code, words
):
    provider = pytest.importorskip("kvstow.serve.provider")
    monkeypatch.setattr(provider, "load", lambda *_, **__: pytest.fail("weights are loaded"))
    assert words in refused("serve", "--model", tiny.llama, "--port", 0, *args, code=code)


def test_a_model_that_a_scheme_cannot_store_is_refused_before_weights_load(directory, refused):
    folder = directory(head_dim=80)
    assert "head_dim" in refused("serve", "--model", folder, code=1)


def test_weights_that_cannot_be_loaded_end_the_program(directory, refused):
    """The server listens meanwhile, and says that it loads."""
    assert "mlx-lm cannot load" in refused("serve", "--model", directory(), "--port", 0, code=1)


def test_a_port_in_use_is_one_line(tiny, refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("serve", "--model", tiny.llama, "--port", port, code=1)
    assert f"Error: cannot listen on 127.0.0.1 port {port}: Address already in use\n" in said


def test_other_machines_without_a_key_are_warned_of(tiny, cli):
    result = cli(
        "serve", "--model", tiny.llama, "--port", 0, "--host", "0.0.0.0", "--kv-budget", "1kB"
    )
    assert "warning: --host 0.0.0.0 lets other machines ask" in result.stderr


def test_a_missing_extra_is_named(tiny, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'kvstow[serve]'" in refused("serve", "--model", tiny.llama, code=1)


def test_a_scheme_that_cannot_be_batched_is_warned_of(tiny, program):
    process = program("--model", tiny.llama, "--kv-quant", "affine:8")
    assert any("affine:8 cannot be batched: one request" in line for line in process.lines)
    process.name = tiny.llama.name
    url = f"{process.url}/v1/completions"
    lanes = []

    def post():
        answer = httpx.post(url, json={"prompt": "abc", "max_tokens": 3}, timeout=60)
        lanes.append((answer.status_code, answer.headers["x-kvstow-lane"]))

    threads = [threading.Thread(target=post) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lanes == [(200, "single")] * 3


def test_a_draft_model_decodes_one_request_at_a_time_and_that_is_said(tiny, program):
    process = program("--model", tiny.llama, "--draft-model", tiny.other)
    assert any("a draft model cannot be batched" in line for line in process.lines)
    ask = {"prompt": "abc", "max_tokens": 5, "num_draft_tokens": 2}
    answer = httpx.post(f"{process.url}/v1/completions", json=ask, timeout=60)
    assert (answer.status_code, answer.headers["x-kvstow-lane"]) == (200, "single")


def test_a_draft_model_that_cannot_be_used_is_warned_of_and_left_out(tiny, cli, monkeypatch):
    speculative = pytest.importorskip("kvstow.integrations.mlx_lm.speculative")
    monkeypatch.setattr(speculative, "why_untrimmable", lambda _: "its X cannot forget tokens")
    setups = []
    server = pytest.importorskip("kvstow.serve.server")

    def only_look(setup, **_):
        setups.append(setup)
        return SimpleNamespace(run=lambda _: True)

    monkeypatch.setattr(server, "Server", only_look)
    result = cli("serve", "--model", tiny.llama, "--draft-model", tiny.other, "--port", 0)
    assert "warning: --draft-model is not used, and requests are decoded" in result.stderr
    assert "its X cannot forget tokens" in result.stderr
    assert (setups[0].model.draft_model, len(setups[0].caches)) == (None, 1)


def test_a_draft_model_with_other_tokens_is_refused(tiny, refused):
    said = refused("serve", "--model", tiny.llama, "--draft-model", tiny.gemma3, code=1)
    assert "the draft model has another tokenizer" in said
