"""A prompt is read once, and many runs go on from the file."""

import json
import os
import shutil

import pytest

from kvstow import Scheme
from kvstow.snapshot import Snapshot

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
resuming = pytest.importorskip("kvstow.cli.resume")


@pytest.fixture
def saved(cli, tiny, tmp_path):
    """Save a cache of the tiny llama; returns the file."""

    def run(*options, model=tiny.llama, text="hi there", name="x.safetensors"):
        output = tmp_path / name
        args = ["--model", model, "--prompt", text, "--output", output, *options]
        result = cli("cache", "save", *args)
        assert result.exit_code == 0, result.output
        return output

    return run


@pytest.fixture
def answer(cli, tiny):
    """The JSON of a run of the tiny llama."""

    def run(*options, prompt="hello", model=tiny.llama):
        args = ["--model", model, "--prompt", prompt, "--max-tokens", 5, "--json", *options]
        result = cli("generate", *args)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def test_a_long_text_and_a_question_are_one_turn(saved, answer):
    whole = answer(prompt="hi there, hello")
    resumed = answer("--resume", saved(text="hi there,"), prompt=" hello")
    assert resumed["resumed_tokens"] + resumed["prompt_tokens"] == whole["prompt_tokens"]
    assert (whole["resumed_tokens"], resumed["resumed_tokens"]) == (0, 1 + len("?? there,") - 1)
    assert resumed["kv_tokens"] == whole["kv_tokens"]


@pytest.mark.parametrize("template", ["--chat-template", "--no-chat-template"])
def test_without_a_scheme_and_cut_anywhere_the_answer_is_that_of_the_whole_prompt(
    saved, answer, template
):
    path = saved("--kv-quant", "off", template, text="hi there,")
    resumed = answer("--resume", path, template, prompt=" hello")
    assert (
        resumed["text"] == answer("--kv-quant", "off", template, prompt="hi there, hello")["text"]
    )


def test_one_file_is_used_many_times_and_stays_as_it_is(saved, answer):
    path = saved()
    before = path.read_bytes()
    first, second = (answer("--resume", path)["text"] for _ in range(2))
    assert first == second
    assert answer("--prompt-cache-file", path)["text"] == first  # mlx-lm's word for it
    assert path.read_bytes() == before


def test_the_system_turn_is_in_the_file(saved, answer):
    path = saved("--system-prompt", "be nice", text="hi")
    whole = answer("--system-prompt", "be nice", prompt="hi there")
    resumed = answer("--resume", path, prompt=" there")
    assert resumed["resumed_tokens"] + resumed["prompt_tokens"] == whole["prompt_tokens"]


def test_the_scheme_is_that_of_the_file_unless_one_is_given(saved, answer, tmp_path):
    path = saved("--kv-quant", "turbo:k8v5")
    assert answer("--resume", path)["scheme"] == "turbo:k8v5"
    better = answer("--resume", path, "--kv-quant", "turbo:k8v5+search")
    assert better["scheme"] == "turbo:k8v5+search"
    policy = tmp_path / "policy.json"
    policy.write_text('{"rules": [{"layers": 1, "scheme": "off"}]}')
    path = saved("--kv-policy", policy, name="y")
    assert answer("--resume", path)["scheme"] == "policy(turbo:k8v3; 1: off)"
    assert answer("--resume", path, "--kv-policy", policy)["layers"]["quantised"] == 1


@pytest.mark.parametrize("scheme", ["off", "affine:8", "turbo:k4v2", "turbo:k8v3+start100"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_every_scheme_is_saved_and_resumed(saved, answer, tiny, scheme, model):
    model = getattr(tiny, model)
    path = saved("--kv-quant", scheme, model=model)
    assert answer("--resume", path, model=model)["scheme"] == str(Scheme.parse(scheme))


def test_saving_says_what_it_did(cli, tiny, tmp_path):
    args = ("cache", "save", "--model", tiny.llama, "--prompt", "hi", "-o", tmp_path / "x")
    said = json.loads(cli(*args, "--json").stdout)
    assert said["bytes"] == (tmp_path / "x").stat().st_size
    assert (said["tokens"], said["scheme"]) == (len("<s>h") - 2, "turbo:k8v3")
    assert said["layers"]["quantised"] == 2
    assert "2 tokens in" in cli(*args).stdout


def test_showing_says_what_is_in_the_file(cli, saved, tiny):
    path = saved("--kv-quant", "turbo:k8v4")
    said = json.loads(cli("cache", "show", path, "--json").stdout)
    with Snapshot(path) as snapshot:
        assert said["tokens"] == len(snapshot.tokens())
        assert said["tensors_checked"] == len(snapshot.tensors) == 11
        assert said["weights"] == snapshot.manifest.model.weights
    per_token = Scheme.parse("turbo:k8v4").bytes_per_token(64)
    assert said["kv_bytes"] == 2 * 2 * per_token * said["tokens"]
    assert said["layers"] == [{"layers": "0-1", "shape": "full 2 x 64", "scheme": "turbo:k8v4"}]
    assert said["notes"] == {"model": str(tiny.llama), "chat_template": "true"}
    shown = cli("cache", "show", path).stdout
    assert "0-1: full 2 x 64, turbo:k8v4" in shown
    assert "checked     11 tensors" in shown


def test_showing_a_damaged_file_says_so_and_fails(refused, saved):
    path = saved()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert "the checksum of tensor 1.value_scales does not fit" in refused(
        "cache", "show", path, code=1
    )


# Refusals, before weights load where it can be known


@pytest.mark.usefixtures("no_load")
def test_a_place_that_cannot_be_written_is_refused_before_weights_load(refused, tiny, tmp_path):
    args = ("cache", "save", "--model", tiny.llama, "--prompt", "hi", "-o")
    said = refused(*args, tmp_path / "none" / "x", code=2)
    assert f"cannot write in {tmp_path / 'none'}: No such file or directory" in said
    assert "Not a directory" in refused(*args, tiny.llama / "x", code=2)
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"weights, not a cache")
    assert "it is not replaced" in refused(*args, other, code=2)
    assert other.read_bytes() == b"weights, not a cache"
    assert "no file" in refused(*args, os.devnull, code=2)


def test_a_saved_cache_is_replaced_be_it_damaged_or_not(saved):
    path = saved(text="hi")
    size = path.stat().st_size
    assert saved(text="hi there").stat().st_size > size
    path.write_bytes(path.read_bytes()[:-1])
    assert saved(text="hi").stat().st_size == size


def refuse_resume(refused, monkeypatch, path, *options, model, code=1):
    monkeypatch.setattr("kvstow.cli.generate.load", lambda *_, **__: pytest.fail("weights loaded"))
    args = ("generate", "--model", model, "--prompt", "x", "--resume", path, *options)
    return refused(*args, code=code)


def test_a_file_that_is_no_cache_is_refused_before_weights_load(refused, tiny, monkeypatch):
    said = refuse_resume(refused, monkeypatch, tiny.llama, model=tiny.llama)
    assert "this is not a snapshot of kvstow" in said


def test_another_scheme_is_refused_before_weights_load(refused, saved, tiny, monkeypatch):
    options = ("--kv-quant", "turbo:k8v4")
    said = refuse_resume(refused, monkeypatch, saved(), *options, model=tiny.llama)
    assert "stored under turbo:k8v3, and turbo:k8v4 is asked for" in said


def test_another_model_is_refused_before_weights_load(refused, saved, tiny, monkeypatch):
    said = refuse_resume(refused, monkeypatch, saved(), model=tiny.gemma3)
    assert "computed by a llama" in said


def test_other_weights_are_refused_before_the_prompt_is_read(refused, saved, tiny):
    path = saved()
    args = ("generate", "--model", tiny.other, "--prompt", "x", "--resume", path)
    assert "other weights" in refused(*args, code=1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--system-prompt", "x"), "--system-prompt comes before"),
        (("--draft-model", "smollm2"), "--draft-model has not read"),
        (("--no-chat-template",), "was saved with --chat-template: give it here too"),
    ],
)
def test_options_that_contradict_the_file_are_refused(
    refused, saved, tiny, monkeypatch, options, why
):
    said = refuse_resume(refused, monkeypatch, saved(), *options, model=tiny.llama, code=2)
    assert why in said


def test_a_prompt_that_does_not_fit_behind_the_file_is_refused(refused, saved, tiny):
    path = saved("--no-chat-template", text="a" * 200)
    args = ("generate", "--model", tiny.llama, "--no-chat-template", "--resume", path)
    said = refused(*args, "--prompt", "b" * 100, code=1)
    assert "the prompt has 300 tokens and leaves no room" in said


def test_a_file_that_changes_after_the_command_started_is_checked_again(
    saved, tiny, monkeypatch, refused
):
    path, other = saved("--kv-quant", "turbo:k8v4"), saved("--kv-quant", "turbo:k8v5", name="y")
    load = resuming.Resumed.load

    def swapped(self, model, tokenizer):
        shutil.copy(other, path)
        return load(self, model, tokenizer)

    monkeypatch.setattr(resuming.Resumed, "load", swapped)
    args = ("generate", "--model", tiny.llama, "--prompt", "x", "--resume", path)
    assert "stored under turbo:k8v5, and turbo:k8v4 is asked for" in refused(*args, code=1)
