"""From tokens to an answer, with an engine that only pretends."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import Response
from mlx_lm.tool_parsers.json_tools import parse_tool_call

from kvstow.serve.answer import Answer, Part, Wanted
from kvstow.serve.responses import ChatFormat, TextFormat, Usage
from kvstow.serve.stops import Stops

EOS = 0
STATES = {
    "normal": [("<think>", "reasoning"), ("<tool_call>", "tool")],
    "reasoning": [("</think>", "normal")],
    "tool": [("</tool_call>", "normal")],
    "header": [("to=user|", "normal")],
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_ids = frozenset({EOS})
    detokenizer = None

    def convert_ids_to_tokens(self, token):
        return chr(token)

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def responses(pieces, finish="stop"):
    """What the engine puts for pieces of text; ``stop`` ends with EOS."""
    pieces = list(pieces)
    last = [] if finish == "length" else [("", EOS, "stop")]
    for i, text in enumerate(pieces):
        ends = finish == "length" and i == len(pieces) - 1
        yield Response(text, ord(text[-1]) if text else 1, -0.5, "length" if ends else None, ())
    for text, token, reason in last:
        yield Response(text, token, -0.1, reason, ())


def answered(pieces, finish="stop", wanted=None, state="normal"):
    """The parts of an answer, and why it ended."""
    machine = TextStateMachine(STATES)
    context = SimpleNamespace(text_sm=machine, initial_state=state, tool_parser=parse_tool_call)
    answer = Answer(context, Letters(), wanted or Wanted())
    parts = []
    for response in responses(pieces, finish):
        parts.append(answer.feed(response))
        if answer.finish_reason is not None:
            break
    return parts, answer.finish_reason


def whole(*args, **options):
    parts, reason = answered(*args, **options)
    return sum(parts, Part()), reason


CUTS = (1, 2, 3, 7, 100)


def cut(text, n):
    return [text[i : i + n] for i in range(0, len(text), n)]


@pytest.mark.parametrize("n", CUTS)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stop_word_ends_the_text_however_it_is_cut(n, finish):
    part, reason = whole(cut("abcSTOPdef", n), finish, Wanted(stops=["STOP", "x"]))
    assert (part.text, reason) == ("abc", "stop")


@pytest.mark.parametrize("n", CUTS)
def test_the_beginning_of_a_stop_word_is_text_where_nothing_follows(n):
    part, reason = whole(cut("abcSTO", n), "stop", Wanted(stops=["STOP"]))
    assert (part.text, reason) == ("abcSTO", "stop")


def test_nothing_of_a_stop_word_is_ever_streamed():
    parts, _ = answered(cut("abSTSTOP", 1), "length", Wanted(stops=["STOP"]))
    assert [p.text for p in parts] == ["a", "b", "", "", "ST", "", "", ""]


def test_a_stop_word_that_the_engine_found_is_cut_off_though_its_last_token_has_no_text():
    answer = Answer(
        SimpleNamespace(text_sm=TextStateMachine(STATES), initial_state="normal", tool_parser=None),
        Letters(),
        Wanted(stops=["ST"]),
    )
    first = answer.feed(Response("aS", ord("S"), -0.5, None, ()))
    last = answer.feed(Response("", ord("T"), -0.5, "stop", ()))
    assert ((first + last).text, answer.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("n", CUTS)
def test_of_two_stop_words_the_one_that_is_whole_first_ends_the_text(n):
    stops = Stops(["bcdef", "cd"])
    assert ("".join(map(stops.feed, cut("abcdef", n))), stops.found) == ("ab", True)


@pytest.mark.parametrize("n", CUTS)
def test_reasoning_and_text_are_told_apart(n):
    part, reason = whole(cut("<think>hm</think>yes", n))
    assert (part.reasoning, part.text, reason) == ("hm", "yes", "stop")


def test_an_answer_may_begin_with_reasoning_that_the_prompt_has_opened():
    part, _ = whole(["hm</think>yes"], state="reasoning")
    assert (part.reasoning, part.text) == ("hm", "yes")


@pytest.mark.parametrize("n", CUTS)
def test_the_header_of_a_message_is_no_text(n):
    part, _ = whole(cut("to=user|yes", n), state="header")
    assert part.text == "yes"


@pytest.mark.parametrize("n", CUTS)
def test_tool_calls_are_read(n):
    part, reason = whole(cut(f"so {CALL}{CALL}", n))
    assert (part.text, reason) == ("so ", "tool_calls")
    assert [c["function"] for c in part.tool_calls] == [
        {"name": "add", "arguments": '{"a": 1}'}
    ] * 2
    assert len({c["id"] for c in part.tool_calls}) == 2


@pytest.mark.parametrize("n", CUTS)
def test_the_answer_ends_with_its_first_call_where_one_is_wanted(n):
    part, reason = whole(cut(f"{CALL}{CALL}more", n), wanted=Wanted(one_call=True))
    assert (len(part.tool_calls), part.text, reason) == (1, "", "tool_calls")


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken}</tool_call>", '<tool_call>{"name": "add", "argum']
)
def test_a_call_that_cannot_be_read_is_not_lost(text):
    part, reason = whole([text], "length")
    inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert (part.text, part.tool_calls, reason) == (inner, (), "length")


def test_a_text_completion_keeps_its_markers():
    part, _ = whole([f"<think>a{CALL}"], wanted=Wanted(raw=True))
    assert part.text == f"<think>a{CALL}"


def test_log_probabilities_are_those_of_the_text_alone():
    part, _ = whole(cut("abcST", 1), wanted=Wanted(stops=["ST"], n_top_logprobs=0))
    assert b"".join(one.data for one in part.likelihoods) == b"abc"
    part, _ = whole(cut("abc", 1), wanted=Wanted(n_top_logprobs=0))
    assert b"".join(one.data for one in part.likelihoods) == b"abc"  # without EOS


def test_streamed_calls_are_numbered_and_end_with_a_reason():
    form = ChatFormat("m")
    parts, reason = answered([CALL, "and ", CALL])
    deltas = [form.chunk(p)["choices"][0]["delta"] for p in parts if p]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert json.loads(calls[1]["function"]["arguments"]) == {"a": 1}
    assert form.last(reason)["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "tool_calls",
    }


def test_a_whole_answer_that_only_calls_has_no_content():
    part, reason = whole([CALL])
    message = ChatFormat("m").whole(part, reason, Usage(1, 2, 0))["choices"][0]["message"]
    assert message["content"] is None
    part, reason = whole(["yes"])
    body = TextFormat("m").whole(part, reason, Usage(1, 2, 1))
    assert body["choices"][0]["text"] == "yes"
    assert body["usage"]["total_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
