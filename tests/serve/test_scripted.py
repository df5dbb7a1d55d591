"""The whole server over a model that says what it is told: tools, reasoning, characters."""

import copy
import json

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.tool_parsers import json_tools

from tests.serve.conftest import HELLO, serving

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("scripted")]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "ü"}}</tool_call>'
EOS = 258


class Scripted(llama.Model):
    """A llama that computes as any, and then draws the tokens of a script."""

    script = ()
    n_prompt = 0

    def __call__(self, inputs, cache=None, **options):
        logits = super().__call__(inputs, cache=cache, **options)
        if cache is None:
            return logits
        at = mx.array(cache[0].offset).reshape(-1) - self.n_prompt
        script = mx.array([*self.script, EOS])
        wanted = script[mx.clip(at, 0, len(self.script))]
        return mx.where(mx.arange(logits.shape[-1]) == wanted[:, None, None], 10.0, -10.0)


@pytest.fixture(scope="module")
def actor(tiny):
    """A model that can be told what to say, and a tokenizer whose template knows tools."""
    model, tokenizer = copy.deepcopy(tiny[0]), copy.copy(tiny[1])
    model.__class__ = type("Actor", (Scripted,), {})
    tokenizer._tool_call_start, tokenizer._tool_call_end = "<tool_call>", "</tool_call>"
    tokenizer._tool_parser = json_tools.parse_tool_call
    tokenizer._think_start, tokenizer._think_end = "<think>", "</think>"
    tokenizer._think_start_tokens = tuple(tokenizer.encode("<think>"))
    tokenizer._think_end_tokens = tuple(tokenizer.encode("</think>"))
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture(scope="module")
def server(actor):
    with serving(actor, "off", context=2000, max_tokens=400) as it:
        yield it


@pytest.fixture
def say(server, actor):
    """Let the model say a text; returns the answer whole, and put together from a stream."""

    def run(text, **ask):
        kind = type(actor[0])
        kind.script = actor[1].encode(text, add_special_tokens=False)
        kind.n_prompt = len(actor[1].apply_chat_template(HELLO, add_generation_prompt=True))
        ask = {"model": "tiny", "messages": HELLO} | ask
        server.engine.prompt_cache.trim_to(n_sequences=0)
        whole = server.client.chat.completions.create(**ask)
        return whole, list(server.client.chat.completions.create(**ask, stream=True))

    return run


def streamed(parts, name):
    return "".join(getattr(p.choices[0].delta, name, None) or "" for p in parts)


def test_tools_are_called(say):
    whole, parts = say(f"Let me see. {CALL}{CALL}", tools=[ADD])
    message = whole.choices[0].message
    assert (message.content, whole.choices[0].finish_reason) == ("Let me see. ", "tool_calls")
    for call in message.tool_calls:
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 1, "b": "ü"}
    assert streamed(parts, "content") == message.content
    calls = [call for p in parts for call in p.choices[0].delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [
        (i, c.function.name, c.function.arguments) for i, c in enumerate(message.tool_calls)
    ]
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_is_all_where_calls_may_not_be_parallel(say):
    whole, parts = say(f"{CALL}{CALL}", tools=[ADD], parallel_tool_calls=False)
    assert len(whole.choices[0].message.tool_calls) == 1
    assert sum(len(p.choices[0].delta.tool_calls or []) for p in parts) == 1
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_behind_a_call(server, say):
    whole, _ = say(CALL, tools=[ADD])
    message = whole.choices[0].message
    turns = [
        *HELLO,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"},
    ]
    server.client.chat.completions.create(model="tiny", messages=turns, tools=[ADD])


def test_reasoning_is_apart_from_the_answer(say):
    whole, parts = say("<think>Hm, ü.</think>Yes.")
    message = whole.choices[0].message
    assert (message.reasoning, message.content) == ("Hm, ü.", "Yes.")
    assert streamed(parts, "reasoning") == message.reasoning
    assert streamed(parts, "content") == message.content


def test_a_character_of_several_tokens_is_never_streamed_in_pieces(say):
    text = "Grüße aus 東京 🙂!"
    whole, parts = say(text, logprobs=True)
    assert whole.choices[0].message.content == streamed(parts, "content") == text
    content = whole.choices[0].logprobs.content
    assert len(content) == len(text.encode())  # the vocabulary is of bytes
    assert b"".join(bytes(t.bytes) for t in content) == text.encode()
    assert whole.usage.completion_tokens == len(content) + 1  # and the end


@pytest.mark.parametrize("stop", ["###", "a#", ["xyz", "##"], "bc##"])
def test_no_part_of_a_stop_word_is_streamed(say, stop):
    text = "abc###def"
    whole, parts = say(text, stop=stop, logprobs=True)
    words = [stop] if isinstance(stop, str) else stop
    until = min((text.index(w) for w in words if w in text), default=len(text))
    assert whole.choices[0].message.content == streamed(parts, "content") == text[:until]
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "stop"
    assert "".join(t.token for t in whole.choices[0].logprobs.content) == text[:until]


def test_an_answer_that_its_length_ends_is_given_as_far_as_it_came(say):
    whole, parts = say("abcdef", max_tokens=3, stop="cdef")
    assert whole.choices[0].message.content == streamed(parts, "content") == "abc"
    assert whole.choices[0].finish_reason == "length"
