"""The server on the demo model, where answers mean something."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import kvstow
from kvstow.session import Session
from tests.serve.conftest import serving

pytestmark = [pytest.mark.mlx, pytest.mark.model, pytest.mark.xdist_group("served")]
SCHEME = "turbo:k8v8+stored"  # by design.md answers do not depend on how prompts are cut
QUESTIONS = ["Name a river.", "What is the capital of France?", "Write one line about the sea."]


@pytest.fixture(scope="module")
def server(demo):
    with serving(demo, SCHEME, context=2048, max_tokens=12) as it:
        yield it


def asked(it, question, **more):
    return it.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": question}], **more
    )


def generated(pair, question, max_tokens):
    model, tokenizer = pair
    with kvstow.attached(model, SCHEME) as report:
        session = Session(model, tokenizer, report)
        return "".join(session.generate(session.encode(question), max_tokens=max_tokens))


def test_the_answer_is_that_of_kvstow_generate(server, demo):
    text = asked(server, QUESTIONS[0]).choices[0].message.content
    assert text == generated(demo, QUESTIONS[0], 12)


def tokens(answer):
    return [(t.token, t.top_logprobs) for t in answer.choices[0].logprobs.content]


def assert_same(one, other):
    """Token by token, up to where the two likeliest are nearly equal (docs/limits.md)."""
    for (a, tops), (b, _) in zip(one, other, strict=False):
        if a != b:
            assert tops[0].logprob - tops[1].logprob < 0.1
            return
    assert len(one) == len(other)


def test_answers_of_concurrent_requests_are_those_of_single_ones(server):
    ask = {"logprobs": True, "top_logprobs": 2}
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda q: asked(server, f"{q} Now.", **ask), QUESTIONS))
    for question, answer in zip(QUESTIONS, together, strict=True):
        assert_same(tokens(asked(server, f"{question} Now.", **ask)), tokens(answer))


def test_a_second_turn_finds_the_first_in_the_cache_and_goes_on_as_without(server, demo):
    turns = [{"role": "user", "content": "Name a colour."}]
    first = server.client.chat.completions.create(model="tiny", messages=turns)
    turns.append({"role": "assistant", "content": first.choices[0].message.content})
    turns.append({"role": "user", "content": "And another one."})
    ask = {"model": "tiny", "messages": turns, "logprobs": True, "top_logprobs": 2}
    second = server.client.chat.completions.create(**ask)
    n_first = first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= n_first
    server.engine.prompt_cache.trim_to(n_sequences=0)  # nothing runs
    fresh = server.client.chat.completions.create(**ask)
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert_same(tokens(fresh), tokens(second))
    assert demo[1].has_chat_template


def test_a_stop_word_written_in_other_tokens_ends_the_answer(server, demo):
    """mlx-lm compares tokens, and these are never drawn."""
    text = asked(server, QUESTIONS[1]).choices[0].message.content
    at = text.index(" ", 4)
    stop = text[at - 2 : at + 2]  # from the middle of one word to the middle of the next
    drawn = demo[1].encode(text, add_special_tokens=False)
    assert not set(demo[1].encode(stop, add_special_tokens=False)) <= set(drawn)
    answer = asked(server, QUESTIONS[1], stop=stop)
    assert answer.choices[0].message.content == text[: at - 2]
    assert answer.choices[0].finish_reason == "stop"


def test_a_text_goes_on_with_the_space_that_belongs_there(server):
    answer = server.client.completions.create(
        model="tiny", prompt="The capital of France is", max_tokens=2, logprobs=0
    )
    found = answer.choices[0]
    assert found.text.startswith(" Paris")
    assert "".join(found.logprobs.tokens) == found.text
