"""Speculative decoding behind the server."""

import pytest

from kvstow.integrations.mlx_lm.speculative import CachePair
from tests.serve.conftest import ENDLESS, HELLO, until

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("draft")]
MORE = {"role": "user", "content": "and then?"}


@pytest.fixture(scope="module")
def draft(load_tiny):
    """Another model, which is mostly wrong."""
    return load_tiny(seed=1)[0]


def conversation(it, n_turns=3):
    """Every answer of a conversation, and how many tokens were found in the cache."""
    turns, answers, cached = list(HELLO), [], []
    for n in range(n_turns):
        found = it.client.chat.completions.create(
            model="tiny", messages=turns, max_tokens=9 + n, logit_bias=ENDLESS
        )
        answers.append(found.choices[0].message.content)
        cached.append(found.usage.prompt_tokens_details.cached_tokens)
        turns += [{"role": "assistant", "content": answers[-1]}, MORE]
    return answers, cached


def test_a_conversation_with_a_draft_model_is_the_one_without(serve, tiny, draft):
    with serve(tiny, "off", context=2000) as it:
        alone, _ = conversation(it)
    with serve(tiny, "off", draft=draft, context=2000) as it:
        assert it.post(messages=HELLO).headers["x-kvstow-lane"] == "single"
        answers, cached = conversation(it)
    assert answers == alone
    assert cached[1] > 5  # letters that are no text are not sent back


def test_what_is_kept_has_as_many_tokens_as_it_says(serve, tiny, draft):
    with serve(tiny, draft=draft, context=2000) as it:
        conversation(it)
        kept = it.engine.prompt_cache
        until(lambda: len(kept) >= 1)
        for kind in kept._lru._lrus.values():
            for key, tokens in kind:
                caches = kept._trie.get(key, tokens).prompt_cache
                assert {c.offset for c in caches} == {len(tokens)}
                assert (type(caches), len(caches.model), len(caches.draft)) == (CachePair, 2, 2)


def test_a_request_that_fills_a_sliding_window_is_decoded_without_speculation(serve, load_tiny):
    pair, draft = load_tiny("gemma3"), load_tiny("gemma3", seed=1)[0]
    ask = {"model": "tiny", "prompt": "hi hi hi", "logit_bias": {"1": -100}}
    texts = {}
    for name, more in (("alone", {}), ("drafted", {"draft": draft})):
        with serve(pair, "off", context=2000, **more) as it:
            texts[name] = [
                it.client.completions.create(**ask, max_tokens=n).choices[0].text for n in (8, 60)
            ]
            keys = set(it.engine.prompt_cache._trie._trie)
    assert texts["drafted"] == texts["alone"]
    assert keys == {("given",), (("given",), "without a draft model")}


def test_draft_tokens_may_be_asked_for_while_another_request_is_decoded_without(serve, load_tiny):
    pair, draft = load_tiny("gemma3"), load_tiny("gemma3", seed=1)[0]
    ask = {"prompt": "hi", "max_tokens": 2, "num_draft_tokens": 2}
    with serve(pair, "off", context=2000, draft=draft) as it:
        assert it.post("/v1/completions", **ask).status_code == 200
        with it.engine.model_provider.answering(1000):
            assert it.post("/v1/completions", **ask).status_code == 200
    with serve(pair, "off", context=2000) as it:
        assert it.post("/v1/completions", **ask).json()["error"]["param"] == "num_draft_tokens"
