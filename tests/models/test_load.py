import contextlib
import importlib
import sys

import numpy as np
import pytest

from kvstow import KvstowWarning, MissingDependency, ModelFileError
from kvstow.models import load
from kvstow.models.architectures import MODEL_TYPES

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")
TEXT = "hi 42"
ON_CPU = mx.default_device() == mx.cpu


def slow(dtype):
    """The warning of a model in two-byte numbers on a CPU, which has to come."""
    if ON_CPU and dtype != "float32":
        return pytest.warns(KvstowWarning, match=f"weights in {dtype} are many times slower")
    return contextlib.nullcontext()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_each_architecture_loads_and_runs(tiny_gguf, architecture):
    model, tokenizer = load(str(tiny_gguf(architecture)))
    tokens = tokenizer.encode(TEXT)
    logits = np.array(model(mx.array([tokens]))[0], np.float32)
    assert logits.shape == (len(tokens), model.args.vocab_size)
    assert np.isfinite(logits).all()
    assert np.ptp(logits) > 0


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_tokenizer_survives_the_round_trip(tiny_gguf, architecture):
    _, tokenizer = load(str(tiny_gguf(architecture)))
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=True) == TEXT
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<s>hi</s>"


@pytest.mark.usefixtures("cache")
def test_a_sentencepiece_prompt_begins_with_bos_and_a_byte_level_one_does_not(tiny_gguf):
    _, gemma = load(str(tiny_gguf("gemma3")))
    _, llama = load(str(tiny_gguf("llama")))
    assert gemma.encode("hi")[0] == gemma.bos_token_id == 2
    assert llama.encode("hi") == [256]


@pytest.mark.usefixtures("cache")
def test_smollm_splits_digits_one_by_one(tiny_gguf):
    _, tokenizer = load(str(tiny_gguf()))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("42")] == ["4", "2"]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_that_is_asked_for_is_the_models(tiny_gguf, dtype):
    with slow(dtype):
        model, _ = load(str(tiny_gguf()), dtype=dtype)
    assert model.model.embed_tokens.weight.dtype == getattr(mx, dtype)


@pytest.mark.usefixtures("cache")
def test_a_gguf_is_float32_on_a_cpu_and_bfloat16_elsewhere(tiny_gguf):
    model, _ = load(str(tiny_gguf()))
    assert model.model.norm.weight.dtype == (mx.float32 if ON_CPU else mx.bfloat16)


@pytest.mark.usefixtures("cache")
def test_a_directory_keeps_its_dtype_unless_another_is_asked_for(tiny_gguf, cache):
    with slow("bfloat16"):
        load(str(tiny_gguf()), dtype="bfloat16")
    (directory,) = (cache / "models").iterdir()
    with slow("bfloat16"):
        kept, _ = load(str(directory))
    cast, _ = load(str(directory), dtype="float32")
    assert kept.model.norm.weight.dtype == mx.bfloat16
    assert cast.model.norm.weight.dtype == mx.float32


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_directory_is_an_error_that_names_it(tiny_gguf, cache, damage):
    load(str(tiny_gguf()))
    (directory,) = (cache / "models").iterdir()
    (directory / damage).write_bytes((directory / damage).read_bytes()[:-40])
    with pytest.raises(ModelFileError, match=f"mlx-lm cannot load {directory}"):
        load(str(directory))


@pytest.mark.parametrize("absent", ["mlx.core", "mlx_lm", "gguf.constants"])
@pytest.mark.usefixtures("cache")
def test_a_missing_framework_is_named_with_its_command(tiny_gguf, monkeypatch, absent):
    path = str(tiny_gguf())
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependency, match=r"needs \w+: pip install 'kvstow\[mlx\]'"):
        importlib.import_module("kvstow.models").load(path)


@pytest.mark.model
def test_smollm2_names_the_capital_of_france_and_stops(smollm2):
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    *_, last = answer = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=40))
    assert "Paris" in "".join(part.text for part in answer)
    assert last.finish_reason == "stop"
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


@pytest.mark.model
def test_smollm2_tokenizes_as_llama_cpp_does(smollm2):
    _, tokenizer = smollm2
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("In 2024, I'm 15  x")]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " I", "'m", " ", "1", "5", " ", " x"]
