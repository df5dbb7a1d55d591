"""``kvstow generate --draft-model``."""

import json

import pytest

pytestmark = pytest.mark.mlx
pytest.importorskip("mlx_lm")

MAMBA = {
    "model_type": "mamba",
    "conv_kernel": 4,
    "state_size": 8,
    "time_step_rank": 8,
    "use_bias": False,
    "use_conv_bias": True,
}


@pytest.fixture
def generate(cli, tiny):
    """Answer "hi" with the tiny llama; the one JSON object that is printed."""

    def run(*options):
        prompt = ("--prompt", "hi", "--no-chat-template")
        result = cli("generate", "--model", tiny.llama, *prompt, "-m", 12, "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


# The answer


@pytest.mark.parametrize("scheme", ["off", "turbo:k8v3", "affine:8"])
def test_a_draft_model_changes_no_letter_and_its_acceptance_is_told(generate, tiny, scheme):
    # Under +stored whatever the prompt; "hi" is one token, which a draft follows at once.
    stored = scheme + "+stored" if scheme.startswith("turbo") else scheme
    alone = generate("--kv-quant", stored)
    with_other = generate("--kv-quant", stored, "--draft-model", tiny.other)
    with_itself = generate("--kv-quant", stored, "--draft-model", tiny.llama)
    assert alone["text"] == with_other["text"] == with_itself["text"]
    good, bad = with_itself["draft"], with_other["draft"]
    assert (good["acceptance_rate"], good["accepted_tokens"]) == (1, 9)
    assert bad["acceptance_rate"] < 0.5
    assert bad["acceptance_rate"] == round(bad["accepted_tokens"] / bad["proposed_tokens"], 4)
    for report in (good, bad):
        assert (report["scheme"], report["num_draft_tokens"]) == (stored, 3)
        assert report["layers"] == alone["layers"]
        assert report["kv_bytes"] == alone["kv_bytes"]


@pytest.mark.parametrize("n", [1, 7])
def test_the_number_of_draft_tokens_is_the_one_asked_for(generate, tiny, n):
    pair = ("--draft-model", tiny.llama, "--kv-quant", "turbo:k8v3+stored")
    report = generate(*pair, "--num-draft-tokens", n)["draft"]
    assert report["num_draft_tokens"] == n
    assert report["accepted_tokens"] == 12 - 12 // (n + 1)


def test_the_summary_for_people_says_how_many_proposals_were_accepted(cli, tiny):
    args = ("--model", tiny.llama, "--draft-model", tiny.llama, "-p", "hi", "-m", 8)
    lines = cli("generate", *args).stderr.splitlines()
    assert "draft       turbo:k8v3: 2 of 2 layers, deferred" in lines
    assert "            100% of 6 proposed tokens accepted, 3 at a time" in lines


# What is refused


def test_a_number_of_draft_tokens_without_a_draft_model_is_a_usage_error(refused):
    error = " ".join(refused("generate", "-p", "hi", "--num-draft-tokens", 2, code=2).split())
    assert "--num-draft-tokens needs --draft-model" in error


@pytest.mark.parametrize("n", [0, 65])
def test_a_number_of_draft_tokens_out_of_range_is_a_usage_error(refused, n):
    args = ("generate", "-p", "hi", "--draft-model", "smollm2", "--num-draft-tokens", n)
    assert "'--num-draft-tokens'" in refused(*args, code=2)


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(
    ("config", "draft", "options", "message"),
    [
        ({}, {"head_dim": 80}, (), "the draft model: turbo:k8v3 needs head_dim in"),
        ({}, {"model_type": "rwkv99"}, (), "the draft model: mlx-lm"),
        ({}, MAMBA, ("--kv-quant", "off"), "the draft model cannot decode speculatively: its Arr"),
        (MAMBA, {}, ("--kv-quant", "off"), "the model cannot decode speculatively: its ArraysC"),
        ({}, {"vocab_size": 64}, (), "may propose any of 64 tokens, and the model has embed"),
    ],
)
def test_two_models_that_cannot_speculate_are_refused_before_weights_load(
    refused, directory, config, draft, options, message
):
    pair = ("--model", directory(**config), "--draft-model", directory(**draft))
    assert message in refused("generate", "-p", "hi", *pair, *options, code=1)


@pytest.mark.usefixtures("no_load")
def test_a_draft_model_that_is_not_there_is_named_as_such(refused, tiny):
    args = ("generate", "-p", "hi", "--model", tiny.llama, "--draft-model", "./absent.gguf")
    assert "the draft model: no such file" in refused(*args, code=1)


@pytest.mark.usefixtures("no_load")
def test_another_tokenizer_is_refused_before_weights_load(refused, tiny):
    args = ("generate", "-p", "hi", "--model", tiny.gemma3, "--draft-model", tiny.llama)
    error = refused(*args, code=1)
    assert "the draft model has another tokenizer than the model: token 0 is" in error


def test_a_tokenizer_that_only_its_own_code_can_read_is_compared_once_loaded(
    refused, tiny, monkeypatch
):
    draft = pytest.importorskip("kvstow.cli.draft")
    monkeypatch.setattr(draft, "read_vocabulary", lambda _: None)
    args = ("generate", "-p", "hi", "--model", tiny.gemma3, "--draft-model", tiny.llama)
    assert "another tokenizer" in refused(*args, code=1)


def test_a_text_that_would_fill_a_sliding_window_is_refused(refused, tiny):
    pair = ("--model", tiny.gemma3, "--draft-model", tiny.gemma3)
    error = refused("generate", "-p", "hi", *pair, "-m", 40, code=1)
    assert "the model cannot decode speculatively a prompt of" in error
    assert "sliding window of 32 tokens" in error
