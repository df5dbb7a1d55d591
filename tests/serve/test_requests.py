"""Bodies of requests, by themselves."""

import json

import pytest

pytest.importorskip("pydantic")

from kvstow.serve.refusal import Refusal
from kvstow.serve.requests import HARMLESS, NOT_DONE, read_chat, read_text

HELLO = {"role": "user", "content": "hello"}


def chat(**fields):
    return read_chat(json.dumps({"messages": [HELLO]} | fields).encode())


def text(**fields):
    return read_text(json.dumps({"prompt": "hello"} | fields).encode())


BAD = [
    (chat, {"temperature": -0.1}, "temperature"),
    (chat, {"temperature": "hot"}, "temperature"),
    (chat, {"temperature": True}, "temperature"),
    (chat, {"top_p": 0}, "top_p"),
    (chat, {"top_p": 1.1}, "top_p"),
    (chat, {"top_k": -1}, "top_k"),
    (chat, {"top_k": 1.5}, "top_k"),
    (chat, {"min_p": 2}, "min_p"),
    (chat, {"max_tokens": 0}, "max_tokens"),
    (chat, {"max_tokens": "9"}, "max_tokens"),
    (chat, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (chat, {"seed": -1}, "seed"),
    (chat, {"seed": 2**64}, "seed"),
    (chat, {"stop": ""}, "stop.0"),
    (chat, {"stop": ["a", 3]}, "stop.1"),
    (chat, {"stop": ["a"] * 17}, "stop"),
    (chat, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (chat, {"logit_bias": [1]}, "logit_bias"),
    (chat, {"presence_penalty": 3}, "presence_penalty"),
    (chat, {"frequency_penalty": -3}, "frequency_penalty"),
    (chat, {"repetition_penalty": 0}, "repetition_penalty"),
    (chat, {"logprobs": 1}, "logprobs"),
    (chat, {"top_logprobs": 2}, "top_logprobs"),
    (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (chat, {"stream": "yes"}, "stream"),
    (chat, {"stream_options": {"include_use": True}}, "stream_options.include_use"),
    (chat, {"model": 3}, "model"),
    (chat, {"messages": "hello"}, "messages"),
    (chat, {"messages": []}, "messages"),
    (chat, {"messages": None}, "messages"),
    (chat, {"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages.0.mood"),
    (chat, {"messages": [HELLO, {"role": "robot", "content": "a"}]}, "messages.1.role"),
    (chat, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    (
        *(chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        "messages.0.content",
    ),
    (
        chat,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[]"}}],
                }
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
    ),
    (chat, {"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    (
        *(chat, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
        "tools.0.function.strict",
    ),
    (text, {"prompt": None}, "prompt"),
    (text, {"prompt": ""}, "prompt"),
    (text, {"prompt": []}, "prompt"),
    (text, {"prompt": 3}, "prompt"),
    (text, {"prompt": ["a", "b"]}, "prompt"),
    (text, {"prompt": [1, "b"]}, "prompt"),
    (text, {"logprobs": 6}, "logprobs"),
    (text, {"logprobs": True}, "logprobs"),
    (text, {"messages": [HELLO]}, "messages"),
    (text, {"tools": []}, "tools"),
]


@pytest.mark.parametrize(
    ("read", "fields", "param"), BAD, ids=lambda x: getattr(x, "__name__", None) or str(x)[:50]
)
def test_what_is_out_of_range_or_of_another_type_is_refused_by_name(read, fields, param):
    with pytest.raises(Refusal) as refused:
        read(**fields)
    error = refused.value
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(("there is", param, "the prompt is empty"))


ASKED = {
    "audio": {"voice": "alloy"},
    "best_of": 2,
    "echo": True,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "n": 2,
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "suffix": "the end",
    "tool_choice": "required",
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("name", NOT_DONE)
def test_what_would_change_an_answer_is_refused_where_it_is_not_done(name):
    for read in (chat, text):
        with pytest.raises(Refusal, match=f"^{name} must be .*, got ") as refused:
            read(**{name: ASKED[name]})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", NOT_DONE)
def test_what_asks_for_nothing_is_taken(name):
    for value in (None, *NOT_DONE[name][0]):
        assert chat(**{name: value}) == chat() or name == "tool_choice"


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_changes_no_answer_is_taken(name):
    assert chat(**{name: "x"}) == chat()
    assert text(**{name: "x"}) == text()


def test_null_is_the_default_of_every_parameter():
    names = [n for n in type(chat()).model_fields if n != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_a_prompt_in_a_list_of_one_is_that_prompt():
    assert text(prompt=["hello"]) == text()
    assert text(prompt=[[1, 2]]).prompt == text(prompt=[1, 2]).prompt == [1, 2]


def test_parts_of_a_turn_are_one_text_and_a_developer_is_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": parts}, HELLO])
    turns = [message.for_template() for message in asked.messages]
    assert turns == [{"role": "system", "content": "ab"}, HELLO]


def test_an_answer_can_be_sent_back_as_it_came():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    turns = [m.for_template() for m in chat(messages=[HELLO, turn, result]).messages]
    assert turns[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert turns[1]["content"] == ""
    assert turns[2] == result


def test_the_newer_name_of_max_tokens_goes_first():
    assert chat(max_tokens=3, max_completion_tokens=4).new_tokens == ("max_completion_tokens", 4)
    assert chat(max_tokens=3).new_tokens == text(max_tokens=3).new_tokens == ("max_tokens", 3)
