"""``kvstow eval diff`` on a tiny model."""

import json

import pytest

pytestmark = pytest.mark.mlx

ROUGH = ("--arm", "off", "--arm", "turbo:k2v2")


@pytest.fixture
def diff(cli, tiny):
    def run(*options, prompt=("--prompt", "hi hi")):
        return cli("eval", "diff", "--model", tiny.llama, *prompt, *options)

    return run


def answer(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_texts_that_part_are_shown_with_the_two_tokens_and_their_gaps(diff):
    found = answer(diff(*ROUGH, "--json"))
    lines = diff(*ROUGH).stdout.splitlines()
    at = found["parting"]["index"]
    start = next(i for i, line in enumerate(lines) if line.startswith("The texts part"))
    assert lines[start].startswith(f"The texts part at token {at + 1}: ")
    assert all(repr(text) in lines[start] for text in found["parting_texts"])
    for line, arm, gap in zip(
        lines[start + 1 :], found["arms"], found["parting"]["gaps"], strict=True
    ):
        assert line.startswith(f"  {arm}: ")
        assert line.endswith(f"its own is ahead by {gap:.4f}")


def test_equal_texts_are_said_to_be_equal(diff):
    same = ("--arm", "off", "--arm", "off", "--max-tokens", 5)
    result = diff(*same)
    assert result.stdout.splitlines()[-1] == "The texts are equal: all 5 tokens."
    found = answer(diff(*same, "--json"))
    assert found["parting"] is None
    assert found["parting_texts"] is None
    assert found["texts"][0] == found["texts"][1]


def test_without_arms_the_default_scheme_is_compared_with_none(diff):
    assert answer(diff("--json", "--max-tokens", 2))["arms"] == ["off", "turbo:k8v3"]


def test_the_chat_template_is_used_unless_it_is_turned_off(diff):
    with_template = answer(diff("--json", "--max-tokens", 1))["prompt_tokens"]
    bare = answer(diff("--json", "--max-tokens", 1, "--no-chat-template"))["prompt_tokens"]
    assert bare < with_template


def test_a_prompt_is_the_same_from_a_file(diff, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hi hi")
    given = [("--prompt", "hi hi"), ("--prompt-file", file)]
    assert len({diff("--json", *ROUGH, prompt=prompt).stdout for prompt in given}) == 1


def test_a_text_ends_where_the_context_does(diff):
    found = answer(diff("--json", "--max-tokens", 1000, "--no-chat-template"))
    assert all(found["prompt_tokens"] + len(tokens) <= 256 for tokens in found["tokens"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--arm", "off"), "expected two arms, got 1"),
        (("--arm", "off", *ROUGH), "expected two arms, got 3"),
        (("--arm", "off", "--arm", "turbo:k3v3"), "key bits must be one of"),
        (("--max-tokens", 0), "--max-tokens"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(refused, tiny, options, why):
    said = refused("eval", "diff", "--model", tiny.llama, "--prompt", "hi", *options, code=2)
    assert why in " ".join(said.split())


@pytest.mark.parametrize("prompt", [(), ("--prompt", " ")])
def test_a_prompt_that_is_missing_or_empty_is_a_usage_error(refused, tiny, prompt):
    assert "prompt" in refused("eval", "diff", "--model", tiny.llama, *prompt, code=2)


def test_a_layer_that_there_is_not_is_one_line(refused, tiny):
    ask = ("--prompt", "hi", "--arm", "off", "--arm", "turbo:k8v3@layer9")
    assert "cache 9" in refused("eval", "diff", "--model", tiny.llama, *ask, code=1)


def test_a_prompt_beyond_the_context_is_one_line(refused, tiny):
    ask = ("eval", "diff", "--model", tiny.llama, "--prompt", "x" * 300)
    assert "leaves no room" in refused(*ask, code=1)
