"""mlx-lm's batch generation and its server, over packed caches: every request as it is alone."""

import logging
import queue
from types import SimpleNamespace

import numpy as np
import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
generation = pytest.importorskip("mlx_lm.generate")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
tiny = pytest.importorskip("tests.integration.tiny")
batching = pytest.importorskip("tests.integration.batching")
texts = pytest.importorskip("kvstow.evaluate.texts")

pytestmark = pytest.mark.mlx
log = logging.getLogger(__name__)
N_REPLY, LOGITS = batching.N_REPLY, batching.LOGITS
prompts, together, alone = batching.prompts, batching.together, batching.alone
assert_same_reply = batching.assert_same_reply
SCHEMES = ["turbo:k8v3", "turbo:k4v2+start15", "turbo:k8v8+stored"]


# Rows of eager caches are those alone under every scheme: tests/integration/test_batch.py.
@pytest.mark.parametrize(
    ("fetch", "scheme"), [*(("auto", scheme) for scheme in SCHEMES), ("eager", SCHEMES[1])]
)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3_text", "gemma3n", "gemma4_text", "gpt_oss", "qwen3_next"]
)
def test_a_reply_of_a_batch_is_the_reply_alone(name, fetch, scheme):
    model = tiny.build(name)
    with kvstow.attached(model, scheme, fetch=fetch):
        replies = together(model, prompts(), N_REPLY)
        for request, n, got in zip(prompts(), N_REPLY, replies, strict=True):
            assert_same_reply(got, alone(model, request, n), LOGITS)


def test_the_batch_is_quantised_and_no_request_is_left_out():
    model, sizes = tiny.build("llama"), []
    exact = together(model, prompts(), N_REPLY)
    with kvstow.attached(model, "turbo:k4v2"):
        stored = together(model, prompts(), N_REPLY)
        for reply, request, n in zip(stored, prompts(), N_REPLY, strict=True):
            usage = kvstow.usage(reply.cache)
            assert {type(c) for c in reply.cache} == {integration.DeferredKVCache}
            assert usage.tokens == len(request) + n
            assert usage.compression_ratio == pytest.approx(16 / 3.75)
            sizes.append(usage.kv_bytes)
    moved = [
        np.abs(a.logprobs[0] - b.logprobs[0]).max() for a, b in zip(exact, stored, strict=True)
    ]
    assert min(moved) > 1e-2
    assert sorted(sizes) == sizes or len(set(sizes)) > 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_request_that_joins_later_changes_nothing_for_those_under_way(scheme):
    """Two replies at a time, one prompt at a time: rows come and go while others decode."""
    model = tiny.build("llama")
    with kvstow.attached(model, scheme):
        options = {"completion_batch_size": 2, "prefill_batch_size": 1}
        replies = together(model, prompts(), N_REPLY, **options)
        for request, n, got in zip(prompts(), N_REPLY, replies, strict=True):
            assert_same_reply(got, alone(model, request, n), LOGITS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_conversation_goes_on_from_the_cache_that_left_the_batch(scheme):
    model = tiny.build("llama")
    with kvstow.attached(model, scheme):
        first = together(model, prompts(), N_REPLY)
        more = prompts((4, 9, 1, 6, 30), seed=1)
        generator = generation.BatchGenerator(model)
        generator.insert([list(p) for p in more], [3] * 5, caches=[r.cache for r in first])
        got = {}
        while responses := generator.next_generated():
            for r in responses:
                got.setdefault(r.uid, []).append(np.array(r.logprobs))
        generator.close()
        for i, (request, reply) in enumerate(zip(more, first, strict=True)):
            cache = host.make_prompt_cache(model)
            steps = [prompts()[i][:-1], prompts()[i][-1:], *([t] for t in reply.tokens)]
            for step in [*steps, request[:-1]]:
                if step:
                    model(mx.array([step]), cache=cache)
            logits = model(mx.array([request[-1:]]), cache=cache)[0, -1]
            wanted = np.array(logits - mx.logsumexp(logits))
            np.testing.assert_allclose(got[i][0], wanted, rtol=0, atol=LOGITS)


def test_mlx_lms_own_batch_generate_runs_on_an_attached_model():
    model = tiny.build("llama")
    tokenizer = SimpleNamespace(eos_token_ids=(), decode=str)
    with kvstow.attached(model, "turbo"):
        reply = generation.batch_generate(
            model, tokenizer, prompts(), max_tokens=list(N_REPLY), return_prompt_caches=True
        )
        wanted = [alone(model, p, n) for p, n in zip(prompts(), N_REPLY, strict=True)]
    assert reply.texts == [str(w.tokens) for w in wanted]
    assert [kvstow.usage(cache).tokens for cache in reply.caches] == [32, 19, 43, 9, 23]


def test_under_affine_mlx_lm_still_refuses_to_batch():
    model = tiny.build("llama")
    with (
        kvstow.attached(model, "affine:8"),
        pytest.raises(ValueError, match="does not yet support batching"),
    ):
        together(model, prompts(), N_REPLY)


# --- the demo model


@pytest.fixture(scope="module")
def model(smollm2):
    return smollm2[0]


def kl_nats(wanted, got):
    return float((np.exp(wanted) * (wanted - got)).sum())


@pytest.mark.model
def test_the_demo_models_replies_are_those_alone(model, smollm2):
    """Nearer to them than the scheme is to no scheme.

    Thirty layers round what they store, so what is 1e-5 apart before a first code that turns
    out otherwise is up to 0.2 apart after it, in logits of order 10.
    """
    text = texts.passages(smollm2[1], texts.bundled(["python"]), 128, n=3).tokens.tolist()
    requests = [text[0][:128], text[1][:37], text[2][:90]]
    exact = [alone(model, request, 3) for request in requests]
    with kvstow.attached(model, "turbo:k8v3"):
        replies = together(model, requests, (3, 3, 3))
        wanted = [alone(model, request, 3) for request in requests]
    apart, by_scheme = [], []
    for got, one, off in zip(replies, wanted, exact, strict=True):
        assert_same_reply(got, one, 0.5)
        assert np.abs(got.logprobs[0] - one.logprobs[0]).max() < 1e-2
        apart += [kl_nats(y, x) for x, y in zip(got.logprobs, one.logprobs, strict=True)]
        by_scheme += [kl_nats(y, x) for x, y in zip(one.logprobs, off.logprobs, strict=True)]
    log.info("mean KL, nats: batch to alone %g, alone to off %g", *map(np.mean, (apart, by_scheme)))
    assert np.mean(apart) < 0.05 * np.mean(by_scheme)


@pytest.fixture
def server(model, smollm2):
    """mlx-lm's server engine on the demo model, without HTTP."""
    module = pytest.importorskip("mlx_lm.server")
    mx.eval(model.parameters())
    options = {
        "adapter_path": None,
        "chat_template": None,
        "chat_template_args": {},
        "decode_concurrency": 8,
        "draft_model": None,
        "kv_bits": None,
        "model": "smollm2",
        "pipeline": False,
        "prefill_step_size": 512,
        "prompt_cache_bytes": None,
        "prompt_concurrency": 4,
        "trust_remote_code": False,
    }

    class Provider(module.ModelProvider):
        def _load(self, *key):
            self.model_key, self.model, self.tokenizer = key, model, smollm2[1]
            caches = host.make_prompt_cache(model)
            self.is_batchable = all(hasattr(c, "merge") for c in caches)

    with kvstow.attached(model, "turbo:k8v8+stored"):
        provider = Provider(SimpleNamespace(**options))
        engine = module.ResponseGenerator(provider, host.LRUPromptCache(10))
        engine.module = module
        yield engine
        engine.stop_and_join()


def ask(server, conversations):
    """Replies to all conversations at once, and how many tokens each found in the cache."""
    m = server.module
    arguments = m.GenerationArguments(
        m.ModelDescription("default_model", None, None),
        m.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
        m.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        *([], 12, 0, False, 0, None, None),
    )
    queues = []
    for messages in conversations:
        queues.append(queue.Queue())
        request = m.CompletionRequest("chat", "", messages, None, None)
        server.requests.put((queues[-1], request, arguments))
    replies, found = [], []
    for q in queues:
        found.append(server._await_response(q).prompt_cache_count)
        tokens = []
        while (response := server._await_response(q)) is not None:
            if isinstance(response, m.Response):
                tokens.append(response.token)
        replies.append(tokens)
    return replies, found


@pytest.mark.model
def test_the_server_batches_an_attached_model_and_goes_on_from_its_caches(server, model, smollm2):
    questions = ["Name a river.", "What is the capital of France?", "Write one line about the sea."]
    conversations = [[{"role": "user", "content": q}] for q in questions]
    replies, found = ask(server, conversations)
    assert server.model_provider.is_batchable
    assert found == [0, 0, 0]
    for conversation, tokens in zip(conversations, replies, strict=True):
        conversation.append({"role": "assistant", "content": smollm2[1].decode(tokens)})
        conversation.append({"role": "user", "content": "Say it in other words."})
    again, found = ask(server, conversations)
    assert min(found) > 20
    entry = next(iter(server.prompt_cache._lru._lrus["assistant"]))
    kept = server.prompt_cache._trie.get(*entry).prompt_cache
    assert {type(c) for c in kept} == {integration.DeferredKVCache}
    # The arrays belong to the server's thread, so their shapes are all that is read.
    n_tokens, n_layers = kept[0].offset, len(kept)
    assert (
        sum(c.nbytes for c in kept) == kept[0].scheme.bytes_per_token(64) * n_tokens * 3 * n_layers
    )
    for conversation, tokens in zip(conversations, again, strict=True):
        prompt = smollm2[1].apply_chat_template(conversation, add_generation_prompt=True)
        one = alone(model, prompt, 12)
        for token, wanted, logprobs in zip(tokens, one.tokens, one.logprobs, strict=False):
            if token != wanted:
                second, best = np.sort(logprobs)[-2:]
                assert best - second < 0.5
                break
