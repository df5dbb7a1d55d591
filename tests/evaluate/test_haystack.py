"""Facts planted in a text, by a tokenizer of one token a letter."""

import pytest

from kvstow.errors import TextError
from kvstow.evaluate.haystack import OPENING, Haystack, about
from kvstow.evaluate.texts import Text, bundled

BEGIN = 1  # what many vocabularies put before every text


class Letters:
    def encode(self, text, add_special_tokens=True):
        return [BEGIN] * add_special_tokens + list(map(ord, text))

    def decode(self, tokens):
        return "".join(map(chr, tokens))


TEXTS = [Text("made", "x", " ".join(f"Sentence {i} says little." for i in range(60)))]


@pytest.fixture
def haystack():
    return Haystack(Letters(), TEXTS)


def text_of(prompt):
    assert prompt.haystack[0] == BEGIN
    assert BEGIN not in prompt.haystack[1:] + prompt.question
    return Letters().decode(prompt.haystack[1:])


@pytest.mark.parametrize("length", [200, 333, 1000])
@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_prompt_has_exactly_its_length(haystack, length, depth):
    prompt = haystack.plant(length, depth, 0)
    assert len(prompt.haystack) + len(prompt.question) == length
    assert prompt.cell == (length, depth)


def test_the_fact_is_in_the_text_once_and_the_question_is_its_beginning(haystack):
    for seed in range(5):
        prompt = haystack.plant(600, 0.5, seed)
        text = text_of(prompt)
        question = Letters().decode(prompt.question)
        assert question.startswith("\n\nThe secret code of ")
        assert text.count(f" {question.strip()} {prompt.number}.") == 1
        assert text.count("secret code of") == 2  # and the opening line
        assert prompt.number not in question
        assert len(set(prompt.number)) == 5


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_the_fact_is_between_sentences_near_its_depth(haystack, depth):
    prompt = haystack.plant(1200, depth, 1)
    text = text_of(prompt).removeprefix(OPENING)
    fact = f" {Letters().decode(prompt.question).strip()} {prompt.number}."
    before, after = text.split(fact)
    assert not before or before.endswith(".") or not after
    assert len(before) == pytest.approx(depth * (len(before) + len(after)), abs=30)


def test_a_seed_is_one_city_number_and_text_at_every_depth(haystack):
    first, last = (haystack.plant(600, depth, 7) for depth in (0, 1))
    assert (first.number, first.question) == (last.number, last.question)
    assert sorted(first.haystack) == sorted(last.haystack)
    assert haystack.plant(600, 0, 7) == first
    assert len({haystack.plant(600, 0, seed).number for seed in range(10)}) == 10


def test_what_follows_the_end_of_the_texts_is_their_beginning(haystack):
    longest = [haystack.plant(haystack.n_tokens, 0.5, seed) for seed in range(4)]
    assert any("Sentence 59 says little.Sentence 0" in text_of(p) for p in longest)


def test_texts_that_are_too_short_are_refused(haystack):
    with pytest.raises(TextError, match=f"the texts have {haystack.n_tokens} tokens"):
        haystack.plant(haystack.n_tokens + 200, 0.5, 0)


def test_a_length_without_room_for_text_is_refused(haystack):
    with pytest.raises(TextError, match="a prompt of 100 tokens has no room for text"):
        haystack.plant(100, 0.5, 0)


def test_lines_of_code_are_boundaries_too():
    code = "\n".join(f"x{i} = f(x{i - 1})" for i in range(100))
    prompt = Haystack(Letters(), [Text("file", "a.py", code)]).plant(500, 0.5, 0)
    fact = f" {Letters().decode(prompt.question).strip()} {prompt.number}."
    assert text_of(prompt).split(fact)[0].endswith("\n")


def test_equal_digests_are_equal_prompts():
    haystack = Haystack(Letters(), bundled(["moby-dick"]))
    texts = bundled(["moby-dick"])
    one, same, other = ([haystack.plant(500, 0.5, seed)] for seed in (0, 0, 1))
    assert about(texts, one) == about(texts, same)
    assert about(texts, one)["sha256"] != about(texts, other)["sha256"]
    assert about(texts, one)["sources"] == {"moby-dick": 16}
